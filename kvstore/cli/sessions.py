"""`kvtier sessions`: look at sessions and change their lives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from kvstore import open_sync
from kvstore.api import Session
from kvstore.cli import output, restoring
from kvstore.cli.commands import report
from kvstore.cli.namespaces import whole
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption
from kvstore.cli.shown import print_session, print_sessions, print_versions
from kvstore.cli.which import Id, LaneOption, NamespaceOption, TtlOption, ttl_seconds
from kvstore.client import SyncClient
from kvstore.errors import KINDS, Conflict, Corrupt, Gone, Invalid, NotFound
from kvstore.ids import Namespace, is_hex_id

PAGE: Final = 500

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look at sessions and change their lives.")


@app.command("ls")
def ls(
    prefix: Annotated[str, typer.Argument(help="Only ids that begin with this.")] = "",
    *,
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = 1000,
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """List sessions, in the order of their ids."""
    found: list[Session] = []
    cursor = ""
    with open_sync(url) as kv:
        while len(found) < limit:
            page = kv.list_sessions(prefix=prefix, cursor=cursor, limit=min(PAGE, limit - len(found)))
            found += page.sessions
            cursor = page.cursor
            if not cursor:
                break
    print_sessions(found, form)
    if cursor and form is Format.table:
        typer.echo(f"there are more; ask for them with --limit (now {limit})", err=True)


@app.command()
def create(
    id: Id,  # noqa: A002  the name of the field everywhere else
    *,
    namespace: Annotated[
        str,
        typer.Option("--namespace", metavar="ID|FILE.json", help="Its namespace: the id of a known one, or a file of its fields."),
    ],
    lane: LaneOption = "",
    ttl: TtlOption = "",
    sliding: Annotated[bool | None, typer.Option(help="Whether use renews the time to live.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="KEY=VALUE; may be repeated.")] = None,
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Create an empty session."""
    labels = dict(_label(text) for text in label or [])
    with open_sync(url) as kv:
        known = _known(kv, namespace)
        print_session(
            kv.create_session(id, namespace=known, lane=lane, ttl_s=ttl_seconds(ttl), sliding=sliding, labels=labels), form
        )


@app.command()
def show(
    id: Id,  # noqa: A002  the name of the field everywhere else
    *,
    namespace: NamespaceOption = "",
    lane: LaneOption = "",
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Show one session."""
    with open_sync(url) as kv:
        print_session(kv.get_session(id, namespace=whole(kv, namespace), lane=lane), form)


@app.command()
def versions(
    id: Id,  # noqa: A002  the name of the field everywhere else
    *,
    namespace: NamespaceOption = "",
    lane: LaneOption = "",
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """List the versions that can still be restored, newest first."""
    with open_sync(url) as kv:
        found = kv.versions(id, namespace=whole(kv, namespace), lane=lane).versions
    print_versions(found, form)


app.command()(restoring.restore)
app.command()(restoring.hint)


@app.command()
def fork(
    id: Id,  # noqa: A002  the name of the field everywhere else
    new: Annotated[str, typer.Argument(metavar="NEW", help="Id of the second session.")],
    *,
    version: Annotated[int, typer.Option(help="Which version it begins as; 0 is the current one.")] = 0,
    ttl: TtlOption = "",
    namespace: NamespaceOption = "",
    lane: LaneOption = "",
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Make a second session that begins as this one. No blocks move."""
    with open_sync(url) as kv:
        print_session(
            kv.fork(id, as_=new, version=version, ttl_s=ttl_seconds(ttl), namespace=whole(kv, namespace), lane=lane), form
        )


@app.command(context_settings={"allow_extra_args": True})
def rewind(
    context: typer.Context,
    id: Id,  # noqa: A002  the name of the field everywhere else
    *,
    version: Annotated[int | None, typer.Option(help="Back to this version ...")] = None,
    tokens: Annotated[int | None, typer.Option(help="... or to this many tokens, floored to a block.")] = None,
    namespace: NamespaceOption = "",
    lane: LaneOption = "",
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Go back. It is a new version; the ones before stay restorable."""
    if context.args or (version is None) == (tokens is None):
        raise Invalid("rewind needs exactly one of --version and --tokens", remedy="write it like --version 3, or --tokens 4096")
    with open_sync(url) as kv:
        print_session(kv.rewind(id, version=version, tokens=tokens, namespace=whole(kv, namespace), lane=lane), form)


@app.command()
def touch(
    id: Id,  # noqa: A002  the name of the field everywhere else
    *,
    ttl: TtlOption = "",
    namespace: NamespaceOption = "",
    lane: LaneOption = "",
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Renew a session's time to live."""
    with open_sync(url) as kv:
        print_session(kv.touch(id, ttl_s=ttl_seconds(ttl), namespace=whole(kv, namespace), lane=lane), form)


@app.command()
def pin(
    id: Id,  # noqa: A002  the name of the field everywhere else
    *,
    namespace: NamespaceOption = "",
    lane: LaneOption = "",
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Never let it expire."""
    with open_sync(url) as kv:
        print_session(kv.pin(id, namespace=whole(kv, namespace), lane=lane), form)


@app.command()
def unpin(
    id: Id,  # noqa: A002  the name of the field everywhere else
    *,
    namespace: NamespaceOption = "",
    lane: LaneOption = "",
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Let it expire again."""
    with open_sync(url) as kv:
        print_session(kv.unpin(id, namespace=whole(kv, namespace), lane=lane), form)


@app.command("rm")
def rm(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Session ids.")],
    *,
    namespace: NamespaceOption = "",
    lane: LaneOption = "",
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Delete sessions. Their blocks go with the next collections (`kvtier collect`).

    One that cannot be deleted keeps none of the others; the exit status is then that of the first.
    """
    status = 0
    with open_sync(url) as kv:
        known = whole(kv, namespace)
        for one in ids:
            try:
                kv.delete_session(one, namespace=known, lane=lane)
            except (NotFound, Gone, Invalid, Conflict, Corrupt) as error:  # its own; what else goes wrong does so for all of them
                report(error)
                status, kind = status or KINDS[error.kind].exit, error.kind
            else:
                kind = ""
            if form is Format.json:
                output.print_json({"id": one, "deleted": not kind, **({"kind": kind} if kind else {})})
            elif not kind:
                typer.echo(f"deleted {one}")
    if status:
        raise typer.Exit(status)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise Invalid(f"--label is {text!r}; write it like team=search")
    return key, value


def _known(kv: SyncClient, text: str) -> str:
    """The id of a namespace that the node knows: of an id, of its beginning, or of a JSON file, which is made known to it."""
    path = Path(text)
    if is_hex_id(text) or not path.exists():
        try:
            return whole(kv, text)
        except NotFound:
            raise NotFound(
                f"--namespace {text} is neither a file nor the id of a known namespace",
                remedy="`kvtier namespaces ls` shows what is known; a file holds the fields of a namespace as JSON",
            ) from None
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=Namespace)
    except (OSError, msgspec.MsgspecError) as error:
        raise Invalid(f"--namespace {path} does not hold a namespace's fields as JSON: {error}") from None
    kv.put_namespace(fields.id, fields=fields)
    return fields.id
