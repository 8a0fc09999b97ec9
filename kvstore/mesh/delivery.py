"""One block on its way from a peer: wanted and given up on the event loop, filled by a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final

from kvstore.repo import BlockWant
from tiering import Miss, Tell, Want

_GRACE_S: Final = 0.02  # for the thread to notice; then the connection is cut


class Delivery:
    """A place for one block, until it is filled or nobody wants it any more.

    Attributes:
        want: What.
        block: The same, as the codec names it.
        into: Where to.
        tell: See :data:`tiering.Tell`.
        wanted: Whether somebody still waits for it.
        begun: Whether a thread has taken it on, and will end it.
        over: Whether it has ended. From then on nothing writes to `into`.
        late: Whether it took longer than it was given.
        left: Called on the loop when nobody wants it any more and nothing was begun.
    """

    __slots__ = (
        "_cut", "_done", "_gone", "_lock", "_loop", "begun", "block", "into", "late", "left", "over", "tell", "want", "wanted",
    )  # fmt: skip

    def __init__(self, want: Want, block: BlockWant, into: memoryview, tell: Tell | None) -> None:
        self.want, self.block, self.into, self.tell = want, block, into, tell
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[Miss | None] = self._loop.create_future()
        self._gone: asyncio.Future[None] | None = None
        self._lock = threading.Lock()
        self._cut: Callable[[], None] | None = None
        self.left: Callable[[], None] | None = None
        self.wanted, self.begun, self.over, self.late = True, False, False, False

    async def outcome(self, seconds: float) -> Miss | None:
        """On the loop: how it ends; TIMEOUT after so many seconds. When this returns or raises, nothing writes to `into`."""
        timer = self._loop.call_later(seconds, self._expire)
        try:
            return await self._done
        except asyncio.CancelledError:
            self._leave()
            await self._until_gone()
            raise
        finally:
            timer.cancel()

    def settle(self, outcome: Miss | None) -> None:
        """On the loop: how it ended. The first word counts."""
        self.over = True
        if not self._done.done():
            self._done.set_result(outcome)
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def begin(self, cut: Callable[[], None]) -> bool:
        """On the thread: about to write. False where nobody wants it any more: then nothing may be written.

        Args:
            cut: Ends what the thread waits for, at once.
        """
        with self._lock:
            self.begun, self._cut = self.wanted, cut
            return self.begun

    def end(self, outcome: Miss | None) -> None:
        """On the thread, after `begin`: nothing is written any more."""
        self._loop.call_soon_threadsafe(self.settle, outcome)

    def _expire(self) -> None:
        self.late = True
        self._leave()

    def _leave(self) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self.wanted = False
            begun = self.begun
        if not begun:
            self.settle(Miss.TIMEOUT)
            if self.left is not None:
                self.left()
        elif not self.over:
            self._loop.call_later(_GRACE_S, self._hurry)

    def _hurry(self) -> None:
        if not self.over and self._cut is not None:
            self._cut()

    async def _until_gone(self) -> None:
        """However often this task is cancelled meanwhile: the thread ends, for its connection is cut."""
        while not self.over:
            self._gone = self._loop.create_future()
            try:
                await self._gone
            except asyncio.CancelledError:
                continue
