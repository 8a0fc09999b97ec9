"""Bars of the ratio to the bare medium, ours and others', from the JSON lines of `data_plane.py`: two SVG files, no library.

    python benchmarks/data_plane.py --json --peers KIT > run.jsonl
    python benchmarks/plot.py run.jsonl [more.jsonl] --out docs/images

`data-plane.svg` has the rows that are measured against a medium, `latency.svg` those in microseconds. Later lines replace earlier
ones of the same name and size; lines of other benchmarks are passed over.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from kvstore.cli.svg import Bar, Group, draw

Line = Mapping[str, object]


def read(paths: Iterable[Path]) -> dict[tuple[str, float], Line]:
    """The lines by name and size, in the order in which they were first seen."""
    found: dict[tuple[str, float], Line] = {}
    for path in paths:
        for text in path.read_bytes().splitlines():
            if text.startswith(b"{"):
                line = msgspec.json.decode(text, type=dict[str, object])
                if isinstance(line.get("name"), str) and isinstance(line.get("mib"), int | float):
                    found[str(line["name"]), _number(line, "mib")] = line
    return found


def ratios(found: Mapping[tuple[str, float], Line]) -> list[Group]:
    """Rows that have a baseline."""
    groups = []
    for (name, mib), line in found.items():
        if "ratio" not in line or ":" in name:
            continue
        bars = [_ratio("kvtier", line, "ratio", ours=True)]
        for (other, size), peer in sorted(found.items()):
            if other.startswith(f"{name}:") and size == mib and "vs_baseline" in peer:
                bars.append(_ratio(other.partition(":")[2], peer, "vs_baseline", ours=False))
        groups.append(Group(f"{name}, {mib:g} MiB", _number(line, "target"), bars))
    return groups


def latencies(found: Mapping[tuple[str, float], Line]) -> list[Group]:
    """Rows in microseconds, as parts of what was wanted."""
    return [
        Group(
            f"{name}, {mib:g} MiB",
            1.0,
            [Bar("median call", _number(line, "value") / _number(line, "target"), _us(line), ours=True)],
        )
        for (name, mib), line in found.items()
        if line.get("unit") == "us" and "target" in line
    ]


def _ratio(label: str, line: Line, key: str, *, ours: bool) -> Bar:
    value = _number(line, key)
    return Bar(label, value, f"{value:.2f}  ({_number(line, 'value'):.2f} {line.get('unit', '')})", ours)


def _us(line: Line) -> str:
    return f"{_number(line, 'value'):,.0f} us (wanted {_number(line, 'target'):,.0f}; p99 {_number(line, 'p99_us'):,.0f})"


def _number(line: Line, key: str) -> float:
    value = line.get(key, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def main() -> None:
    """Write what there are lines for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="what data_plane.py --json printed")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the pictures")
    asked = parser.parse_args()
    found = read(asked.runs)
    under = "Longer is faster; the red mark is what was wanted. Medians of rounds, each beside the medium in the same round."
    pictures = {
        "data-plane.svg": ("Ratio to the bare medium", under, ratios(found), "bare medium"),
        "latency.svg": ("Small calls", "Shorter is faster.", latencies(found), "wanted"),
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, (title, subtitle, groups, whole) in pictures.items():
        if groups:
            (asked.out / name).write_text(draw(title, subtitle, groups, whole=whole))
            print(f"{asked.out / name}: {len(groups)} rows", file=sys.stderr)


if __name__ == "__main__":
    main()
