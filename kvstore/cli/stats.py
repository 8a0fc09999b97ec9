"""`kvtier stats`: a node, as it stands."""

from __future__ import annotations

import typer

from kvstore import open_sync
from kvstore.cli import output
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption

app = typer.Typer(add_completion=False)


@app.command()
def stats(*, url: UrlOption = DEFAULT_URL, form: FormatOption = Format.table) -> None:
    """Tiers, queues and requests of a node."""
    with open_sync(url) as kv:
        found, health = kv.stats(), kv.ready()
    if form is Format.json:
        output.print_json(found)
        return
    output.print_fields(
        {
            "node": f"{found.node} (kvtier {found.version}), up {output.span(found.uptime_s)}",
            "store": found.store or "none (stage 1: local tiers only)",
            "leases": found.leases,
            "queued": output.size(found.queued_bytes),
            "restores": found.restores,
            "commits": _counts(found.commits),
            "store requests": _counts(found.store_requests),
            **{f"degraded: {part}": why for part, why in health.degraded.items()},
        }
    )
    typer.echo()
    output.print_table(
        ["tier", "used", "limit", "hits", "misses", "in", "out", "evicted", "dropped", "corrupt"],
        [
            [
                name,
                output.size(tier.used),
                output.size(tier.limit),
                tier.hits,
                tier.misses,
                output.size(tier.bytes_in),
                output.size(tier.bytes_out),
                tier.evictions,
                tier.dropped,
                tier.corrupt,
            ]
            for name, tier in found.tiers.items()
        ],
        empty="no local tiers",
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"
