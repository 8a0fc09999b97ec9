"""Bytes under a limit that is never exceeded: room is reserved before anything is written."""

from __future__ import annotations


class Budget:
    """`used + reserved <= limit`, at every instant.

    Not synchronised: its owner calls it under the owner's own lock.

    Args:
        limit: Bytes.
    """

    __slots__ = ("limit", "reserved", "used")

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"limit is {limit}: it must not be negative")
        self.limit = limit
        self.used = 0
        self.reserved = 0

    @property
    def held(self) -> int:
        """Bytes used or reserved."""
        return self.used + self.reserved

    @property
    def room(self) -> int:
        """Bytes that can still be reserved."""
        return self.limit - self.used - self.reserved

    def reserve(self, nbytes: int) -> bool:
        """Set bytes aside; False, and no change, where they do not fit."""
        if nbytes < 0:
            raise ValueError(f"cannot reserve {nbytes} bytes")
        if nbytes > self.room:
            return False
        self.reserved += nbytes
        return True

    def commit(self, nbytes: int) -> None:
        """What was reserved is used now."""
        self.cancel(nbytes)
        self.used += nbytes

    def cancel(self, nbytes: int) -> None:
        """What was reserved is free again."""
        if not 0 <= nbytes <= self.reserved:
            raise ValueError(f"{nbytes} bytes were never reserved ({self.reserved} are)")
        self.reserved -= nbytes

    def free(self, nbytes: int) -> None:
        """What was used is free again."""
        if not 0 <= nbytes <= self.used:
            raise ValueError(f"{nbytes} bytes were never used ({self.used} are)")
        self.used -= nbytes
