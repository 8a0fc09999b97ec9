"""`kvtier sessions restore` and `hint`: have a session in memory when its next turn begins."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from kvstore import open_sync
from kvstore.api import Event, Priority, RestoreStatus, Target
from kvstore.cli import output
from kvstore.cli.namespaces import whole
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption
from kvstore.cli.which import Id, LaneOption, NamespaceOption
from kvstore.client import SyncClient
from kvstore.clock import SystemClock
from kvstore.config import parse_bytes, parse_seconds
from kvstore.errors import Invalid, of_kind

POLL_MS: Final = 100  # between two movements of the bar


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
        remedy = f"`kvtier sessions ls` shows the sessions, `kvtier sessions versions {id}` what can be restored of one"
        raise of_kind(status.kind, status.error, remedy if status.kind in {"not_found", "gone"} else "")


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
    happens, in_s = _event(event), float(parse_seconds(in_, "--in")) if in_ else None
    if (in_s is not None) + (at is not None) != (happens == "resume_at"):
        raise Invalid("resume_at needs one of --in and --at, and no other event takes one", remedy="as in: resume_at --in 20s")
    with open_sync(url) as kv:
        hinted = kv.hint(id, event=happens, at=at, in_s=in_s, namespace=whole(kv, namespace), lane=lane)
    if form is Format.json:
        output.print_json(hinted)
    else:
        typer.echo("taken" if hinted.taken else "dropped: too many hints are being followed (prestage.hints)")


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
