"""Work behind an engine's back: a few threads, and a queue that has an end."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvstore.client.fork import Birth

R = TypeVar("R")


class Bounded:
    """Threads that do one thing after the other, in the order in which they were asked.

    They are daemons: an interpreter that ends waits for none of them, whatever they wait for. They end when this is closed, or when
    nobody holds it any more.

    Args:
        name: What the threads are called.
        threads: How many.
        waiting: How many things are at most asked for and not done.
    """

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._name, self._most, self._birth = name, threads, Birth()
        self._queue = _Queue(waiting)
        self._threads, self._starting = list[threading.Thread](), threading.Lock()
        self._end = weakref.finalize(self, self._queue.close)

    def submit(self, work: Callable[[], R]) -> Future[R] | None:
        """Do it soon; None where too much is waiting already, it has been closed, or this is a forked child."""
        future = Future[R]()
        if not self._birth.here or not self._queue.put(future, work):
            return None
        if self._hands() or not future.cancel():
            return future
        return None

    def _hands(self) -> bool:
        """Whether there is a thread: one more is started where there are too few."""
        with self._starting:
            if len(self._threads) < self._most and self._queue.short_of_hands:
                thread = threading.Thread(target=self._queue.serve, name=f"{self._name}_{len(self._threads)}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more, or the interpreter ends
                    return bool(self._threads)
                self._threads.append(thread)
        return True

    def close(self) -> None:
        """Begin nothing more that has not begun. Does not wait for what has."""
        if self._birth.here:  # a lock may have been held by a thread that a forked child does not have
            self._end()

    def join(self, timeout_s: float) -> None:
        """After `close`: wait for what has begun, that long at most."""
        ends = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))


class _Queue:
    """What waits, and how much is being done."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting = deque[tuple[Future[Any], Callable[[], Any]]]()
        self._running = self._idle = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, future: Future[R], work: Callable[[], R]) -> bool:
        """Whether there was room."""
        with self._changed:
            if len(self._waiting) + self._running >= self._most:  # what was cancelled waits for nothing
                self._waiting = deque(each for each in self._waiting if not each[0].cancelled())
            if self._closed or len(self._waiting) + self._running >= self._most:
                return False
            self._waiting.append((future, work))
            self._changed.notify()
            return True

    @property
    def short_of_hands(self) -> bool:
        """Whether more waits than there are threads for."""
        return len(self._waiting) > self._idle

    def serve(self) -> None:
        """A thread's life."""
        while self._next():
            pass

    def _next(self) -> bool:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._idle -= 1
            if not self._waiting:
                return False
            future, work = self._waiting.popleft()
            self._running += 1
        try:
            if future.set_running_or_notify_cancel():
                _do(future, work)
        finally:
            del future, work  # an error's traceback holds this frame and that of `_do`, and so what they hold
            with self._changed:
                self._running -= 1
        return True

    def close(self) -> None:
        """Cancel what waits."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for future, _ in waiting:
            future.cancel()


def _do(future: Future[R], work: Callable[[], R]) -> None:
    try:
        outcome = work()
    except BaseException as error:  # noqa: BLE001  it is whoever asked that gets it
        future.set_exception(error)
    else:
        future.set_result(outcome)
    finally:
        del future, work
