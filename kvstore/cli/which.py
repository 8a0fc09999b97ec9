"""Options by which commands say which session is meant, and how long it lives."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from kvstore.config import parse_seconds

Id: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="Session id.")]
NamespaceOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--namespace", help="Which of the id's namespaces, or the beginning of it; the only one by default.", metavar="ID"
    ),
]
LaneOption: TypeAlias = Annotated[str, typer.Option("--lane", help="Which of the id's lanes; the only one by default.")]
TtlOption: TypeAlias = Annotated[str, typer.Option("--ttl", help="Time to live: 30m, 12h, 7d; 0 is for ever.", metavar="TIME")]


def ttl_seconds(text: str) -> int | None:
    """What `--ttl` says; None where it says nothing. Raises `Invalid`."""
    return int(parse_seconds(text, "--ttl")) if text else None
