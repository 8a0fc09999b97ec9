"""What a disk tier asks of whoever seals what it writes: this package knows no ciphers, and keeps no keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

SALT = 32
TAG = 16


class Stream(Protocol):
    """One value, sealed or opened piece by piece, in order. Any bytes, and never longer than they came."""

    def update_into(self, data: memoryview, into: memoryview) -> int:
        """Seal or open the next piece; `into` may be `data`. Releases the GIL."""
        ...

    def tag(self) -> bytes:
        """Of a value that was sealed, when all of it was given: 16 bytes."""
        ...

    def holds(self, tag: bytes) -> bool:
        """Whether a value that was opened, all of it, is the one of that tag. Before, nobody may use a byte of it."""
        ...


class Sealer(Protocol):
    """Seals what one folder holds. From any thread."""

    def salt(self) -> bytes:
        """32 random bytes, never used before: each slot has a key of its own."""
        ...

    def sealing(self, salt: bytes, bound: bytes) -> Stream:
        """To write a slot; `bound` says what it is."""
        ...

    def opening(self, salt: bytes, bound: bytes) -> Stream:
        """To read one."""
        ...

    def name(self, key: bytes) -> bytes:
        """A name in the index, of 32 or 40 bytes, as it stands there: equal for equal ones, at most 511 bytes."""
        ...

    def key(self, name: bytes) -> bytes | None:
        """The inverse; None for what is no such name."""
        ...

    def wrap(self, record: bytes, body: bytes) -> bytes:
        """A small record, sealed."""
        ...

    def unwrap(self, record: bytes, body: bytes) -> bytes | None:
        """The inverse; None where it was altered."""
        ...


Seals: TypeAlias = Callable[[bytes | None], tuple[bytes, Sealer]]
"""Given what a folder keeps of its key (None: it is new): what it is to keep from now on, and the sealer. It may raise anything."""
