"""`kvtier gateway`: the proxy in front of engines."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvstore.cli import output
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.running import LogFormatOption, LogOption, log_to_stderr, stop_on_signals
from kvstore.errors import NotFound
from kvstore.gateway.app import Gateway
from kvstore.gateway.settings import GatewaySettings, load
from kvstore.server import loop
from kvstore.server.logs import LogFormat

app = typer.Typer(add_completion=False)


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Where a gateway can be reached now."""

    event: str = "ready"
    url: str
    engines: list[str]
    pid: int


@app.command()
def gateway(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="NAME=URL[,node=URL][,events=URL][,replay=URL]",
            help="An engine: its server, the kvtier node beside it, where it publishes KV events. May be repeated.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="gateway.toml; flags go over it.")] = None,
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Its address; 127.0.0.1:7900 by default.")] = "",
    model: Annotated[str, typer.Option("--model", help="Of the engines, as `kvtier namespaces ls` shows it.")] = "",
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="FOLDER", help="The model's tokenizer; by default engines are asked.")
    ] = "",
    directory: Annotated[
        str, typer.Option("--directory", metavar="URL", help="Of the nodes' mesh, valkey://host:6379: what others have counts.")
    ] = "",
    mesh: Annotated[str, typer.Option("--mesh", help="Name of the mesh there.")] = "",
    log_level: LogOption = "info",
    log_format: LogFormatOption = LogFormat.text,
    form: FormatOption = Format.table,
) -> None:
    """An OpenAI-compatible proxy that sends each request to the engine that will answer first, until SIGTERM or Ctrl-C."""
    log_to_stderr(log_level, log_format)
    if config is not None and not config.is_file():
        raise NotFound(f"--config {config} does not exist", remedy="name a file that is there, or leave --config out")
    text = config.read_text(errors="surrogateescape") if config else ""  # what is no UTF-8 is refused by name
    flags = {"listen": listen, "model": model, "tokenizer": tokenizer, "directory": directory, "mesh": mesh}
    settings = load(text, str(config or "flags"), engines=engine or [], **flags)
    loop.run(_run(settings, form))


async def _run(settings: GatewaySettings, form: Format) -> None:
    stop = stop_on_signals()
    async with Gateway.open(settings) as running:
        # What was loaded by now stays for good. The garbage collector need not walk it again, in the middle of a decision.
        gc.collect()
        gc.freeze()
        if form is Format.json:
            output.print_json(Ready(url=running.url, engines=list(settings.engines), pid=os.getpid()))
        else:
            typer.echo(f"gateway listens at {running.url}/v1, in front of {', '.join(settings.engines)}", err=True)
        await stop.wait()
