"""`kvtier serve`: a node with the configuration of this machine."""

from __future__ import annotations

import typer

from kvstore.cli import output
from kvstore.cli.config import ConfigOption, SetOption, read
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.running import LogFormatOption, LogOption, Ready, log_to_stderr, run_node
from kvstore.server import loop
from kvstore.server.logs import LogFormat

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    config: ConfigOption = None,
    settings: SetOption = None,
    log_level: LogOption = "info",
    log_format: LogFormatOption = LogFormat.text,
    form: FormatOption = Format.table,
) -> None:
    """Run a node with the configuration of this machine, until SIGTERM or Ctrl-C; then drain."""
    log_to_stderr(log_level, log_format)
    loop.run(run_node(read(config, settings).settings, _announce_json if form is Format.json else _announce))


def _announce_json(ready: Ready) -> None:
    output.print_json(ready)


def _announce(ready: Ready) -> None:
    for face in filter(None, (ready.url, ready.http)):
        typer.echo(f"node {ready.node} listens at {face}", err=True)
