"""What commands print: tables for people, or JSON lines with stable keys for programs; and how both are asked for.

Text that came from a store or a node (session ids, labels) is data: it is never read as markup.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from kvstore.clock import SystemClock

WIDE = 200  # columns where the output is no terminal: a pipe should get whole cells


class Format(StrEnum):
    """How to print."""

    table = "table"
    json = "json"


FormatOption: TypeAlias = Annotated[Format, typer.Option("--format", help="A table for people, or one JSON object per line.")]


def print_json(value: msgspec.Struct | Mapping[str, object]) -> None:
    """One line; keys are field names, which are only ever added to."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str = "nothing") -> None:
    """Rows under headings; numbers go to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    kept = [list(row) for row in rows]
    for index, column in enumerate(columns):
        numeric = bool(kept) and all(isinstance(row[index], (int, float)) for row in kept)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in kept:
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
    if kept:
        screen().print(table)
    else:
        typer.echo(empty, err=True)


def print_fields(fields: Mapping[str, object]) -> None:
    """One thing, a line for each of its properties."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(name, Text(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)))
    screen().print(table)


def screen() -> Console:
    """Standard output as rich sees it, made when used: tests and pipes replace it."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


def transfer() -> Progress:
    """A progress bar over bytes, on stderr, gone when it is done."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr, for what takes a second or more."""
    with Console(stderr=True).status(what):
        yield


def size(count: float) -> str:
    """Bytes, as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def span(seconds: float) -> str:
    """A duration in its two largest units."""
    left = int(abs(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= length or (unit == "s" and not parts):
            parts.append(f"{left // length} {unit}")
            left %= length
    return " ".join(parts[:2])


def when(moment: float, *, zero: str = "never") -> str:
    """A point in time, relative to now."""
    if not moment:
        return zero
    ahead = moment - SystemClock().now()
    if ahead < 0:
        return f"{span(ahead)} ago"
    return f"in {span(60 * round(ahead / 60) if ahead > 3600 else ahead)}"  # of a week a moment ago a week is left


def short(digest: str) -> str:
    """The beginning of a 64-digit id, enough to tell it from others in a table."""
    return digest[:12]
