"""`kvtier warm`: publish a shared prefix."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore import open_sync
from kvstore.cli import output
from kvstore.cli.namespaces import whole
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption
from kvstore.cli.which import LaneOption, NamespaceOption
from kvstore.errors import of_kind

app = typer.Typer(add_completion=False)


@app.command()
def warm(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="Holds the prefix: a system prompt, a document.")],
    *,
    as_: Annotated[
        str, typer.Option("--as", metavar="NAME", help="What to call it after warm/; the session's id by default.")
    ] = "",
    tokens: Annotated[int | None, typer.Option(min=1, help="Only the whole blocks within so many tokens.")] = None,
    version: Annotated[int, typer.Option(min=0, help="Which version; 0 is the current one.")] = 0,
    namespace: NamespaceOption = "",
    lane: LaneOption = "",
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Publish a prefix for everyone in the tenant: a pinned fork that never expires, brought into the node's memory.

    A node computes no KV: commit the prefix as a session first (examples/warm_prefix.py). Prompts that begin with it find its
    blocks from then on; `kvtier sessions rm warm/NAME` lets go of it.
    """
    with open_sync(url) as kv:
        warmed = kv.warm(session, as_=as_, version=version, tokens=tokens, namespace=whole(kv, namespace), lane=lane)
        status = kv.wait(warmed.restore_id)
    if form is Format.json:
        output.print_json(status)
    else:
        output.print_fields(
            {
                "id": warmed.session.id,
                "tokens": warmed.session.tokens,
                "blocks": warmed.session.blocks,
                "bytes": output.size(warmed.session.bytes),
                "in memory": f"{status.staged_tokens:,} tokens",
                "namespace": warmed.session.namespace,
            }
        )
    if status.state == "failed":
        raise of_kind(status.kind, f"it is published, and could not be brought into memory: {status.error}")
