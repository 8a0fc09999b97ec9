"""Plain counters. Whoever runs the hierarchy exports them; nothing here knows how."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from tiering.tier import Miss

LATENCY_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Histogram(msgspec.Struct):
    """Durations by bucket.

    Attributes:
        counts: One count for each of `LATENCY_BOUNDS` (seconds, inclusive upper ends), and one for what is slower; not cumulative.
        total: Sum of all durations, in seconds.
    """

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(LATENCY_BOUNDS, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        """How many were observed."""
        return sum(self.counts)


class TierStats(msgspec.Struct):
    """What happened at one tier or origin since it was opened.

    Attributes:
        hits: Values served.
        misses: Values not served, by reason.
        bytes_in: Payload bytes accepted.
        bytes_out: Payload bytes served.
        evictions: Values that went to make room.
        drops: Values refused: no room, a full queue, or the writer failed.
        declined: Values that the policy did not find worth keeping.
        bytes_written: What the medium was made to write for them: slots with header and padding, and the index. Divided by
            `bytes_in` it is the write amplification. The one pass that prepares a new slab is not in it. 0 where nobody counts.
        corruptions: Values whose bytes were not what they claim.
        errors: Operations that failed: I/O errors, origins that raised.
        last_error: What the last of them said.
        reads: How long serving took, queueing included. Empty for memory.
    """

    hits: int = 0
    misses: dict[Miss, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Miss, 0))
    bytes_in: int = 0
    bytes_out: int = 0
    evictions: int = 0
    drops: int = 0
    declined: int = 0
    bytes_written: int = 0
    corruptions: int = 0
    errors: int = 0
    last_error: str = ""
    reads: Histogram = msgspec.field(default_factory=Histogram)

    def hit(self, nbytes: int) -> None:
        """One value was served."""
        self.hits += 1
        self.bytes_out += nbytes

    def failed(self, error: BaseException) -> None:
        """An operation failed."""
        self.errors += 1
        self.last_error = str(error) or repr(error)

    def miss(self, why: Miss) -> None:
        """One value was not."""
        self.misses[why] += 1
