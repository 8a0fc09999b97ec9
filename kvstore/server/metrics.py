"""Metrics for Prometheus: base units, prefix `kvtier_`, never a session id as a label."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvstore import api
from kvstore.server.cost_metrics import cost_metrics

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TIER_GAUGES: Final = {
    "used": "Payload bytes held or reserved.",
    "limit": "Payload bytes it may hold.",
    "queued_bytes": "Bytes waiting to be written to it.",
}
_BREAKER: Final = ("closed", "half_open", "open")
_TIER_COUNTS: Final = {
    "hits": "Blocks found.",
    "tokens": "Tokens that readers got from it.",
    "errors": "Operations that failed.",
    "evictions": "Blocks evicted.",
    "dropped": "Blocks not taken, for want of room or time.",
    "declined": "Blocks not taken because they were not found worth it.",
    "corrupt": "Blocks whose bytes were not what they claim, quarantined.",
}


class Metrics(Collector):
    """What the faces count themselves; the rest is the node's own statistics at the time of asking."""

    def __init__(self) -> None:
        # Own counts: those of the metrics' library take locks, and a lease is counted while its client waits for the core.
        self._requests: Counter[tuple[str, str]] = Counter()
        self._seconds: dict[str, tuple[list[int], list[float]]] = {}  # by op: how many fell into each bucket, and their sum

    def observe(self, op: str, outcome: str, seconds: float) -> None:
        """See :class:`kvstore.server.observe.Observe`."""
        self._requests[op, outcome] += 1
        found = self._seconds.get(op)
        if found is None:
            found = self._seconds[op] = [0] * (len(_SECONDS) + 1), [0.0]
        found[0][bisect_left(_SECONDS, seconds)] += 1
        found[1][0] += seconds

    def collect(self) -> Iterator[Metric]:
        """What was observed."""
        requests = CounterMetricFamily("kvtier_requests", "Requests that ended.", labels=["op", "outcome"])
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        times = HistogramMetricFamily("kvtier_request_seconds", "Time to an answer.", labels=["op"])
        for op, (counts, [total]) in self._seconds.items():
            times.add_metric([op], _cumulated(_SECONDS, counts), total)
        yield times

    def expose(self, stats: api.Stats, accept: str, degraded: Iterable[str] = ()) -> tuple[bytes, str]:
        """The page, and its content type, in the format that the scraper accepts; `degraded` as `/readyz` names its parts."""
        encode, content_type = choose_encoder(accept)
        page = CollectorRegistry()
        page.register(self)
        page.register(NodeCollector(stats, degraded))
        return encode(page), content_type


class NodeCollector(Collector):
    """A node's statistics as metrics."""

    def __init__(self, stats: api.Stats, degraded: Iterable[str] = ()) -> None:
        self._stats, self._degraded = stats, degraded

    def collect(self) -> Iterable[Metric]:
        """Every family, with a sample for each label."""
        stats = self._stats
        yield InfoMetricFamily("kvtier_node", "This node.", {"node": stats.node, "version": stats.version})
        yield GaugeMetricFamily("kvtier_uptime_seconds", "Since it was started.", stats.uptime_s)
        degraded = GaugeMetricFamily("kvtier_degraded", "1 for each guarantee that it cannot give now.", labels=["part"])
        for part in self._degraded:
            degraded.add_metric([part], 1)
        yield degraded
        yield GaugeMetricFamily("kvtier_leases", "Blocks that somebody reads.", stats.leases)
        yield GaugeMetricFamily("kvtier_write_behind_bytes", "Published, and not yet on disk or in the bucket.", stats.queued_bytes)
        yield from _restores(stats)
        yield from _tiers(stats.tiers)
        commits = dict(stats.commits)
        yield GaugeMetricFamily("kvtier_commits_pending", "Acknowledged here, not yet in the bucket.", commits.pop("pending", 0))
        waiting = commits.pop("pending_bytes", 0)
        yield GaugeMetricFamily("kvtier_commits_pending_bytes", "Memory that those take, of limits.pending_commits.", waiting)
        yield _counts("kvtier_commits", "Commits, by how they ended.", "outcome", commits)
        yield _pairs("kvtier_store_requests", "Requests to the bucket, by verb and outcome.", stats.store_requests)
        yield from _bucket(stats.bucket)
        yield _pairs("kvtier_reads", "Requests of readers, by what they found.", stats.reads)
        yield _counts("kvtier_missed_tokens", "Tokens that readers did not get.", "reason", stats.tokens_missed)
        yield _counts("kvtier_task_restarts", "Failures of background tasks.", "task", stats.restarts)
        yield from _collector(stats.collector)
        yield from cost_metrics(stats.cost, stats.prices)
        if stats.events:
            yield _counts("kvtier_events", "KV events: what was published, asked for again, and lost.", "what", stats.events)
        if stats.mesh is not None:
            yield GaugeMetricFamily("kvtier_mesh_members", "Other nodes, as last known.", len(stats.mesh.members))
            yield _counts("kvtier_mesh_fetches", "Blocks asked of other nodes, and what came of it.", "outcome", stats.mesh.fetches)


