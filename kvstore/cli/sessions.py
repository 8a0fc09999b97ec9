"""`kvtier sessions`: look at sessions and change their lives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import typer

from kvstore import open_sync
from kvstore.api import Event, Priority, RestoreStatus, Session, Target
from kvstore.cli import output
from kvstore.cli.commands import report
from kvstore.cli.namespaces import whole
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption
from kvstore.client import SyncClient
from kvstore.clock import SystemClock
from kvstore.config import parse_bytes, parse_seconds
from kvstore.errors import KINDS, Conflict, Corrupt, Gone, Invalid, NotFound, of_kind
from kvstore.ids import Namespace, is_hex_id

POLL_MS: Final = 100  # between two movements of the bar
PAGE: Final = 500

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look at sessions and change their lives.")

Id: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="Session id.")]
NamespaceOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--namespace", help="Which of the id's namespaces, or the beginning of it; the only one by default.", metavar="ID"
    ),
]
LaneOption: TypeAlias = Annotated[str, typer.Option("--lane", help="Which of the id's lanes; the only one by default.")]
TtlOption: TypeAlias = Annotated[str, typer.Option("--ttl", help="Time to live: 30m, 12h, 7d; 0 is for ever.", metavar="TIME")]


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
    _print_sessions(found, form)
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
        _print_session(kv.create_session(id, namespace=known, lane=lane, ttl_s=_seconds(ttl), sliding=sliding, labels=labels), form)


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
        _print_session(kv.get_session(id, namespace=whole(kv, namespace), lane=lane), form)


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
    if form is Format.json:
        for version in found:
            output.print_json(version)
        return
    output.print_table(
        ["version", "tokens", "blocks", "written", ""],
        [
            [
                str(version.version),
                "?" if version.tokens < 0 else f"{version.tokens:,}",
                "?" if version.blocks < 0 else f"{version.blocks:,}",
                output.when(version.at, zero=""),
                "current" if version.current else "",
            ]
            for version in found
        ],
    )


@app.command()
def restore(
    id: Id,  # noqa: A002  the name of the field everywhere else
    *,
    version: Annotated[int | None, typer.Option(help="Which version; the current one by default.")] = None,
    tier: Annotated[str, typer.Option(help="Where to: dram, nvme, or bucket, which only resolves.")] = "dram",
    deadline: Annotated[str, typer.Option(help="What is not staged by then is left out.", metavar="TIME")] = "",
    max_bytes: Annotated[str, typer.Option(help="Stage no more than that, in prefix order.", metavar="SIZE")] = "",
    hold: Annotated[str, typer.Option(help="Spare it from eviction for that long, until it is used.", metavar="TIME")] = "",
    speculative: Annotated[bool, typer.Option("--speculative", help="Give way to everybody; it may be dropped.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until it is there. Interrupting cancels it.")] = True,
    namespace: NamespaceOption = "",
    lane: LaneOption = "",
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Bring a session's blocks into a tier, so that its next turn starts at once."""
    deadline_ms = 1000 * int(parse_seconds(deadline, "--deadline")) if deadline else 0
    with open_sync(url) as kv:
        status = kv.restore(
            id,
            namespace=whole(kv, namespace),
            lane=lane,
            version=version,
            tier=_tier(tier),
            deadline_ms=deadline_ms,
            max_bytes=int(parse_bytes(max_bytes, "--max-bytes")) if max_bytes else 0,
            priority=_priority(speculative=speculative),
            hold_ms=1000 * int(parse_seconds(hold, "--hold")) if hold else None,
        )
        if wait:
            status = _watch(kv, status, bar=form is Format.table)
    if form is Format.json:
        output.print_json(status)
    elif status.state != "failed":
        _print_restore(status)
    if status.state == "failed":
        raise of_kind(status.kind, status.error, f"`kvtier sessions versions {id}` lists what can be restored")


