"""What was brought in ahead of its use: spared from eviction for a while, within a limit, and given up before anything in use."""

from __future__ import annotations

import heapq
from collections.abc import Hashable


class _Group:
    """What one owner holds, in prefix order; `until` is a point on the monotonic clock."""

    __slots__ = ("keys", "until", "yielding")

    def __init__(self) -> None:
        self.keys: dict[bytes, int] = {}
        self.until = float("-inf")
        self.yielding = True


class Holds:
    """Which values are held, by whom and until when.

    A hold is no lease: it is a place in the order of eviction, so it never stands in the way of somebody who needs the room. A
    value has one hold; a longer one takes it over, a shorter one leaves it alone. Not synchronised: the tier calls it under its own
    lock.

    Args:
        limit: Bytes that may be held. Groups that yield fill at most half of it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._groups: dict[Hashable, _Group] = {}
        self._owners: dict[bytes, Hashable] = {}
        self._ranked: tuple[dict[bytes, None], dict[bytes, None]] = ({}, {})  # may be evicted now, by whether their group yields
        self._ends: list[tuple[float, int, Hashable]] = []
        self._pushed = 0  # breaks ties, so that owners need no order

    def __contains__(self, key: bytes) -> bool:
        return key in self._owners

    def group(self, owner: Hashable, *, until: float, yielding: bool) -> None:
        """Begin a group, or change when it ends and whether it goes before others."""
        group = self._groups.setdefault(owner, _Group())
        if group.yielding != yielding:
            group.yielding = yielding
            for key in group.keys:
                if key in self._ranked[not yielding]:
                    del self._ranked[not yielding][key]
                    self._ranked[yielding][key] = None
        if group.until != until:
            group.until = until
            self._pushed += 1
            heapq.heappush(self._ends, (until, self._pushed, owner))

    def put(self, owner: Hashable, key: bytes, size: int) -> bool:
        """Hold one more value. False where the limit leaves no room, or that group has ended."""
        group = self._groups.get(owner)
        if group is None:
            return False
        if key in self._owners:
            other = self._groups[self._owners[key]]
            if other.until < group.until:
                ranked = key in self._ranked[other.yielding]
                self.pop(key)
                self._put(owner, group, key, size)
                if ranked:
                    self.rank(key)
            return True
        if self.held + size > (self.limit // 2 if group.yielding else self.limit):
            return False
        self._put(owner, group, key, size)
        return True

    def rank(self, key: bytes) -> None:
        """A held value that nobody leases: it may be given up."""
        self._ranked[self._groups[self._owners[key]].yielding][key] = None

    def unrank(self, key: bytes) -> None:
        """It is leased. A key that is not ranked is ignored."""
        for ranked in self._ranked:
            ranked.pop(key, None)

    def pop(self, key: bytes) -> bool:
        """It was used, or it is gone. Whether it was held."""
        if key not in self._owners:
            return False
        self.unrank(key)
        self.held -= self._groups[self._owners.pop(key)].keys.pop(key)
        return True

    def victim(self) -> bytes | None:
        """The value to give up first, still held: of a group that yields, and the end of a prefix before its beginning."""
        for yielding in (True, False):
            if self._ranked[yielding]:
                return next(reversed(self._ranked[yielding]))
        return None

    def end(self, owner: Hashable) -> list[bytes]:
        """End a group; the keys that it held, in prefix order. An owner that holds nothing is ignored."""
        group = self._groups.pop(owner, None)
        if group is None:
            return []
        keys = list(group.keys)
        for key in keys:
            self.unrank(key)
            del self._owners[key]
        self.held -= sum(group.keys.values())
        return keys

    def expired(self, now: float) -> list[bytes]:
        """End every group whose time is over; the keys that they held."""
        keys = []
        while self._ends and self._ends[0][0] <= now:
            until, _, owner = heapq.heappop(self._ends)
            group = self._groups.get(owner)
            if group is not None and group.until == until:
                keys += self.end(owner)
        return keys

    def _put(self, owner: Hashable, group: _Group, key: bytes, size: int) -> None:
        group.keys[key] = size
        self._owners[key] = owner
        self.held += size
