"""The threads that move and check bytes: few, and polite to the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NICE = 19
MOST_THREADS = 8


class Movers:
    """A thread pool of at most `cores` threads at nice 19, shared by all tiers of a process.

    With more threads than cores, or at normal priority, the event loop's tail latency grows from tenths of a millisecond to
    tens. A call that finds all threads busy waits as a coroutine, first come first served; callers bound how much they ask for.
    """

    def __init__(self, pool: ThreadPoolExecutor, threads: int) -> None:
        self.threads = threads
        self._pool = pool
        self._idle = asyncio.Semaphore(threads)

    @classmethod
    @asynccontextmanager
    async def open(cls, threads: int = MOST_THREADS) -> AsyncIterator[Self]:
        """Start up to `threads` threads, as they are needed; never more than this process has cores."""
        threads = max(1, min(threads, len(os.sched_getaffinity(0))))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="mover", initializer=be_nice)
        try:
            yield cls(pool, threads)
        finally:
            pool.shutdown(wait=True)

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn` on a mover thread.

        Once it has started it is awaited to its real end, also when the caller is cancelled: buffers it uses are free again
        whenever this call is over.
        """
        async with self._idle:
            loop = asyncio.get_running_loop()
            return await settled(loop.run_in_executor(self._pool, lambda: fn(*args, **kwargs)))


async def settled(future: asyncio.Future[T]) -> T:
    """The future's outcome; a cancellation is passed on to the caller only when the future has ended by itself."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # looked at: asyncio need not report it as lost
        raise cancelled
    return future.result()


def be_nice() -> None:
    """Lower this thread's priority (on Linux, nice values are per thread)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