@app.command()
def hint(
    id: Id,  # noqa: A002  the name of the field everywhere else
    event: Annotated[str, typer.Argument(metavar="EVENT", help="tool_start, tool_return, resume_at or final.")],
    *,
    in_: Annotated[str, typer.Option("--in", help="Of resume_at: how long from now.", metavar="TIME")] = "",
    at: Annotated[float | None, typer.Option("--at", help="Of resume_at: when, in seconds since the epoch.")] = None,
    namespace: NamespaceOption = "",
    lane: LaneOption = "",
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Say what is about to happen to a session, so that its blocks are in memory when they are needed. Only advice."""
    in_s = float(parse_seconds(in_, "--in")) if in_ else None
    with open_sync(url) as kv:
        hinted = kv.hint(id, event=_event(event), at=at, in_s=in_s, namespace=whole(kv, namespace), lane=lane)
    if form is Format.json:
        output.print_json(hinted)
    else:
        typer.echo("taken" if hinted.taken else "dropped: too many hints are being followed (prestage.hints)")


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
        _print_session(kv.fork(id, as_=new, version=version, ttl_s=_seconds(ttl), namespace=whole(kv, namespace), lane=lane), form)


@app.command()
def rewind(
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
    if (version is None) == (tokens is None):
        raise Invalid("rewind needs exactly one of --version and --tokens")
    with open_sync(url) as kv:
        _print_session(kv.rewind(id, version=version, tokens=tokens, namespace=whole(kv, namespace), lane=lane), form)


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
        _print_session(kv.touch(id, ttl_s=_seconds(ttl), namespace=whole(kv, namespace), lane=lane), form)


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
        _print_session(kv.pin(id, namespace=whole(kv, namespace), lane=lane), form)


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
        _print_session(kv.unpin(id, namespace=whole(kv, namespace), lane=lane), form)


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


def _seconds(text: str) -> int | None:
    return int(parse_seconds(text, "--ttl")) if text else None


def _tier(text: str) -> Target:
    match text:
        case "device" | "dram" | "nvme" | "bucket":
            return text
        case _:
            raise Invalid(f"--tier is {text!r}; it must be dram, nvme or bucket")


def _priority(*, speculative: bool) -> Priority:
    return "speculative" if speculative else "interactive"


def _event(text: str) -> Event:
    match text:
        case "tool_start" | "tool_return" | "resume_at" | "final":
            return text
        case _:
            raise Invalid(f"EVENT is {text!r}; it must be tool_start, tool_return, resume_at or final")


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


def _watch(kv: SyncClient, status: RestoreStatus, *, bar: bool) -> RestoreStatus:
    """Follows a restore to its end, with a bar; cancels it when interrupted."""
    clock = SystemClock()
    try:
        with output.transfer() as progress:
            task = progress.add_task(f"restoring {status.id}", total=None, visible=False)
            started = clock.monotonic()
            while status.state in {"resolving", "staging"}:
                status = kv.get_restore(status.restore_id, wait_ms=POLL_MS)
                # What takes less than a second needs no bar.
                visible = bar and clock.monotonic() - started > 1
                progress.update(task, total=status.bytes, completed=status.staged_bytes, visible=visible)
    except KeyboardInterrupt:
        kv.cancel_restore(status.restore_id)
        raise
    return status


def _print_session(session: Session, form: Format) -> None:
    if form is Format.json:
        output.print_json(session)
        return
    output.print_fields(
        {
            "id": session.id,
            "version": str(session.version),
            "tokens": session.tokens,
            "blocks": session.blocks,
            "bytes": output.size(session.bytes),
            "updated": output.when(session.updated, zero=""),
            "expires": _expires(session),
            "labels": ", ".join(f"{key}={value}" for key, value in session.labels.items()) or "none",
            "namespace": session.namespace,
            "lane": session.lane,
            "family": session.family,
        }
    )


def _print_sessions(sessions: Sequence[Session], form: Format) -> None:
    if form is Format.json:
        for session in sessions:
            output.print_json(session)
        return
    output.print_table(
        ["id", "version", "tokens", "blocks", "size", "expires", "namespace", "lane"],
        [
            [
                one.id,
                one.version,
                one.tokens,
                one.blocks,
                output.size(one.bytes),
                _expires(one),
                output.short(one.namespace),
                one.lane,
            ]
            for one in sessions
        ],
        empty="no sessions",
    )


def _expires(session: Session) -> str:
    return "pinned" if session.pinned else output.when(session.expires)


def _print_restore(status: RestoreStatus) -> None:
    output.print_fields(
        {
            "session": status.id,
            "state": status.state,
            "version": "?" if status.version is None else str(status.version),
            "tokens": f"{status.staged_tokens:,} of {'?' if status.tokens is None else f'{status.tokens:,}'} in {status.tier}",
            "bytes": output.size(status.staged_bytes),
            "found in": ", ".join(f"{tier} {output.size(count)}" for tier, count in status.by_tier.items()) or "nowhere",
            "took": f"{status.elapsed_ms:,.0f} ms",
            "restore": status.restore_id,
        }
    )
