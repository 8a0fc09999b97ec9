"""Counters of a node, put together for `GET /v1/stats` and the metrics."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvstore import api
from kvstore.clock import Clock
from kvstore.lifecycle.health import Health, Lately, StoreSigns
from kvstore.service.plane import Reads, TenantTiers
from tiering import LATENCY_BOUNDS, DeviceTier, DiskTier, DramTier, Histogram, TierStats


def tier_stats(tiers: TenantTiers, reads: Reads) -> dict[str, api.TierStats]:
    """By tier name; the bucket's `used` and `limit` are 0: it is nobody's to count here."""
    stack = tiers.stack
    places: Mapping[str, DramTier | DiskTier | None] = {part.name: part for part in (stack.dram, stack.disk) if part is not None}
    queued = stack.queued
    return {
        name: _one(counters, places.get(name), tokens=reads.hit[name], queued=queued.get(name, 0))
        for name, counters in stack.stats.items()
    }


def place_stats(place: DeviceTier) -> api.TierStats:
    """Of a tier above a node's own."""
    return _one(place.stats, place, tokens=0, queued=0)


def _one(counters: TierStats, place: DramTier | DiskTier | DeviceTier | None, *, tokens: int, queued: int) -> api.TierStats:
    return api.TierStats(
        used=place.used if place is not None else 0,
        limit=place.limit if place is not None else 0,
        hits=counters.hits,
        misses=sum(counters.misses.values()),
        bytes_in=counters.bytes_in,
        bytes_out=counters.bytes_out,
        evictions=counters.evictions,
        dropped=counters.drops,
        declined=counters.declined,
        bytes_written=counters.bytes_written,
        corrupt=counters.corruptions,
        missed={why.value: count for why, count in counters.misses.items() if count},
        tokens=tokens,
        queued_bytes=queued,
        errors=counters.errors,
        reads=latency(counters.reads),
    )


def latency(histogram: Histogram) -> api.Latency:
    """As answers have it."""
    if not histogram.count:
        return api.Latency()
    return api.Latency(bounds_s=list(LATENCY_BOUNDS), counts=list(histogram.counts), total_s=histogram.total)


def store_stats(signs: StoreSigns) -> api.StoreStats:
    """How the bucket's store is doing."""
    breaker, window, choice = signs.breaker, signs.window, signs.choice
    found = api.StoreStats(
        breaker=breaker.state,
        opened=breaker.opened,
        refused=breaker.refused,
        hedges_sent=signs.hedges["sent"],
        hedges_won=signs.hedges["won"],
        corrupt_reads=dict(signs.corrupt_reads),
        window_bytes=window.limit if window else 0,
        window_shrunk=dict(window.shrunk) if window else {},
    )
    if choice is None:
        return found
    return msgspec.structs.replace(
        found,
        codec=choice.current,
        codec_reason=choice.reason,
        codec_why=choice.why,
        codec_switched=choice.switched,
        codec_ratio=choice.ratio,
        link_rate=choice.link.value,
        codec_rate=choice.coding.value,
    )


def watch_tiers(health: Health, tiers: Mapping[str, TenantTiers], disk: DiskTier | None, clock: Clock) -> None:
    """Have readiness tell of a disk that fails, and of blocks that were published and not kept."""
    if disk is not None:
        failing = disk.stats
        health.ask(
            disk.name,
            Lately(
                lambda: failing.errors,
                clock,
                lambda n: f"{n} operations failed in the last minute ({failing.last_error}): blocks are served from the bucket",
            ),
        )
    health.ask(
        "write_queue",
        Lately(
            lambda: sum(each.stack.overflows for each in tiers.values()),
            clock,
            lambda n: f"{n} blocks were dropped in the last minute: disk or bucket do not keep up (limits.write_behind)",
        ),
    )
