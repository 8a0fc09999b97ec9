"""`kvtier collect`: delete what no session names any more."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore import open_sync
from kvstore.cli import output
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption

app = typer.Typer(add_completion=False)


@app.command()
def collect(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be deleted.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Delete at once what is unnamed now, instead of after up to two periods.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Delete from the bucket what no session names any more. Safe beside live nodes and other collections."""
    with open_sync(url) as kv, output.waiting("collecting"):
        done = kv.collect(dry_run=dry_run, now=now)
    if form is Format.json:
        output.print_json(done)
        return
    output.print_fields(
        {
            "epoch": done.epoch,
            "heads": f"{done.heads:,} ({done.sealed:,} sealed now, {done.expired:,} sessions expired)",
            "manifests": f"{done.manifests_kept:,} kept, {done.manifests_deleted:,} {'to delete' if dry_run else 'deleted'}",
            "blocks": f"{done.blocks_kept:,} kept, {done.blocks_deleted:,} {'to delete' if dry_run else 'deleted'}",
            "freed": output.size(done.bytes_deleted) if not dry_run else f"{output.size(done.bytes_deleted)} would be",
            "failed": f"{done.failed:,} (the next collection tries again)" if done.failed else "0",
        }
    )
