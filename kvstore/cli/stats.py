"""`kvtier stats`: a node, as it stands."""

from __future__ import annotations

import typer

from kvstore import api, open_sync
from kvstore.cli import output
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption
from kvstore.cli.shown import collected

app = typer.Typer(add_completion=False)


@app.command()
def stats(*, url: UrlOption = DEFAULT_URL, form: FormatOption = Format.table) -> None:
    """Tiers, queues and requests of a node."""
    with open_sync(url) as kv:
        found, health = kv.stats(), kv.ready()
    if form is Format.json:
        output.print_json(found)
        return
    if not found.whole:
        output.print_fields(_of_tenant(found))
        return
    output.print_fields(
        {
            "node": _node(found),
            "store": found.store or "none: local tiers and peers only",
            "leases": found.leases,
            "queued": output.size(found.queued_bytes),
            "restores": found.restores,
            "commits": _counts(found.commits),
            **(_bucket(found) if found.store else {}),
            "damaged reads": f"{sum(found.bucket.corrupt_reads.values()):,}",
            "reads": _counts(found.reads),
            "missed tokens": _counts(found.tokens_missed),
            **_mesh(found.mesh),
            **({"restarted tasks": _counts(found.restarts)} if found.restarts else {}),
            **({"live in the bucket": _live(found.collector), "collections": _collections(found.collector)} if found.store else {}),
            **{f"degraded: {part}": why for part, why in health.degraded.items()},
        }
    )
    typer.echo()
    output.print_table(
        ["tier", "used", "limit", "hits", "misses", "tokens", "in", "out", "queued", "evicted", "dropped", "corrupt", "errors"],
        [
            [
                name,
                output.size(tier.used) if tier.limit else "-",  # nobody counts what the bucket holds; see "live in the bucket"
                output.size(tier.limit) if tier.limit else "",
                tier.hits,
                tier.misses,
                tier.tokens,
                output.size(tier.bytes_in),
                output.size(tier.bytes_out),
                output.size(tier.queued_bytes),
                tier.evictions,
                tier.dropped,
                tier.corrupt,
                tier.errors,
            ]
            for name, tier in found.tiers.items()
        ],
        empty="no local tiers",
    )


def _node(found: api.Stats) -> str:
    return f"{found.node} (kvtier {found.version}), up {output.span(found.uptime_s)}"


def _of_tenant(found: api.Stats) -> dict[str, object]:
    """All that a caller without the scope `admin` is told."""
    return {
        "node": _node(found),
        "told": "what is of your tenant alone; `admin` is told of the whole node",
        **{f"{name} used": f"{output.size(tier.used)} of {output.size(tier.limit)}" for name, tier in found.tiers.items()},
        "leases": found.leases,
        "queued": output.size(found.queued_bytes),
        "live in the bucket": _live(found.collector),
    }


def _bucket(found: api.Stats) -> dict[str, str]:
    return {
        "store requests": _counts(found.store_requests),
        "breaker": f"{found.bucket.breaker}, opened {found.bucket.opened:,}, refused {found.bucket.refused:,}",
        "hedged reads": f"{found.bucket.hedges_sent:,}, {found.bucket.hedges_won:,} won",
        "under way at most": f"{output.size(found.bucket.window_bytes)}, shrunk {_counts(found.bucket.window_shrunk)}",
        "codec": f"{found.bucket.codec} ({found.bucket.codec_why})",
    }


def _live(collector: api.CollectorStats) -> str:
    """As of the last collection, by whichever node."""
    if not collector.usage:
        return "nothing" if collected(collector) else "unknown until a collection has run"
    blocks, nbytes = sum(usage.blocks for usage in collector.usage), sum(usage.bytes for usage in collector.usage)
    return f"{output.size(nbytes)} in {blocks:,} blocks of {len(collector.usage)} namespaces"


def _collections(collector: api.CollectorStats) -> str:
    parts = [_counts(collector.runs), f"{output.size(collector.freed)} freed"]
    if collector.running:
        parts.append(f"one is running ({collector.listed:,} objects seen)")
    if collector.late_s:
        parts.append(f"the next is {output.span(collector.late_s)} late")
    if collector.error:
        parts.append(f"the last failed: {collector.error}")
    return "; ".join(parts)


def _mesh(found: api.MeshStats | None) -> dict[str, str]:
    if found is None:
        return {}
    there = ", ".join(found.members) or "nobody"
    return {
        "other nodes": there + (f" ({found.directory})" if found.directory else ""),
        "blocks asked of them": _counts(found.fetches),
    }


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"
