"""Free room in a slab, some of which was never written: those pages are slow to write first, and may turn out not to exist."""

from __future__ import annotations

from collections.abc import Iterable

from tiering.extents import Extents


class Space:
    """Two extent allocators: pages that are real, which slots take first, and holes, which are being made real in the background.

    Not synchronised: its owner calls it under the owner's own lock.

    Args:
        size: Bytes of the slab.
        used: (offset, length) of its slots.
        written: Whether all its pages were written before.
    """

    def __init__(self, size: int, used: Iterable[tuple[int, int]], *, written: bool) -> None:
        free = Extents(size, used)
        none = Extents(size, [(0, size)] if size else [])
        self._real, self._holes = (free, none) if written else (none, free)

    @property
    def free_bytes(self) -> int:
        """Bytes that no slot has; what is lent to be written does not count."""
        return self._real.free_bytes + self._holes.free_bytes

    def allocate(self, nbytes: int) -> int | None:
        """Take room for a slot; its offset, or None."""
        # Slots take holes from the near end, and holes are made real from the far one, so that what is left stays in one piece:
        # hence real pages are taken at their end, beside the piece that becomes real next.
        offset = self._real.allocate(nbytes, at_end=self._holes.free_bytes > 0)
        if offset is None:
            offset = self._holes.allocate(nbytes)
        if offset is not None:
            return offset
        if not self._holes.free_bytes:
            return None
        while (piece := self._holes.take(self._holes.size)) is not None:  # it may fit across the border of both
            self._real.free(*piece)
        return self._real.allocate(nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """Give back the room of a slot that was written."""
        self._real.free(offset, nbytes)

    def free_unwritten(self, offset: int, nbytes: int) -> None:
        """Give back the room of a slot that could not be written."""
        self._holes.free(offset, nbytes)

    def borrow(self, nbytes: int) -> tuple[int, int] | None:
        """Up to `nbytes` of holes to write: (offset, length). `free` or `free_unwritten` returns them. None: there are none."""
        return self._holes.take(nbytes)
