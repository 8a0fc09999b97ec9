"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from kvstore.client.fork import Birth
from kvstore.errors import Closed, Invalid

R = TypeVar("R")
_JOIN_S: Final = 5.0
_LOOK_S: Final = 0.5


Goodbye = Callable[[], Coroutine[Any, Any, None]]


class Background:
    """Runs coroutines for other threads. It stops with `close`, when nobody holds it any more, or when the interpreter exits."""

    def __init__(self) -> None:
        self._birth = Birth()
        self._submitting = threading.Lock()  # so that nothing is handed to a loop that has stopped
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._goodbyes: list[Goodbye] = []
        # A daemon: the interpreter would otherwise wait for it at exit before it lets anybody stop it.
        work = (self._loop, self._goodbyes)
        self._thread = threading.Thread(target=_work, args=work, name="kvtier-client", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, _stop, self._birth, self._loop, self._thread)

    def at_end(self, goodbye: Goodbye) -> None:
        """Run this last, however it ends."""
        self._goodbyes.append(goodbye)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """The coroutine's outcome. An interrupt (Ctrl-C) cancels it.

        Raises:
            Closed: After `close`; kind `forked` in a child process.
            Invalid: On the loop's own thread, which would wait for itself.
        """
        future, handed = concurrent.futures.Future[R](), False
        try:
            self._birth.check()
            if threading.current_thread() is self._thread:
                raise Invalid("a SyncClient cannot be used on its own loop's thread: use the async Client there")  # noqa: TRY301  as below
            with self._submitting:
                if self._closed or not self._stop.alive:  # the latter: the interpreter ends
                    raise Closed("this client is closed")  # noqa: TRY301  the coroutine below is closed in every case
                handed = True  # before it is: an interrupt in the middle of it leaves open whether the loop has it
                self._loop.call_soon_threadsafe(_begin, self._loop, work, future)
            return _outcome(future)
        except concurrent.futures.CancelledError:
            raise Closed("this client was closed meanwhile") from None
        except BaseException:
            if handed:
                future.cancel()
            else:
                work.close()
            raise

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function on the loop, that long from now; nothing when it has ended by then."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.call_later, seconds, call)

    def close(self) -> None:
        """Cancel what runs, say goodbye, and stop. Does nothing the second time, and in a forked child."""
        if self._birth.here:  # the lock may have been held by a thread that a child does not have
            with self._submitting:
                self._closed = True
            self._stop()


def _begin(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, R], future: concurrent.futures.Future[R]) -> None:
    """On the loop. Unlike with `asyncio.run_coroutine_threadsafe`, who is interrupted meanwhile can still take it back."""
    if future.cancelled():
        work.close()
        return
    task = loop.create_task(work)
    task.add_done_callback(partial(_tell, future))
    future.add_done_callback(partial(_withdraw, loop, task))


def _tell(future: concurrent.futures.Future[R], task: asyncio.Task[R]) -> None:
    error = None if task.cancelled() else task.exception()
    if task.cancelled():
        future.cancel()
    elif not future.set_running_or_notify_cancel():
        return  # nobody waits any more
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


def _withdraw(loop: asyncio.AbstractEventLoop, task: asyncio.Task[R], future: concurrent.futures.Future[R]) -> None:
    if future.cancelled():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the task with it
            loop.call_soon_threadsafe(task.cancel)


def _outcome(future: concurrent.futures.Future[R]) -> R:
    """Wait for it, in turns.

    A signal that comes just before a thread falls asleep does not wake it: CPython looks for signals, and then waits for the lock.
    A Ctrl-C would go unheard until the answer comes.
    """
    while not future.done():
        try:
            return future.result(_LOOK_S)
        except TimeoutError:  # of this wait, or the coroutine's own
            pass
    return future.result()


def _work(loop: asyncio.AbstractEventLoop, goodbyes: list[Goodbye]) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(asyncio.gather(*(goodbye() for goodbye in goodbyes), return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _stop(birth: Birth, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if not birth.here:
        return  # a forked child: the thread stayed in the parent
    with contextlib.suppress(RuntimeError):  # it has stopped already
        loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join(_JOIN_S)
