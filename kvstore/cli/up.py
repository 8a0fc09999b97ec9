"""`kvtier up`: one machine, everything, in one folder."""

from __future__ import annotations

import os
import shlex
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli import output
from kvstore.cli.config import ConfigOption, SetOption, in_force, read
from kvstore.cli.embedded import DataOption, data_folder, in_folder, start
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL
from kvstore.cli.running import LogOption, Ready, log_to_stderr, run_node
from kvstore.errors import Invalid
from kvstore.server import loop

app = typer.Typer(add_completion=False)


@app.command()
def up(
    data: DataOption = None,
    store: Annotated[str, typer.Option("--store", metavar="URL", help="A bucket of yours, instead of an embedded server.")] = "",
    config: ConfigOption = None,
    settings: SetOption = None,
    log_level: LogOption = "warning",
    form: FormatOption = Format.table,
) -> None:
    """One machine, everything: an embedded S3 store unless you name one, and a node.

    Tiers, store and socket live in the data folder, and are there again at the next `up`. Ctrl-C drains and stops.
    """
    log_to_stderr(log_level)
    folder = data_folder(data)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Invalid(f"data folder {folder}: {error.strerror}", remedy="name another with --data") from None
    loop.run(_up(folder, store, config, settings, form))


async def _up(folder: Path, store: str, config: Path | None, flags: list[str] | None, form: Format) -> None:
    named = {"store.url": store}
    loaded = read(config, flags, named)
    async with AsyncExitStack() as lifetime:
        if not loaded.settings.store.url:
            with output.waiting("starting SeaweedFS"):
                named = {"store.url": await lifetime.enter_async_context(start(folder))}
        final = read(config, flags, {**in_folder(loaded, folder), **named}).settings
        await run_node(final, lambda ready: _announce(ready, folder, _doctor(folder, store, config, flags or []), form))


def _announce(ready: Ready, folder: Path, doctor: str, form: Format) -> None:
    if form is Format.json:
        output.print_json(ready)
        return
    typer.secho("kvtier is up", fg="green", bold=True)
    output.print_fields(
        {
            "  engines on this host": ready.url or "no socket",
            "  HTTP": ready.http or "no HTTP",
            "  console": _console(ready.http) or "no HTTP",
            "  store": ready.store,
            "  data": folder,
        }
    )
    typer.echo("\nIn another terminal:\n")
    if ready.http != DEFAULT_URL:
        typer.echo(f"  export KVTIER_URL={shlex.quote(ready.http or ready.url)}")
    if "tls=true" in ready.http:
        typer.echo("  # a host that tls.cert names; with an authority of your own: '...?tls=true&ca_bundle=FILE'")
    for line in ("kvtier sessions ls", doctor, "kvtier stats"):
        typer.echo(f"  {line}")
    typer.echo(f"\nCtrl-C stops it ({os.getpid()}); the data stays.")


def _doctor(folder: Path, store: str, config: Path | None, flags: list[str]) -> str:
    """The command that looks at what this node was started with, from whatever folder."""
    file = in_force(config)
    words = ["kvtier", "doctor"]
    words += ["--store", store] if store else []
    words += ["--config", str(file.absolute())] if file is not None else []
    words += ["--data", str(folder)] if store or file is not None or folder != data_folder(None) else []
    words += [word for flag in flags for word in ("--set", flag)]
    return shlex.join(words)


def _console(http: str) -> str:
    """Where a browser finds what has this storage URL."""
    address, _, query = http.removeprefix("kvtier://").partition("?")
    return f"http{'s' if 'tls=true' in query else ''}://{address}/" if address else ""
