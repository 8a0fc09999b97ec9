"""What is asked for again, by what was known of it, and when: counted, and turned into what keeping a block promises.

Per class the part that is asked for again, and over all classes how the returns spread over ages, blocks that were evicted
meanwhile included. From this follows an index by class and age: the best ratio, over all spans ahead, of hits to room-time
(Gittins). It falls with age once the next turn is overdue, and it is low at first where turns take their time. Where counts are
few, both lean on the figures below. Time is counted in blocks asked for, so nothing depends on a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

SORTS, USES = 5, 5
CLASSES: Final = 1 + (USES + 1) * SORTS
UNIT: Final = 128  # blocks asked for: the finest age that is told apart
_AGES: Final = 20  # two per octave; the last is open
_SLOT: Final = 1024  # blocks asked for between two records of the arrivals
_EVERY: Final = 16  # slots between two estimates
_FADE: Final = 256  # slots until a count weighs half
# Before anything was counted, read off the first half of a public trace of conversations: the part of a request's last block
# that is asked for again; of blocks that are new, by how many are, to who begins and to who goes on; of others, by uses.
_LAST: Final = 0.02
_BEGINS, _GOES_ON = (0.45, 0.40, 0.30, 0.24, 0.20), (0.60, 0.50, 0.20, 0.15, 0.15)
_RETURNS: Final = (_LAST, *_BEGINS, *_GOES_ON, *(part for part in (0.47, 0.55, 0.65, 0.85) for _ in range(SORTS)))
_MEDIAN, _SPREAD = 11_000, 1.1  # of the ages of returns: a lognormal law
_ALL: Final = 0.3  # of all blocks
_RETURNS_WEIGHT, _SHAPE_WEIGHT = 5_000, 5_000  # blocks counted that weigh as much as these figures


def kind(uses: int, fresh: int, *, later: bool) -> int:
    """The class of blocks asked for so often, now with so many new ones, by who begins or goes on. 0 is a request's last block."""
    sort = min(SORTS - 1, (fresh + 1).bit_length() - 1 >> 1)
    return 1 + (later if uses == 1 else uses) * SORTS + sort


def _age(units: int) -> int:
    octave = units.bit_length()
    return min(_AGES - 1, units if octave < 2 else 2 * octave - 2 + (units >> (octave - 2) & 1))


def _by_then(blocks: int) -> float:
    return 0.5 * (1 + math.erf(math.log(blocks / _MEDIAN) / _SPREAD / math.sqrt(2))) if blocks else 0.0


LONGEST: Final = UNIT << 10  # an age that is as good as any beyond
AGE: Final = [_age(units) for units in range(LONGEST // UNIT + 1)]  # by age in units
_EDGES: Final = [*(AGE.index(age) * UNIT for age in range(_AGES)), LONGEST]
_SPANS: Final = [end - start for start, end in pairwise(_EDGES)]
_SHAPE: Final = [_by_then(end) - _by_then(start) for start, end in pairwise(_EDGES)]
_BACK: Final = [-(-edge // _SLOT) for edge in _EDGES[:_AGES]]


class Returns:
    """Counts, which their owner adds to, and what they promise.

    Attributes:
        came: Blocks asked for, by class.
        again: Those of them that were asked for again, by class.
        after: The same, by age (`AGE`).
        promise: By class and age, hits per block and time.
    """

    def __init__(self) -> None:
        self.came, self.again = [0.0] * CLASSES, [0.0] * CLASSES
        self.after = [0.0] * _AGES
        self.promise: list[list[float]] = []
        self._slots: deque[list[float]] = deque(maxlen=_BACK[-1] + 1)  # of `came`
        self._count = 0
        self._estimate()

    def at(self, now: int) -> None:
        """So many blocks were asked for by now."""
        while now // _SLOT > self._count:
            self._count += 1
            self._slots.append(self.came.copy())
            if self._count % _EVERY == 0 or self._count in (1, 2, 4, 8):
                self._estimate()
            if self._count % _FADE == 0:
                self.came, self.again, self.after = (_halved(counts) for counts in (self.came, self.again, self.after))
                self._slots = deque(map(_halved, self._slots), self._slots.maxlen)

    def _estimate(self) -> None:
        nobody = [0.0] * CLASSES
        reached = [self._slots[-1 - back] if back < len(self._slots) else nobody for back in _BACK]  # blocks, by age and class
        rates = [
            (after + _SHAPE_WEIGHT * _ALL * share) / (sum(came) + _SHAPE_WEIGHT)
            for after, came, share in zip(self.after, reached, _SHAPE, strict=True)
        ]
        every = sum(rates)
        shape = [rate / every for rate in rates]
        self.promise = []
        for again, part, column in zip(self.again, _RETURNS, zip(*reached, strict=True), strict=True):
            seen = sum(came * share for came, share in zip(column, shape, strict=True))  # as many as would have come by now
            self.promise.append(_index((again + _RETURNS_WEIGHT * part) / (seen + _RETURNS_WEIGHT), shape))


def _halved(counts: Sequence[float]) -> list[float]:
    return [count / 2 for count in counts]


def _index(part: float, shape: Sequence[float]) -> list[float]:
    """By age, the best ratio of hits to block-time over all spans ahead: the steepest line to a later point of their curve."""
    hits, time, left = 0.0, 0.0, 1.0
    curve = [(0.0, 0.0)]
    for share, span in zip(shape, _SPANS, strict=True):
        now = part * share
        hits += now
        time += span * max(left - now / 2, 0.01)
        left = max(left - now, 0.02)
        curve.append((time, hits))
    hull, index = [curve.pop()], []
    for x, y in reversed(curve):
        slope = (hull[-1][1] - y) / (hull[-1][0] - x)
        while len(hull) > 1 and (other := (hull[-2][1] - y) / (hull[-2][0] - x)) >= slope:
            slope = other
            hull.pop()
        index.append(slope)
        hull.append((x, y))
    return index[::-1]
