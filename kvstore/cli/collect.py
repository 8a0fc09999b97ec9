"""`kvtier collect`: delete what no session names any more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from kvstore import api, open_sync
from kvstore.cli import output
from kvstore.cli.config import ConfigOption, SetOption, read
from kvstore.cli.embedded import DataOption, beside, folder_of_up
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption
from kvstore.clock import RandomIds, SystemClock
from kvstore.config import Settings
from kvstore.lifecycle.direct import DirectCollector

app = typer.Typer(add_completion=False)


@app.command()
def collect(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; list what would go, and why.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Delete at once what is unnamed now, instead of after up to two periods.")
    ] = False,
    reap: Annotated[bool, typer.Option("--reap", help="Also delete the heads of families that were dead for a week.")] = False,
    purge: Annotated[
        bool, typer.Option("--purge-versions", help="Also delete noncurrent versions under the prefix, in a versioned bucket.")
    ] = False,
    store: Annotated[
        str, typer.Option("--store", metavar="URL", help="Collect this bucket from here, without a node: s3://bucket/prefix?...")
    ] = "",
    data: DataOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Delete from the bucket what no session names any more. Safe beside live nodes and other collections.

    Asks a node; with --store, --config, --set or --data it works on the bucket itself, in this process.
    """
    request = api.Collect(dry_run=dry_run, now=now, reap=reap, purge_versions=purge)
    if store or config is not None or settings or data is not None:
        loaded = read(config, settings, {"store.url": store})
        done = asyncio.run(_directly(loaded.settings, folder_of_up(data, config), request, form))
    else:
        if form is Format.table:
            typer.echo("the node's collection gives way to everything else; on a busy machine it may take a minute", err=True)
        with open_sync(url) as kv:
            done = kv.collect(dry_run=dry_run, now=now, reap=reap, purge_versions=purge)
        for doomed in done.examples if form is Format.table else ():
            _tell(doomed)
        more = sum(done.reasons.values()) - len(done.examples)
        if more > 0 and form is Format.table:
            typer.echo(f"and {more:,} more; with --store or --config all of them are listed", err=True)
    if form is Format.json:
        output.print_json(done)
    else:
        _print(done)


async def _directly(settings: Settings, folder: Path | None, request: api.Collect, form: Format) -> api.Collected:
    """In this process; a dry run prints each thing as it is found."""
    report = output.print_json if form is Format.json else _tell
    async with (
        beside(settings, folder) as found,
        DirectCollector.open(found, SystemClock(), RandomIds()) as direct,
    ):
        if request.dry_run:
            return await direct.run(request, report=report)
        with output.waiting(f"collecting {found.store.url}"):
            return await direct.run(request)


def _tell(doomed: api.Doomed) -> None:
    at = f"{doomed.key} branch {doomed.branch}" if doomed.branch else doomed.key
    gen = f" of generation {doomed.gen}" if doomed.gen else ""
    typer.echo(f"{doomed.reason}: {doomed.kind}{gen}, {output.size(doomed.size)}: {at}")


def _print(done: api.Collected) -> None:
    deleted = "to delete" if done.dry_run else "deleted"
    swept = ("to seal", "to expire") if done.dry_run else ("sealed now", "expired")
    fields: dict[str, object] = {
        "epoch": done.epoch,
        "heads": f"{done.heads:,} ({done.sealed:,} {swept[0]}, {done.expired:,} sessions {swept[1]})",
        "manifests": f"{done.manifests_kept:,} kept, {done.manifests_deleted:,} {deleted}",
        "blocks": f"{done.blocks_kept:,} kept, {done.blocks_deleted:,} {deleted}",
        "freed": f"{output.size(done.bytes_deleted)} would be" if done.dry_run else output.size(done.bytes_deleted),
        "alive": output.size(done.live_bytes),
        "failed": f"{done.failed:,} (the next collection tries again)" if done.failed else "0",
    }
    if done.evicted:
        fields["evicted"] = f"{done.evicted:,} sessions, for want of room; their bytes go with the next collections"
    if done.reaped:
        fields["reaped"] = f"{done.reaped:,} dead heads"
    if done.purged:
        fields["purged"] = f"{done.purged:,} noncurrent versions"
    if done.reasons:
        fields["reasons"] = ", ".join(f"{reason} {count:,}" for reason, count in sorted(done.reasons.items()))
    output.print_fields(fields)
    if len(done.usage) > 1:
        rows = [
            [usage.tenant or "?", output.short(usage.namespace), usage.blocks, output.size(usage.bytes)] for usage in done.usage
        ]
        output.print_table(["tenant", "namespace", "blocks", "bytes"], rows)
    for warning in done.warnings:
        typer.echo(f"warning: {warning}", err=True)
