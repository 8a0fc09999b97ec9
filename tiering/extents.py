"""Where in a file or an arena the next value goes: one allocator of page-aligned extents."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

PAGE = 4096


def rounded(nbytes: int) -> int:
    """The next multiple of a page."""
    return -(-nbytes // PAGE) * PAGE


def with_slack(limit: int) -> int:
    """Bytes of address space for `limit` bytes of payload.

    A limit counts payload. Rounding to pages, a header per slot and a little fragmentation must not make a tier smaller than it
    says: 100 values of 1 MiB fit a limit of 100 MiB, exactly.
    """
    return rounded(limit + max(limit // 16, 8 << 20))


class Extents:
    """Best fit with coalescing.

    Free extents are found by length through a sorted list of the distinct lengths, and their neighbours through their ends. The
    distinct lengths of pieces of n pages are at most sqrt(2n), so that list stays short: an operation costs O(log n)
    comparisons.

    Not synchronised: its owner calls it under the owner's own lock.

    Args:
        size: Bytes, a multiple of a page.
        used: (offset, length) of what is taken already, each page-aligned.

    Raises:
        ValueError: Sizes are not page multiples, or `used` overlaps or leaves the range.
    """

    def __init__(self, size: int, used: Iterable[tuple[int, int]] = ()) -> None:
        self.size = size
        self.free_bytes = 0
        self._length_of: dict[int, int] = {}  # start of a free extent -> its length
        self._start_of: dict[int, int] = {}  # its end -> its start
        self._starts: dict[int, dict[int, None]] = {}  # length -> starts
        self._lengths: list[int] = []  # the keys of _starts, sorted
        if size < 0 or size % PAGE:
            raise ValueError(f"size {size} is not a multiple of {PAGE}")
        at = 0
        for offset, length in sorted(used):
            if offset < at or offset % PAGE or length % PAGE or length <= 0:
                raise ValueError(f"extent {offset}+{length} overlaps another, or is not aligned")
            self._insert(at, offset - at)
            at = offset + length
        if at > size:
            raise ValueError(f"extents end at {at}, past {size}")
        self._insert(at, size - at)

    def allocate(self, nbytes: int, *, at_end: bool = False) -> int | None:
        """Take room of `nbytes`, rounded up to a page, from the start (or end) of the smallest free extent that has it.

        Returns:
            Its offset, or None.
        """
        length = rounded(nbytes)
        at = bisect_left(self._lengths, length)
        if length <= 0 or at == len(self._lengths):
            return None
        found = self._lengths[at]
        start = next(iter(self._starts[found]))
        self._remove(start)
        if at_end:
            self._insert(start, found - length)
            return start + found - length
        self._insert(start + length, found - length)
        return start

    def free(self, offset: int, nbytes: int) -> None:
        """Give back what `allocate` returned, with the same length; neighbours grow together."""
        length = rounded(nbytes)
        if offset < 0 or offset % PAGE or length <= 0 or offset + length > self.size:
            raise ValueError(f"extent {offset}+{nbytes} was never allocated")
        if offset in self._length_of or offset + length in self._start_of:
            raise ValueError(f"extent {offset}+{nbytes} is free already")
        before = self._start_of.get(offset)
        if before is not None:
            length += self._remove(before)
            offset = before
        if offset + length in self._length_of:
            length += self._remove(offset + length)
        self._insert(offset, length)

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Take up to `nbytes` from the end of a largest free extent: (offset, length), or None where nothing is free."""
        if not self._lengths:
            return None
        length = min(self._lengths[-1], rounded(nbytes))
        start = next(iter(self._starts[self._lengths[-1]]))
        left = self._remove(start) - length
        self._insert(start, left)
        return start + left, length

    def _insert(self, start: int, length: int) -> None:
        if not length:
            return
        self._length_of[start] = length
        self._start_of[start + length] = start
        same = self._starts.get(length)
        if same is None:
            same = self._starts[length] = {}
            insort(self._lengths, length)
        same[start] = None
        self.free_bytes += length

    def _remove(self, start: int) -> int:
        length = self._length_of.pop(start)
        del self._start_of[start + length]
        same = self._starts[length]
        del same[start]
        if not same:
            del self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self.free_bytes -= length
        return length
