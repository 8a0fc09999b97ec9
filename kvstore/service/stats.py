"""Counters of a node, put together for `GET /v1/stats` and the metrics."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore import api
from kvstore.service.plane import TenantTiers
from tiering import DiskTier, DramTier, TierStats


def tier_stats(tiers: TenantTiers) -> dict[str, api.TierStats]:
    """By tier name; the bucket's `used` and `limit` are 0: it is nobody's to count here."""
    stack = tiers.stack
    places: Mapping[str, DramTier | DiskTier | None] = {part.name: part for part in (stack.dram, stack.disk) if part is not None}
    return {name: _one(counters, places.get(name)) for name, counters in stack.stats.items()}


def _one(counters: TierStats, place: DramTier | DiskTier | None) -> api.TierStats:
    return api.TierStats(
        used=place.used if place is not None else 0,
        limit=place.limit if place is not None else 0,
        hits=counters.hits,
        misses=sum(counters.misses.values()),
        bytes_in=counters.bytes_in,
        bytes_out=counters.bytes_out,
        evictions=counters.evictions,
        dropped=counters.drops,
        corrupt=counters.corruptions,
    )
