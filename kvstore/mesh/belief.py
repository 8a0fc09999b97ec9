"""What is believed to be where: for each block, a set of places as the bits of one integer.

A place is a medium of a node or an engine. It is forgotten at once, whatever it held: its bit is retired, and nothing is visited.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_BLOCKS: Final = 16_000_000
_RETIRED: Final = 256  # bits, until all beliefs are gone through to use them again ...
_STEP: Final = 2048  # ... so many with each change
_HEAD: Final = struct.Struct("<Q")


class Runs(NamedTuple):
    """Leading blocks of a prompt that are believed to be anywhere, in runs with the same places.

    Attributes:
        bounds: Where runs begin, in blocks, and where the last one ends; [0] where nothing is anywhere.
        places: Whether a run is at a place, (runs, `Belief.width`).
    """

    bounds: list[int]
    places: NDArray[np.bool_]


class Belief:
    """Keys of 32 bytes, of which the first 8 are kept: a digest's, so two that share them are a wrong hint at worst.

    About 100 bytes for each block that is believed to be anywhere. Bounded by generations: once half of `most` were told, what was
    not told since the half before is forgotten.

    Args:
        most: Blocks remembered.

    Attributes:
        width: Columns of what `runs` answers.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._half = max(1, most // 2)
        self._young, self._old = dict[int, int](), dict[int, int]()
        self._alive = 0
        self._free, self._retired, self._cleaning = list[int](), list[int](), list[int]()
        self._dirty = list[int]()
        self.width = 8

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def place(self) -> int:
        """A new one: its bit, a column of what `runs` answers."""
        if not self._free:
            self._free = list(range(self.width - 1, self.width - 9, -1))
            self.width += 8
        bit = self._free.pop()
        self._alive |= 1 << bit
        return bit

    def forget(self, bit: int) -> None:
        """That place is no more, and has nothing."""
        self._alive &= ~(1 << bit)
        self._retired.append(bit)
        self._clean()

    def add(self, bit: int, keys: Sequence[bytes]) -> None:
        """These are at that place."""
        self._clean()
        at, young, old = 1 << bit, self._young, self._old
        shared: dict[int, int] = {}  # neighbours are at the same places: one integer for all of them
        for key in heads(keys):
            was = young.get(key)
            if was is None:
                was = old.pop(key, 0)
                if len(young) >= self._half:
                    self._young, self._old = young, old = {}, young
            now = shared.get(was)
            if now is None:
                now = shared[was] = (was & self._alive) | at
            young[key] = now

    def drop(self, bits: Sequence[int], keys: Sequence[bytes]) -> None:
        """These are at none of those places."""
        self._clean()
        left = self._alive & ~sum(1 << bit for bit in bits)
        for key in heads(keys):
            for part in (self._young, self._old):
                was = part.get(key)
                if was is not None:
                    self._set(part, key, was & left)

    def runs(self, keys: Sequence[bytes]) -> Runs:
        """Where a prompt's blocks are, in order, up to the first that is nowhere."""
        young, old, alive = self._young, self._old, self._alive
        bounds, masks, last = list[int](), list[int](), -1
        at = 0
        for at, key in enumerate(heads(keys)):
            mask = young.get(key)
            if mask is None:
                mask = old.get(key, 0)
            if mask != last:
                last = mask
                if not (mask := mask & alive):
                    break
                if not masks or mask != masks[-1]:
                    bounds.append(at)
                    masks.append(mask)
        else:
            at = len(keys)
        size = self.width // 8
        raw = np.frombuffer(b"".join(mask.to_bytes(size, "little") for mask in masks), np.uint8)
        places = np.unpackbits(raw.reshape(len(masks), size), axis=1, bitorder="little").astype(np.bool_)
        return Runs([*bounds, at], places)

    def _clean(self) -> None:
        """Take given-up bits from some more beliefs; what is written while that goes on has none of them."""
        for key in self._dirty[-_STEP:]:
            for part in (self._young, self._old):
                if (was := part.get(key)) is not None:
                    self._set(part, key, was & self._alive)
        del self._dirty[-_STEP:]
        if not self._dirty:
            self._free += self._cleaning
            self._cleaning = []
            if len(self._retired) >= _RETIRED:
                self._cleaning, self._retired = self._retired, []
                self._dirty = [*self._young, *self._old]

    @staticmethod
    def _set(part: dict[int, int], key: int, mask: int) -> None:
        if mask:
            part[key] = mask
        else:
            del part[key]


def heads(keys: Sequence[bytes]) -> Sequence[int]:
    """The first 8 bytes of each as a number."""
    return [_HEAD.unpack_from(key)[0] for key in keys]
