"""Threads for blocking calls of one event loop. An executor makes two futures, and takes a dozen locks, for each call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Call(Generic[_T]):
    """A blocking call on its way.

    Attributes:
        answer: Its outcome, for one task to await. When that is cancelled, so is this; the call itself goes on: see `settled`.
    """

    __slots__ = ("_ended", "_left", "_loop", "_over", "_todo", "answer")

    def __init__(self, work: Callable[[], _T], left: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[_T] = self._loop.create_future()
        self._over: asyncio.Future[None] | None = None
        self._ended = False
        self._left = left
        self._todo = [work]  # who takes it out, the thread or `withdraw`, has it

    def withdraw(self) -> bool:
        """Take it back; `answer` is left to the caller. False: a thread has begun it, and will end it."""
        if not self._todo_taken():
            return False
        self._ended = True
        self._left()
        return True

    async def settled(self) -> None:
        """Wait for the real end, however often this task is cancelled meanwhile. Swallows those cancellations."""
        if not self._ended:
            self._over = self._loop.create_future()
            await until_over(self._over)

    def run(self) -> None:
        """On a thread."""
        work = self._todo_taken()
        if not work:
            return
        value, error = None, None
        try:
            value = work[0]()
        except BaseException as found:  # noqa: BLE001  it reaches whoever waits
            error = found
        with suppress(RuntimeError):  # the loop died without waiting
            self._loop.call_soon_threadsafe(self._tell, value, error)

    def _todo_taken(self) -> list[Callable[[], _T]]:
        try:
            return [self._todo.pop()]
        except IndexError:
            return []

    def _tell(self, value: Any, error: BaseException | None) -> None:
        self._ended = True
        self._left()
        if not self.answer.done():
            if error is None:
                self.answer.set_result(value)
            else:
                self.answer.set_exception(error)
        if self._over is not None:
            self._over.set_result(None)


class Threads:
    """At most so many, started as they are needed; more calls than that wait, first come first served.

    They keep no process from ending. All but what the calls do is on one event loop.

    Args:
        name: Of the threads.
        most: How many.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._under_way = 0

    def start(self, work: Callable[[], _T]) -> Call[_T]:
        """Have a thread do this. The caller bounds how many wait, and sees to it that the call ends."""
        call = Call(work, self._one_left)
        self._under_way += 1
        if len(self._threads) < min(self._under_way, self._most):
            thread = threading.Thread(target=self._work, name=f"{self._name}_{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._calls.put(call.run)
        return call

    async def run(self, work: Callable[[], _T]) -> _T:
        """Have a thread do this; once begun it has ended when this is over, also when the caller is cancelled."""
        call = self.start(work)
        try:
            return await call.answer
        except asyncio.CancelledError:
            if not call.withdraw():
                await call.settled()
            raise

    async def aclose(self) -> None:
        """End them, after what they were given."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._threads.clear()

    def _one_left(self) -> None:
        self._under_way -= 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # its memory is its owner's


async def until_over(ended: asyncio.Future[Any]) -> bool:
    """Wait for the real end, however often this task is cancelled meanwhile; True if it was."""
    cancelled = False
    while not ended.done():
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled and not ended.cancelled():
        ended.exception()  # nobody else will look at it
    return cancelled
