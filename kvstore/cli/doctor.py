"""`kvtier doctor`: is this machine, and this bucket, fit for a node? And what to do where they are not."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import typer
from rich.text import Text

from kvstore.cli import access, bucket, machine, mesh, output
from kvstore.cli.config import ConfigOption, SetOption, StoreOption, read
from kvstore.cli.embedded import DataOption, beside, folder_of_up, in_folder, used_by_up
from kvstore.cli.machine import Finding
from kvstore.cli.output import Format, FormatOption
from kvstore.clock import SystemClock
from kvstore.config import Settings
from kvstore.errors import EXIT_FAILED

_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    store: StoreOption = "",
    config: ConfigOption = None,
    settings: SetOption = None,
    data: DataOption = None,
    form: FormatOption = Format.table,
) -> None:
    """Check the store's guarantees, disk, memory, clock, credentials and peers, and say what to do.

    Where neither a store nor a configuration file is named or found, it looks at the store of your own `kvtier up`. A folder named
    with --data says where disk tier and socket are, as it does for `kvtier up`. Writes two small objects under the store's prefix
    and deletes them again. Ends with 1 where something keeps a node from working.
    """
    folder, loaded = folder_of_up(data, config), read(config, settings, {"store.url": store})
    ours = folder is not None and (folder.is_dir() if data is not None else not loaded.settings.store.url and used_by_up(folder))
    if folder is not None and ours:
        loaded = read(config, settings, in_folder(loaded, folder))
    if form is Format.table:
        typer.echo("what this configuration would do here, not what a running node was started with:", err=True)
    failed = asyncio.run(_examine(loaded.settings, folder, form))
    if failed:
        raise typer.Exit(EXIT_FAILED)


async def _examine(settings: Settings, folder: Path | None, form: Format) -> int:
    """Prints each finding as it comes; how many failed."""
    failed = 0
    async with beside(settings, folder) as found:
        async for finding in _all(found):
            failed += finding.status == "fail"
            if form is Format.json:
                output.print_json(finding)
            else:
                _print(finding)
    return failed


async def _all(settings: Settings) -> AsyncIterator[Finding]:
    for finding in machine.examine(settings):
        yield finding
    for finding in access.examine(settings, SystemClock()):
        yield finding
    async for finding in bucket.examine(settings):
        yield finding
    async for finding in mesh.examine(settings.peers, settings.node.id or socket.gethostname(), os.environ):
        yield finding


def _print(finding: Finding) -> None:
    line = Text.assemble((f"{finding.status:<5}", _STYLE[finding.status]), (f"{finding.name:<18}", "bold"), finding.detail)
    screen = output.screen()
    screen.print(line)
    if finding.remedy and finding.status != "ok":
        screen.print(Text(f"{'':<5}{'':<18}→ {finding.remedy}"))
