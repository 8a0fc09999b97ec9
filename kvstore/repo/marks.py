"""Sets of keys, at eight bytes a key: what a collection must not take, and what a check expects to find."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Digests = NDArray[np.uint64]
_UNSETTLED: Final = 1 << 20  # digests that wait to be sorted in: 8 MiB
_PARTS: Final = 16  # by their first bits, so that sorting new ones in copies a part at a time
_BOUNDS: Final = np.arange(1, _PARTS, dtype=np.uint64) << np.uint64(60)


def digests(keys: Iterable[str], count: int, seed: int) -> Digests:
    """64-bit digests of that many keys, in their order. `seed` is cut to 64 bits."""
    seed &= (1 << 64) - 1
    return np.fromiter((xxh3_64_intdigest(key.encode(), seed) for key in keys), np.uint64, count)


class Marks:
    """A set of keys, as 64-bit digests in sorted arrays.

    Two keys with one digest make an unmarked key look marked, so a collision can only ever keep a piece of garbage, never delete a
    live object; a check may overlook a block that is missing. With ten million marks it happens to one piece in 10^12; the seed is
    a fresh one in every process, so that it goes with a later collection.

    Args:
        seed: 64 bits or more that nobody outside knows, so that nobody can make keys that collide.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._settled: list[Digests] = [np.empty(0, np.uint64)] * _PARTS
        self._fresh: Digests = np.empty(_UNSETTLED, np.uint64)
        self._waiting = 0

    def __len__(self) -> int:
        self._settle()
        return sum(map(len, self._settled))

    def digests(self, keys: Iterable[str], count: int) -> Digests:
        """Digests of that many keys, in their order."""
        return digests(keys, count, self._seed)

    def add(self, digests: Digests) -> None:
        """Mark these."""
        while len(digests):
            now, digests = digests[: _UNSETTLED - self._waiting], digests[_UNSETTLED - self._waiting :]
            self._fresh[self._waiting : self._waiting + len(now)] = now
            self._waiting += len(now)
            if self._waiting == _UNSETTLED:
                self._settle()

    def add_key(self, key: str) -> None:
        """Mark one key."""
        self.add(self.digests((key,), 1))

    def hold(self, digests: Digests) -> NDArray[np.bool_]:
        """Which of these are marked."""
        self._settle()
        order = np.argsort(digests)
        held = np.empty(len(digests), np.bool_)
        held[order] = np.concatenate([_among(part, some) for part, some in zip(self._settled, _split(digests[order]), strict=True)])
        return held

    def _settle(self) -> None:
        if not self._waiting:
            return
        fresh = np.unique(self._fresh[: self._waiting])
        self._waiting = 0
        for index, some in enumerate(_split(fresh)):
            merged = np.concatenate((self._settled[index], some))
            merged.sort(kind="stable")  # merges the two runs
            first = np.ones(len(merged), np.bool_)
            np.not_equal(merged[1:], merged[:-1], out=first[1:])
            self._settled[index] = merged if first.all() else merged[first]


def _split(ascending: Digests) -> list[Digests]:
    return np.split(ascending, np.searchsorted(ascending, _BOUNDS))


def _among(part: Digests, some: Digests) -> NDArray[np.bool_]:
    if not len(part):
        return np.zeros(len(some), np.bool_)
    at = np.searchsorted(part, some)
    at[at == len(part)] = 0  # larger than any, and so not equal to the first
    return np.equal(part[at], some)
