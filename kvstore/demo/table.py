"""What the demo found: a table for a person, JSON lines for a program."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

NAMES = {"recompute": "nowhere: read again", "bucket": "the bucket", "nvme": "NVMe", "dram": "DRAM", "fork": "DRAM, forked"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way to the first token.

    Attributes:
        source: `recompute`, or where the session's blocks were.
        seconds: To the first logits, of each sample.
        by_tier: Bytes by the tier that the node found them in, of the last sample.
        identical: Whether every sample gave what it should; None where it is what others are compared with.
    """

    source: str
    seconds: list[float]
    by_tier: dict[str, int] = {}
    identical: bool | None = None

    @property
    def median(self) -> float:
        """Of the samples."""
        return statistics.median(self.seconds)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the demo found.

    Attributes:
        rows: The first one is the recomputation.
        tokens: Of the session.
        threads: That computed, by kind of work.
    """

    rows: list[Row]
    tokens: int
    threads: dict[str, int]

    @property
    def identical(self) -> bool:
        """Whether all output was."""
        return all(row.identical is not False for row in self.rows)


def table(found: Found) -> Table:
    """For a person."""
    shown = Table(title=f"Time to first token after {found.tokens:,} tokens", title_style="bold")
    shown.add_column("session in")
    for heading in ("median", "range", "faster", "read"):
        shown.add_column(heading, justify="right", overflow="fold")  # a digit that is cut off would be a wrong number
    shown.add_column("from")
    shown.add_column("identical", justify="center")
    baseline = found.rows[0].median
    for row in found.rows:
        read = sum(row.by_tier.values())
        shown.add_row(
            NAMES[row.source],
            f"{row.median:.3f} s",
            f"{min(row.seconds):.2f}-{max(row.seconds):.2f}" if len(row.seconds) > 1 else "",
            "" if row is found.rows[0] else f"{baseline / row.median:.1f}x",
            f"{read / 1e6:.0f} MB" if read else "",
            ", ".join(tier if size == read else f"{tier} {size / read:.0%}" for tier, size in row.by_tier.items()),
            {None: Text(""), True: Text("yes", "green"), False: Text("NO", "bold red")}[row.identical],
        )
    return shown


def lines(found: Found) -> Iterator[dict[str, Any]]:
    """For a program."""
    baseline = found.rows[0].median
    for row in found.rows:
        yield {
            "name": "ttft",
            "source": row.source,
            "value": round(row.median, 6),
            "unit": "s",
            "baseline": round(baseline, 6),
            "ratio": round(baseline / row.median, 2),
            "samples": [round(value, 6) for value in row.seconds],
            "bytes": sum(row.by_tier.values()),
            "by_tier": row.by_tier,
            "identical": row.identical,
        }
    yield {"name": "tokens", "value": found.tokens}
    for work, count in found.threads.items():
        yield {"name": f"threads_{work}", "value": count}
    yield {"name": "identical", "value": found.identical}


def plural(count: int, word: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
