"""What `kvtier bench` measures, and how: a part has its share of the time, and ends with it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

MIB: Final = 1 << 20


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One result.

    Attributes:
        name: Stable.
        value: In `unit`; None where it could not be measured: then `error` says why.
        baseline: What the bare medium gave in the same run, in the same unit.
        ratio: Of the two.
        p50_ms: Of one call, where calls were timed; so is `p99_ms`.
        note: For people.
    """

    name: str
    value: float | None = None
    unit: str = ""
    baseline: float | None = None
    ratio: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    note: str = ""
    error: str = ""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure with.

    Attributes:
        size: Bytes that a part moves at most in one round, and takes on the disk, in memory and in the bucket.
        block: Bytes of one value.
        object: Bytes of one object in the bucket.
        seconds: For all parts together.
    """

    size: int
    block: int
    object: int
    seconds: float

    @property
    def blocks(self) -> int:
        """How many make up `size`."""
        return max(1, self.size // self.block)


class Timing(msgspec.Struct, frozen=True):
    """Bytes per second over all calls, and seconds of each."""

    rate: float
    took: Sequence[float]

    def line(self, name: str, note: str = "", bare: Timing | None = None) -> Line:
        """As a result in GB/s."""
        ordered = sorted(self.took)
        return Line(
            name=name,
            value=self.rate / 1e9,
            unit="GB/s",
            baseline=bare.rate / 1e9 if bare else None,
            ratio=self.rate / bare.rate if bare else None,
            p50_ms=statistics.median(ordered) * 1e3,
            p99_ms=ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
            note=note,
        )


def timed(run: Callable[[int], int], calls: int, seconds: float, *, warm: bool = True) -> Timing:
    """Call `run(i)`, which says how many bytes it moved, up to `calls` times and no longer than `seconds`, but once in any case.

    With `warm` the first call does not count, if there is time for another.
    """
    ends, moved, took = time.monotonic() + seconds, 0, list[float]()
    for index in range(calls):
        began = time.perf_counter()
        nbytes = run(index)
        took.append(time.perf_counter() - began)
        moved += nbytes
        if warm and index == 0 and calls > 1 and time.monotonic() + took[0] < ends:
            moved, took = 0, []
        elif time.monotonic() >= ends:
            break
    return Timing(moved / sum(took), took)
