"""Free room in a slab whose pages are being written for the first time, in the background."""

from __future__ import annotations

from collections.abc import Iterable

from tiering.extents import Extents


class Space:
    """An extent allocator that lends pages to whoever writes them in advance.

    A file system allocates pages at their first write, which is slow and may fail; so a new slab is written once, from its end
    down. Slots take room from the front meanwhile. What was written in advance is set aside until all of it is, or until a
    slot finds no other room.

    Not synchronised: its owner calls it under the owner's own lock.

    Args:
        size: Bytes of the slab.
        used: (offset, length) of its slots.
        written: Whether its pages were all written before.
    """

    def __init__(self, size: int, used: Iterable[tuple[int, int]], *, written: bool) -> None:
        self._size = size
        self._extents = Extents(size, used)
        self._fresh: int | None = None if written else size  # from here on: written and set aside. None: not any more

    def allocate(self, nbytes: int) -> int | None:
        """Take room for a slot; its offset, or None."""
        offset = self._extents.allocate(nbytes)
        if offset is None and self._fresh is not None:
            self.end()
            offset = self._extents.allocate(nbytes)
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give a slot's room back."""
        self._extents.free(offset, nbytes)

    def borrow(self, nbytes: int) -> tuple[int, int] | None:
        """Up to `nbytes` to write in advance: (offset, length). None when there is nothing left to do."""
        taken = None if self._fresh is None else self._extents.take_before(self._fresh, nbytes)
        if taken is None:
            self.end()
        return taken

    def give_back(self, offset: int, length: int) -> None:
        """What `borrow` lent."""
        if self._fresh is None:
            self._extents.free(offset, length)
        else:
            self._fresh = offset

    def end(self) -> None:
        """No more writing in advance: everything set aside may be used."""
        fresh, self._fresh = self._fresh, None
        if fresh is not None and fresh < self._size:
            self._extents.free(fresh, self._size - fresh)
