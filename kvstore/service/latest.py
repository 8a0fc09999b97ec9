"""Work whose result has to be as new as the question, done once for all who ask meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """One run at a time: whoever asks while one is under way shares the next, since what they ask for may be newer than that.

    A run goes on when those who wait for it go away.

    Args:
        work: Is run.
    """

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._running: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """The result of a run that begins from now on. Raises what it raised."""
        if self._running is not None and not self._running.done():
            await asyncio.wait([self._running])
        return await asyncio.shield(self.run())

    def run(self) -> asyncio.Task[T]:
        """The run that is under way, or a new one."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._once())
            self._running.add_done_callback(self._over)
        return self._running

    async def _once(self) -> T:
        return await self._work()

    def _over(self, task: asyncio.Task[T]) -> None:
        if self._running is task:
            self._running = None  # what it found is for those who asked, and may be large
        if not task.cancelled():
            task.exception()  # those who asked may have gone
