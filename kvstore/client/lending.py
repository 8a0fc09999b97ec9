"""Blocks that lie in a node's arena: views of it, and leases that go back by number, many in one message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add
from typing import Protocol

from kvstore import wire
from kvstore.blocks import BlockLease, Blocks
from kvstore.errors import Corrupt

Run = tuple[int, int]
"""Leases with consecutive numbers: the first, and how many."""


class Lender(Protocol):
    """The connection over which blocks were lent."""

    @property
    def alive(self) -> bool:
        """Whether it still holds the leases."""
        ...

    def give_back(self, leases: Sequence[Run]) -> None:
        """Give back leases, from any thread."""
        ...


class _Lent(BlockLease):
    """One block of the arena."""

    __slots__ = ("_lender", "_number")

    def __init__(self, view: memoryview, lender: Lender, number: int) -> None:
        self.view, self.size = view, view.nbytes
        self._lender, self._number = lender, number

    def release(self) -> None:
        number = self.take()
        if number:
            self._lender.give_back([(number, 1)])

    def take(self) -> int:
        """Its number, which the caller gives back; 0 where that has been done."""
        number, self._number = self._number, 0
        return number


class LentBlocks(Blocks):
    """What one read found in the arena. A view is made for each block when the first of them is looked at."""

    __slots__ = ("_arena", "_leased", "_lender", "_lent")

    def __init__(self, arena: memoryview, leased: wire.Leased, lender: Lender) -> None:
        self._arena, self._leased, self._lender = arena, leased, lender
        self._lent: list[_Lent] | None = None
        self.miss = leased.miss

    @property
    def leases(self) -> Sequence[BlockLease]:
        """See `Blocks`."""
        if self._lent is None:
            arena, lender = self._arena, self._lender
            extents = zip(self._leased.offsets, self._leased.sizes, strict=True)
            self._lent = [
                _Lent(arena[offset : offset + size], lender, number)
                for number, (offset, size) in enumerate(extents, self._leased.first)
            ]
        return self._lent

    @property
    def intact(self) -> bool:
        """See `Blocks`."""
        return self._lender.alive

    def release(self) -> None:
        """Give back every lease, in one message."""
        if self._lent is None:
            self._lent = []
            given = [(self._leased.first, len(self._leased.offsets))] if self._leased.offsets else []
        else:
            given = runs(number for lease in self._lent if (number := lease.take()))
        if given:
            self._lender.give_back(given)

    def __len__(self) -> int:
        return len(self._leased.offsets)


def lend(arena: memoryview, leased: wire.Leased, lender: Lender) -> LentBlocks:
    """The blocks of an answer, as views of the arena (mapped read-only). Nothing is copied.

    Raises:
        Corrupt: An extent is not inside the arena.
    """
    offsets, sizes = leased.offsets, leased.sizes
    if len(offsets) != len(sizes) or (
        offsets and (min(offsets) < 0 or min(sizes) < 1 or max(map(add, offsets, sizes)) > len(arena))
    ):
        raise Corrupt(f"the node leased bytes that are not in its arena of {len(arena)}")
    return LentBlocks(arena, leased, lender)


def runs(leases: Iterable[int]) -> list[Run]:
    """Numbers as runs of consecutive ones."""
    found: list[Run] = []
    first = count = 0
    for lease in leases:
        if count and lease == first + count:
            count += 1
            continue
        if count:
            found.append((first, count))
        first, count = lease, 1
    return [*found, (first, count)] if count else found


def releases(given: Sequence[Run]) -> bytes:
    """Messages that give these back, none of them larger than the node takes."""
    frames, part, leases = [], list[Run](), 0
    for first, count in given:
        if part and leases + count > wire.MAX_BATCH:
            frames.append(wire.frame(wire.Release(part)))
            part, leases = [], 0
        part.append((first, count))
        leases += count
    if part:
        frames.append(wire.frame(wire.Release(part)))
    return b"".join(frames)
