"""Values on their way whose first bytes may be used before the last have come: who brings them tells, who copies them hears."""

from __future__ import annotations

import threading
from typing import Protocol

from tiering.dram import DramSlot


class Watch(Protocol):
    """Copies a value on while it comes."""

    def told(self, view: memoryview, offset: int, end: int) -> None:
        """Its first `end` bytes are verified. On the thread that brings them: it queues copies and returns, and raises nothing.

        Args:
            view: The value's place in memory; bytes behind `end` are garbage.
            offset: Where that is in the arena.
            end: At least 1.
        """
        ...

    def left(self) -> None:
        """Return when what was queued has left that place: it is about to be overwritten."""
        ...

    async def drained(self) -> None:
        """As `left`, without holding the loop up."""
        ...


class Early:
    """Who wants to hear of which values. Watches come and go on the loop; what is told comes from any thread."""

    def __init__(self) -> None:
        self._watches: dict[bytes, tuple[Watch, ...]] = {}  # tuples, so that a thread sees one state or the other

    def add(self, key: bytes, watch: Watch) -> None:
        """Tell this watch of the value from now on. What was told before comes again with the next bytes."""
        self._watches[key] = (*self._watches.get(key, ()), watch)

    def remove(self, key: bytes, watch: Watch) -> None:
        """No more. It may still hear what is being told at this moment."""
        rest = tuple(each for each in self._watches.get(key, ()) if each is not watch)
        if rest:
            self._watches[key] = rest
        else:
            self._watches.pop(key, None)

    def watching(self, key: bytes) -> tuple[Watch, ...]:
        """Who watches now."""
        return self._watches.get(key, ())


class Coming:
    """One attempt to fill a slot, and who has been told of it."""

    def __init__(self, early: Early, slot: DramSlot) -> None:
        self._early, self._key, self._view, self._offset = early, slot.want.key, slot.view[:], slot.offset
        self._lock = threading.Lock()
        self._heard: list[Watch] = []

    def tell(self, end: int) -> None:
        """See :data:`tiering.tier.Tell`."""
        with self._lock:  # nothing is queued anew while the old is waited for
            if not end:
                for watch in self._heard:
                    watch.left()
                return
            for watch in self._early.watching(self._key):
                watch.told(self._view, self._offset, end)
                if watch not in self._heard:
                    self._heard.append(watch)

    async def drained(self) -> None:
        """The fetch is over, however it ended: wait until nobody reads the slot any more, for it may be another's next."""
        try:
            for watch in self._heard:
                await watch.drained()
        except BaseException:
            for watch in self._heard:
                watch.left()  # a few milliseconds of the loop: whoever cancels takes the slot at once
            raise
