"""Who goes first when room is needed, and who may come in at all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Protocol

SECOND_SIGHT_KEYS: Final = 1 << 17  # keys turned away; about 20 MB


class Policy(Protocol):
    """Ranks the values that may be evicted now. A tier takes a value out of the ranking while it is leased or read.

    So the next victim is always at hand, however many values are pinned. Called under the tier's lock: it must not block.
    """

    def admit(self, key: bytes, size: int) -> bool:
        """May this value come in? Asked before room is made for it."""
        ...

    def asked(self, keys: Sequence[bytes], told: int = 0) -> None:
        """One request wants these, in prefix order, here or not. Told before anything else comes of it.

        The first `told` are not asked for now, or were a moment ago: they tell what the others continue, and count only where they
        were never asked for at all. So a request may be told in pieces, and a commit tells what it appends to what.
        """
        ...

    def add(self, key: bytes) -> None:
        """This value may be evicted from now on. It was just written, or just used."""
        ...

    def touch(self, key: bytes) -> None:
        """This value was of use without being pinned. A key that is not ranked is ignored."""
        ...

    def first(self, key: bytes) -> None:
        """This value may be evicted from now on, before all others: nobody is expected to use it."""
        ...

    def remove(self, key: bytes) -> None:
        """This value is pinned, or gone. A key that is not ranked is ignored."""
        ...

    def victim(self) -> bytes | None:
        """Take out the value that should go first; None where nothing may go."""
        ...


class Lru:
    """Least recently used goes first; everything is admitted.

    An OrderedDict, as in cachetools' LRUCache, without that class's own size accounting: 0.1 µs per access matters where one
    look-up pins 512 values.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def admit(self, key: bytes, size: int) -> bool:  # noqa: ARG002  the seam's signature; LRU takes everything
        """Always."""
        return True

    def asked(self, keys: Sequence[bytes], told: int = 0) -> None:
        """Now the most recent, those that are ranked."""
        for key in keys[told:]:
            self.touch(key)

    def add(self, key: bytes) -> None:
        """Now the most recent."""
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: bytes) -> None:
        """Now the most recent, if it is ranked."""
        if key in self._order:
            self._order.move_to_end(key)

    def first(self, key: bytes) -> None:
        """Now the next to go."""
        self._order[key] = None
        self._order.move_to_end(key, last=False)

    def remove(self, key: bytes) -> None:
        """Not ranked any more."""
        self._order.pop(key, None)

    def victim(self) -> bytes | None:
        """The least recent, taken out."""
        return self._order.popitem(last=False)[0] if self._order else None


class SecondSight(Lru):
    """Admits a value when it is offered for the second time: what was seen once is not worth the wear of writing it.

    What must be written is not asked about.

    Args:
        remembered: How many of the keys that it turned away it knows again, the last ones.
    """

    def __init__(self, remembered: int = SECOND_SIGHT_KEYS) -> None:
        super().__init__()
        self._remembered = remembered
        self._turned_away: OrderedDict[bytes, None] = OrderedDict()

    def admit(self, key: bytes, size: int) -> bool:  # noqa: ARG002  the seam's signature; the count is of values
        """Whether it was turned away before."""
        if key in self._turned_away:
            del self._turned_away[key]
            return True
        self._turned_away[key] = None
        if len(self._turned_away) > self._remembered:
            self._turned_away.popitem(last=False)
        return False
