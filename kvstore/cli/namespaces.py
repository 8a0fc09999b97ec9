"""`kvtier namespaces`: what is stored for which model."""

from __future__ import annotations

import typer

from kvstore import open_sync
from kvstore.cli import output
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption

app = typer.Typer(no_args_is_help=True, add_completion=False, help="What is stored for which model.")


@app.callback()
def _namespaces() -> None:
    """What is stored for which model."""


@app.command("ls")
def ls(*, url: UrlOption = DEFAULT_URL, form: FormatOption = Format.table) -> None:
    """List the namespaces that something was stored under."""
    with open_sync(url) as kv:
        found = kv.list_namespaces().namespaces
    if form is Format.json:
        for info in found:
            output.print_json(info)
        return
    output.print_table(
        ["namespace", "model", "revision", "dtype", "layers", "block tokens", "layout"],
        [
            [
                output.short(info.namespace),
                info.fields.model,
                info.fields.revision[:16],
                info.fields.dtype,
                info.fields.layers,
                info.fields.block_tokens,
                info.fields.layout,
            ]
            for info in found
        ],
        empty="no namespaces",
    )
