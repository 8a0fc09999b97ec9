"""What a face is working on: reads may be cut short; changes, once begun, are finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar

from kvstore import api
from kvstore.errors import Unavailable

R = TypeVar("R")
READS: Final = frozenset({"lookup", *(call.name for call in api.CALLS if call.method == "GET")})


class InFlight:
    """Requests of the HTTP face between their arrival and their answer."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._reads: set[asyncio.Task[Any]] = set()
        self._changes: set[asyncio.Task[Any]] = set()

    async def run(self, name: str, work: Coroutine[Any, Any, R]) -> R:
        """A call, as what it is."""
        return await (self.read(work) if name in READS else self.change(work))

    async def read(self, work: Awaitable[R]) -> R:
        """Cancelled with its request, and when the node stops. Raises `Unavailable` then."""
        task = asyncio.current_task()
        assert task is not None
        self._reads.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self.stopping.is_set():
                task.uncancel()
                raise Unavailable("the node is stopping") from None
            raise
        finally:
            self._reads.discard(task)

    async def change(self, work: Coroutine[Any, Any, R]) -> R:
        """Goes on when its client goes away: what a commit does must not depend on who still listens."""
        task = asyncio.create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: its client may have gone

    def stop(self) -> None:
        """Cut the reads short."""
        self.stopping.set()
        for task in self._reads:
            task.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Let changes end whose client has gone; then cancel what is left."""
        if self._changes:
            _, late = await asyncio.wait(self._changes, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
