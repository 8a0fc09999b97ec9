"""`kvtier fsck`: does the bucket hold what its heads name? Opens the store itself and needs no node."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvstore.cli import output
from kvstore.cli.config import ConfigOption, SetOption, StoreOption, read
from kvstore.cli.embedded import DataOption, folder_of_up
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.repository import repository
from kvstore.config import Settings
from kvstore.errors import EXIT_FAILED
from kvstore.repo.fsck import Report
from kvstore.repo.fsck import fsck as check

app = typer.Typer(add_completion=False)


@app.command()
def fsck(
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what may be mended; a version that lost a block is cut.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also read every named block and verify its digests.")] = False,
    store: StoreOption = "",
    data: DataOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    form: FormatOption = Format.table,
) -> None:
    """Check the bucket itself, without a node, and repair what may be repaired.

    Safe beside live nodes. Ends with 1 where something that a session names is missing or damaged.
    """
    loaded = read(config, settings, {"store.url": store})
    report = asyncio.run(_check(loaded.settings, folder_of_up(data, config), repair=repair, deep=deep))
    if form is Format.json:
        output.print_json({**msgspec.structs.asdict(report), "clean": report.clean})
    else:
        _print(report, repair=repair)
    if not report.clean:
        raise typer.Exit(EXIT_FAILED)


async def _check(settings: Settings, folder: Path | None, *, repair: bool, deep: bool) -> Report:
    async with repository(settings, folder) as repo:
        with output.waiting("checking the bucket"):
            return await check(repo, deep=deep, repair=repair)


def _print(report: Report, *, repair: bool) -> None:
    output.print_fields(
        {
            "epoch": report.epoch,
            "heads": f"{report.heads:,}, {report.dead_heads:,} of them dead",
            "sessions": f"{report.branches:,}, {report.unnamed_branches:,} of them without a name (they expire)",
            "names": f"{report.names:,}, {report.dangling_names:,} of them dangling",
            "manifests": f"{report.manifests:,}, and {report.garbage_manifests:,} for the next collections",
            "blocks": f"{report.blocks:,} ({output.size(report.bytes)}), "
            f"and {report.garbage_blocks:,} ({output.size(report.garbage_bytes)}) that nothing names",
        }
    )
    for finding in report.findings:
        typer.echo(f"{finding.severity}: {finding.kind}: {finding.key}{f': {finding.detail}' if finding.detail else ''}")
    for line in report.repaired:
        typer.echo(f"repaired: {line}")
    if report.clean:
        typer.secho("clean: everything that a session names is there", fg="green")
    elif not repair:
        typer.echo("`kvtier fsck --repair` mends what may be mended", err=True)