def _restores(stats: api.Stats) -> Iterator[Metric]:
    yield GaugeMetricFamily("kvtier_restores_running", "Restores at work or waiting.", stats.restores)
    yield _pairs("kvtier_restores", "Restores, by how they ended.", stats.restored, "priority")
    late = HistogramMetricFamily(
        "kvtier_restore_lateness_seconds",
        "By how much restores missed their deadline, those in time included.",
        labels=["priority"],
    )
    for priority, found in stats.lateness.items():
        late.add_metric([priority], _buckets(found), found.total_s)
    yield late
    yield GaugeMetricFamily(
        "kvtier_held_bytes", "Staged ahead of their use, and spared from eviction until then.", stats.held_bytes
    )
    hints = dict(stats.hints)
    yield GaugeMetricFamily("kvtier_hints_scheduled", "Sessions that are to be staged later.", hints.pop("scheduled", 0))
    yield _counts("kvtier_hints", "Hints, by event; also those dropped, and those that failed.", "event", hints)


def _tiers(tiers: Mapping[str, api.TierStats]) -> Iterator[Metric]:
    for field, about in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(f"kvtier_tier_{field.removesuffix('_bytes')}_bytes", about, labels=["tier"])
        for name, tier in tiers.items():
            gauge.add_metric([name], getattr(tier, field))
        yield gauge
    for field, about in _TIER_COUNTS.items():
        yield _counts(f"kvtier_tier_{field}", about, "tier", {name: getattr(tier, field) for name, tier in tiers.items()})
    moved = CounterMetricFamily("kvtier_tier_moved_bytes", "Bytes moved into and out of it.", labels=["tier", "direction"])
    for name, tier in tiers.items():
        moved.add_metric([name, "in"], tier.bytes_in)
        moved.add_metric([name, "out"], tier.bytes_out)
    yield moved
    about = "Bytes that its medium had to write; by those moved in it is the write amplification."
    written = {name: tier.bytes_written for name, tier in tiers.items() if tier.bytes_written}
    yield _counts("kvtier_tier_written_bytes", about, "tier", written)
    missed = CounterMetricFamily("kvtier_tier_misses", "Blocks not found, by reason.", labels=["tier", "reason"])
    seconds = HistogramMetricFamily("kvtier_tier_read_seconds", "Time to read a block from it.", labels=["tier"])
    for name, tier in tiers.items():
        for reason, count in tier.missed.items():
            missed.add_metric([name, reason], count)
        if tier.reads.counts:
            seconds.add_metric([name], _buckets(tier.reads), tier.reads.total_s)
    yield missed
    yield seconds


