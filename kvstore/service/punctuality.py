"""How late restores with a deadline were."""

from __future__ import annotations

from bisect import bisect_left

from kvstore import api


class Punctuality:
    """Lateness by priority, for statistics."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._totals: dict[str, float] = {}

    def observe(self, priority: str, late_s: float) -> None:
        """One restore with a deadline ended."""
        counts = self._counts.setdefault(priority, [0] * (len(api.LATE_BOUNDS_S) + 1))
        counts[bisect_left(api.LATE_BOUNDS_S, late_s)] += 1
        self._totals[priority] = self._totals.get(priority, 0.0) + late_s

    def stats(self) -> dict[str, api.Lateness]:
        """All so far."""
        return {
            priority: api.Lateness(counts=list(counts), total_s=self._totals[priority]) for priority, counts in self._counts.items()
        }
