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
        self._running = self._helping = 0
        self._lock = threading.Lock()  # of helpers, who come and go on their own threads

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
            self._running += 1
            try:
                return await settled(loop.run_in_executor(self._pool, lambda: fn(*args, **kwargs)))
            finally:
                self._running -= 1

    def share(self, step: Callable[[], bool]) -> None:
        """Have idle threads call `step` until it returns False; each leaves after a step when a call of `run` needs it.

        For a function that `run` runs and that is many short steps: alone, it gets every core. From any thread; it waits for
        nothing and promises nothing, so whoever asks does the steps, too. `step` raises nothing.
        """
        for _ in range(self.threads - max(1, self._running)):
            try:
                self._pool.submit(self._help, step)
            except RuntimeError:  # about to be closed
                return

    def _help(self, step: Callable[[], bool]) -> None:
        with self._lock:
            self._helping += 1
        try:
            while self._running + self._helping <= self.threads and step():
                pass
        finally:
            with self._lock:
                self._helping -= 1


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
