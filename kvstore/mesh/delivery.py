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
        done: How it ended: None, or why there is nothing. From then on nothing writes to `into`.
        wanted: Whether somebody still waits for it.
        begun: Whether a thread has taken it on, and will end it.
    """

    def __init__(self, want: Want, block: BlockWant, into: memoryview, tell: Tell | None) -> None:
        self.want, self.block, self.into, self.tell = want, block, into, tell
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Miss | None] = self._loop.create_future()
        self._lock = threading.Lock()
        self._cut: Callable[[], None] | None = None
        self.wanted, self.begun = True, False

    def settle(self, outcome: Miss | None) -> None:
        """On the loop: how it ended. The first word counts."""
        if not self.done.done():
            self.done.set_result(outcome)

    async def leave(self) -> None:
        """On the loop: nobody wants it any more. When this returns, or raises, nothing writes to `into`."""
        with self._lock:
            self.wanted = False
            begun, cut = self.begun, self._cut
        if not begun:
            self.settle(Miss.TIMEOUT)
        cancelled, hurried = False, False
        while not self.done.done():
            try:
                await asyncio.wait((self.done,), timeout=None if hurried else _GRACE_S)
            except asyncio.CancelledError:
                cancelled = True
            if not hurried and not self.done.done() and cut is not None:
                hurried = True
                cut()
        if cancelled:
            raise asyncio.CancelledError

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
