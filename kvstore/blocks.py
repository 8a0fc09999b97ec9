"""What a read of the data plane hands over: the bytes of a leading run of blocks, lent until they are released."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self


class BlockLease:
    """One block's raw object (:mod:`kvstore.codec`), lent. Its bytes stay as they are until `release`.

    Attributes:
        view: The object's bytes, read-only. Do not use it, nor an array made of it, after the release.
        size: Its length in bytes.
    """

    __slots__ = ("_release", "size", "view")

    def __init__(self, view: memoryview, release: Callable[[], None]) -> None:
        self.view = view.toreadonly()
        self.size = view.nbytes
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Give it back, from any thread. A second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()


def _always() -> bool:
    return True


class Blocks:
    """The longest leading run of what was asked for.

    Attributes:
        leases: One for each block of the run, in order.
        miss: Why the run ended (`absent`, `timeout`, `corrupt`, `full`, `unavailable`), or "" where it is complete.
    """

    __slots__ = ("_intact", "leases", "miss")

    def __init__(self, leases: list[BlockLease], miss: str, intact: Callable[[], bool] = _always) -> None:
        self.leases = leases
        self.miss = miss
        self._intact = intact

    @property
    def intact(self) -> bool:
        """Whether the lender is still there. Ask after copying out: where it is not, the bytes may have been reused meanwhile."""
        return self._intact()

    def release(self) -> None:
        """Give back every lease."""
        for lease in self.leases:
            lease.release()

    def __len__(self) -> int:
        return len(self.leases)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
