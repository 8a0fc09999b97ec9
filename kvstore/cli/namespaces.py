"""`kvtier namespaces`: what is stored for which model."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from kvstore import open_sync
from kvstore.api import Dropped, NamespaceInfo
from kvstore.cli import output
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption
from kvstore.client import SyncClient
from kvstore.errors import EXIT_FAILED, Invalid, NotFound
from kvstore.ids import is_hex_id

YesOption: TypeAlias = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="What is stored for which model.")


@app.callback()
def _namespaces() -> None:
    """What is stored for which model."""


@app.command("ls")
def ls(*, url: UrlOption = DEFAULT_URL, form: FormatOption = Format.table) -> None:
    """List the namespaces that something was stored under; blocks and size as of the last collection."""
    with open_sync(url) as kv:
        found = kv.list_namespaces().namespaces
    if form is Format.json:
        for info in found:
            output.print_json(info)
        return
    output.print_table(
        ["namespace", "model", "revision", "dtype", "layers", "block tokens", "layout", "blocks", "size"],
        [
            [
                output.short(info.namespace),
                info.fields.model,
                info.fields.revision[:16],
                info.fields.dtype,
                info.fields.layers,
                info.fields.block_tokens,
                info.fields.layout,
                info.blocks if info.blocks >= 0 else "unknown",
                output.size(info.bytes) if info.bytes >= 0 else "unknown",
            ]
            for info in found
        ],
        empty="no namespaces",
    )


@app.command("rm")
def rm(
    namespace: Annotated[str, typer.Argument(metavar="NAMESPACE", help="Its id, or the beginning of it.")],
    *,
    yes: YesOption = False,
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Drop every session of a namespace, pinned ones too: after a weight update. Their blocks go with the next collections.

    May be repeated, and interrupted. What a node commits to it meanwhile, or later, stays.
    """
    with open_sync(url) as kv:
        found = the_one(kv, namespace)
        if not yes:
            typer.confirm(f"Drop every session of {found.fields.model} {found.fields.revision[:16]}?", abort=True, err=True)
        dropped = kv.delete_namespace(found.namespace)
    print_dropped(dropped, form)


def print_dropped(dropped: Dropped, form: Format) -> None:
    """How much went; ends the command with 1 where something could not be read."""
    if form is Format.json:
        output.print_json(dropped)
    else:
        typer.echo(f"dropped {dropped.sessions:,} sessions of {dropped.families:,} families; `kvtier collect` frees their blocks")
    if dropped.failed:
        typer.echo(f"{dropped.failed:,} heads could not be read and were left alone: run `kvtier fsck`", err=True)
        raise typer.Exit(EXIT_FAILED)


def the_one(kv: SyncClient, wanted: str) -> NamespaceInfo:
    """The namespace of an id, or of its beginning as tables show it. Raises `NotFound`, `Invalid`."""
    found = [info for info in kv.list_namespaces().namespaces if info.namespace.startswith(wanted)] if wanted else []
    if not found:
        raise NotFound(f"there is no namespace {wanted!r}", remedy="`kvtier namespaces ls` lists them")
    if len(found) > 1:
        raise Invalid(f"{len(found)} namespaces begin with {wanted!r}: say more of the id")
    return found[0]


def whole(kv: SyncClient, wanted: str) -> str:
    """What `--namespace` says, as a whole id; empty where it says nothing. Raises as `the_one`."""
    return wanted if not wanted or is_hex_id(wanted) else the_one(kv, wanted).namespace
