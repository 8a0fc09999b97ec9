"""How commands show sessions."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.api import CollectorStats, Session, VersionInfo
from kvstore.cli import output
from kvstore.cli.output import Format


def print_session(session: Session, form: Format) -> None:
    """One of them, with all its properties."""
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


def print_sessions(sessions: Sequence[Session], form: Format) -> None:
    """A line for each."""
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


def print_versions(versions: Sequence[VersionInfo], form: Format) -> None:
    """A line for each."""
    if form is Format.json:
        for version in versions:
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
            for version in versions
        ],
    )


def collected(collector: CollectorStats) -> bool:
    """Whether a collection by any node has told what is alive in the bucket; before that, nothing known is not nothing stored."""
    return bool(collector.usage or collector.last_success)


def _expires(session: Session) -> str:
    return "pinned" if session.pinned else output.when(session.expires)
