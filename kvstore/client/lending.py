"""Blocks that lie in a node's arena: views of it, and leases that go back by number, many in one message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvstore import wire
from kvstore.blocks import BlockLease, Blocks
from kvstore.errors import Corrupt


class Lender(Protocol):
    """The connection over which blocks were lent."""

    @property
    def alive(self) -> bool:
        """Whether it still holds the leases."""
        ...

    def give_back(self, leases: Sequence[int]) -> None:
        """Give back leases, from any thread."""
        ...


class _Lent(BlockLease):
    """One block of the arena."""

    __slots__ = ("_lender", "_number")

    def __init__(self, view: memoryview, lender: Lender, number: int) -> None:
        self.view, self.size = view, view.nbytes
        self._lender, self._number = lender, number

    def release(self) -> None:
        number, self._number = self._number, 0
        if number:
            self._lender.give_back([number])

    def take(self) -> int:
        """Its number, which the caller gives back; 0 where that has been done."""
        number, self._number = self._number, 0
        return number


class LentBlocks(Blocks):
    """What one read found in the arena."""

    __slots__ = ("_lender", "_lent")

    def __init__(self, lent: list[_Lent], miss: str, lender: Lender) -> None:
        super().__init__(list(lent), miss)
        self._lent, self._lender = lent, lender

    @property
    def intact(self) -> bool:
        """See `Blocks`."""
        return self._lender.alive

    def release(self) -> None:
        """Give back every lease, in one message."""
        numbers = [number for lease in self._lent if (number := lease.take())]
        if numbers:
            self._lender.give_back(numbers)


def lend(arena: memoryview, leased: wire.Leased, lender: Lender) -> LentBlocks:
    """The blocks of an answer, as views of the arena (mapped read-only). Nothing is copied.

    Raises:
        Corrupt: An extent is not inside the arena.
    """
    offsets, sizes, end = leased.offsets, leased.sizes, len(arena)
    if len(offsets) != len(sizes) or (offsets and (min(offsets) < 0 or min(sizes) < 1)):
        raise Corrupt("the node leased extents that are none")
    lent = []
    for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True), leased.first):
        if offset + size > end:
            raise Corrupt(f"the node leased bytes {offset} to {offset + size} of an arena of {end}")
        lent.append(_Lent(arena[offset : offset + size], lender, number))
    return LentBlocks(lent, leased.miss, lender)


def runs(leases: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as runs of consecutive ones: (first, how many)."""
    found: list[tuple[int, int]] = []
    first = count = 0
    for lease in leases:
        if lease == first + count and count:
            count += 1
            continue
        if count:
            found.append((first, count))
        first, count = lease, 1
    return [*found, (first, count)] if count else found
