"""Whose turn it is among tenants: who was given least goes next, so that a flood of one delays no other by more than its share."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any, Generic, TypeVar

X = TypeVar("X")


class _Line(Generic[X]):
    """One tenant's. `given` is a point on the clock of what was given to everybody."""

    __slots__ = ("given", "waiting")

    def __init__(self) -> None:
        self.given = 0
        self.waiting: list[tuple[Any, int, int, X]] = []  # a heap of rank, order, cost and item


class Lines(Generic[X]):
    """What waits, in a line for each tenant.

    Start-time fair queueing: taking an item moves its tenant's line on by the item's cost, and next is the first item of the line
    that is least far. A line that was empty begins where the others are, so that nobody saves up turns. Whoever comes first to a
    line therefore waits for at most one item of every other tenant, and whoever is n-th for at most n, if all cost the same.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[X]] = {}
        self._now = self._order = self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def put(self, tenant: str, item: X, *, rank: Any = 0, cost: int = 1) -> None:
        """Have an item wait.

        Args:
            tenant: In whose line.
            item: What.
            rank: The least of a line goes first; among equals who came first.
            cost: How much of what is shared out it takes.
        """
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
        if not line.waiting and line.given < self._now:
            line.given = self._now
        self._order += 1
        self._count += 1
        heapq.heappush(line.waiting, (rank, self._order, cost, item))

    def first(self) -> X:
        """What is next; it stays. There must be something."""
        return self._next().waiting[0][3]

    def take(self) -> X:
        """What is next. There must be something."""
        line = self._next()
        _, _, cost, item = heapq.heappop(line.waiting)
        self._count -= 1
        self._now = line.given
        line.given += cost
        if len(self._lines) > 1:
            self._forget()
        return item

    def remove(self, item: X) -> bool:
        """It does not wait any more. False: it did not."""
        for line in self._lines.values():
            for index, each in enumerate(line.waiting):
                if each[3] is item:
                    del line.waiting[index]
                    heapq.heapify(line.waiting)
                    self._count -= 1
                    return True
        return False

    def _next(self) -> _Line[X]:
        if len(self._lines) == 1:
            return next(iter(self._lines.values()))
        return min((line for line in self._lines.values() if line.waiting), key=_place)

    def _forget(self) -> None:
        """A line that is empty and not ahead of the others is like none."""
        for tenant in [name for name, line in self._lines.items() if not line.waiting and line.given <= self._now]:
            del self._lines[tenant]


def _place(line: _Line[Any]) -> tuple[int, int]:
    return line.given, line.waiting[0][1]


class Shares:
    """Places, half of which are kept for the tenants in even parts; the others are for whoever comes first.

    So the only tenant may have all of them, and one of several half of them and its own part, but nothing of what is another's.

    Args:
        places: How many.
        tenants: Among how many.
    """

    def __init__(self, places: int, tenants: int) -> None:
        self._own = places // 2 // max(1, tenants)
        self._common = places - self._own * max(1, tenants)
        self._taken: Counter[str] = Counter()
        self._beyond = 0  # of the common ones

    def enter(self, tenant: str) -> bool:
        """Take a place; False where there is none for this tenant."""
        if self._taken[tenant] >= self._own:
            if self._beyond >= self._common:
                return False
            self._beyond += 1
        self._taken[tenant] += 1
        return True

    def leave(self, tenant: str) -> None:
        """Give it back."""
        self._taken[tenant] -= 1
        if self._taken[tenant] >= self._own:
            self._beyond -= 1
