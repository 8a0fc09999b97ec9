"""Ctrl-C, and SIGTERM: the first one ends the measuring, later ones do not keep it from cleaning up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """What the signals do. Code on a loop is cancelled, so that it ends where it waits; other code gets KeyboardInterrupt."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._stopped = False

    @classmethod
    @contextmanager
    def watch(cls) -> Iterator[Self]:
        """While the block runs."""
        stopping = cls()
        before = {number: signal.signal(number, stopping._stop) for number in _SIGNALS}
        try:
            yield stopping
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """As `asyncio.run`. Raises KeyboardInterrupt where it was stopped, once it has ended."""

        async def watched() -> T:
            self._task = asyncio.current_task()
            try:
                return await work
            finally:
                self._task = None

        try:
            return asyncio.run(watched())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    def _stop(self, *_: object) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._task is None:
            raise KeyboardInterrupt
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)  # which also wakes it