def _bucket(stats: api.StoreStats) -> Iterator[Metric]:
    state = GaugeMetricFamily("kvtier_breaker_state", "1 for the state that the store's breaker is in.", labels=["state"])
    for name in _BREAKER:
        state.add_metric([name], int(stats.breaker == name))
    yield state
    yield CounterMetricFamily("kvtier_breaker_opened", "How often it opened.", stats.opened)
    yield CounterMetricFamily("kvtier_breaker_refused", "Requests that were not sent because of it.", stats.refused)
    hedges = {"sent": stats.hedges_sent, "won": stats.hedges_won}
    yield _counts("kvtier_hedges", "Reads asked for a second time, and those that were answered first.", "outcome", hedges)
    about = "Registers and manifests that were not what they claim to be; each was read once more."
    yield _counts("kvtier_store_corrupt_reads", about, "folder", stats.corrupt_reads)
    yield GaugeMetricFamily("kvtier_store_window_bytes", "How much may be under way at the store.", stats.window_bytes)
    about = "How often that became less: the store said SlowDown (busy), or its answers took long (slow)."
    yield _counts("kvtier_store_window_shrunk", about, "reason", stats.window_shrunk)
    about = "1 for the codec that new block objects get, and why: set, unmeasured, faster, or near (the other is, by too little)."
    coded = GaugeMetricFamily("kvtier_codec", about, labels=["codec", "reason"])
    if stats.codec:
        coded.add_metric([stats.codec, stats.codec_reason], 1)
    yield coded
    yield CounterMetricFamily("kvtier_codec_switched", "How often `auto` changed it.", stats.codec_switched)
    yield GaugeMetricFamily("kvtier_link_bytes_per_second", "What uploads were carried at.", stats.link_rate)
    yield GaugeMetricFamily("kvtier_codec_bytes_per_second", "What was coded, in raw bytes.", stats.codec_rate)
    yield GaugeMetricFamily("kvtier_codec_stored_ratio", "Stored by raw bytes of what was coded.", stats.codec_ratio)


def _collector(stats: api.CollectorStats) -> Iterator[Metric]:
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield gauge("kvtier_collector_running", "Whether a collection runs.", int(stats.running))
    yield gauge("kvtier_collector_heads", "Families read by the collection that runs, or by the last one.", stats.heads)
    yield gauge("kvtier_collector_listed", "Objects seen by the collection that runs, or by the last one.", stats.listed)
    yield counter("kvtier_collector_deleted", "Objects deleted.", stats.deleted)
    yield counter("kvtier_collector_freed_bytes", "Bytes of deleted objects.", stats.freed)
    yield gauge("kvtier_collector_last_success_timestamp_seconds", "When a collection last succeeded.", stats.last_success)
    yield gauge("kvtier_collector_late_seconds", "By how much the next periodic collection is overdue.", stats.late_s)
    yield _counts("kvtier_collector_runs", "Collections, by how they ended.", "outcome", stats.runs)
    blocks = GaugeMetricFamily("kvtier_bucket_blocks", "Blocks that a session names, at the last collection.", labels=["namespace"])
    nbytes = GaugeMetricFamily("kvtier_bucket_bytes", "Stored bytes of those.", labels=["namespace"])
    for usage in stats.usage:
        blocks.add_metric([usage.namespace], usage.blocks)
        nbytes.add_metric([usage.namespace], usage.bytes)
    yield blocks
    yield nbytes


def _buckets(found: api.Latency) -> list[tuple[str, int]]:
    return _cumulated(found.bounds_s, found.counts)


def _cumulated(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, int]]:
    return list(zip([*map(str, bounds), "+Inf"], accumulate(counts), strict=True))


def _pairs(name: str, about: str, counts: Mapping[str, int], label: str = "op") -> Metric:
    """From counts by "op outcome"."""
    family = CounterMetricFamily(name, about, labels=[label, "outcome"])
    for key, count in counts.items():
        op, _, outcome = key.partition(" ")
        family.add_metric([op, outcome], count)
    return family


def _counts(name: str, about: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
