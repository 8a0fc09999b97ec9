"""Work behind an engine's back: a few threads, and a queue that has an end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")


class Bounded:
    """Threads that do one thing after the other, in the order in which they were asked.

    Args:
        name: What the threads are called.
        threads: How many.
        waiting: How many things are at most asked for and not done.
    """

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._free = threading.BoundedSemaphore(waiting)
        self._closed = False

    def submit(self, work: Callable[[], R]) -> Future[R] | None:
        """Do it soon; None where too much is waiting already, or it has been closed."""
        if self._closed or not self._free.acquire(blocking=False):
            return None
        try:
            future = self._pool.submit(work)
        except RuntimeError:  # it was closed meanwhile, or the interpreter ends
            self._free.release()
            return None
        future.add_done_callback(lambda _: self._free.release())
        return future

    def close(self) -> None:
        """Begin nothing more that has not begun. Does not wait for what has."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
