"""Bars of the ratio to the bare medium, ours and others', from the JSON lines of `data_plane.py`: two SVG files, no library.

    python benchmarks/data_plane.py --json --peers KIT > run.jsonl
    python benchmarks/plot.py run.jsonl [more.jsonl] --out docs/images

`data-plane.svg` has the rows that are measured against a medium, `latency.svg` those in microseconds. Later lines replace earlier
ones of the same name and size; lines of other benchmarks are passed over.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _HEAD = 860, 330, 220, 15, 12, 66
# Read on white and on GitHub's dark grey alike, and told apart by lightness where colours are not.
_STYLE: Final = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 } .small { font-size: 11px; fill: #59636e } .end { text-anchor: end }
  .middle { text-anchor: middle } .group { font-weight: 600 }
  .ours { fill: #0969da } .peer { fill: #afb8c1 } .line { stroke: #59636e; stroke-width: 1 }
  .target { stroke: #cf222e; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .ours { fill: #4493f8 } .peer { fill: #59636e } .line { stroke: #9198a1 }
    .target { stroke: #ff7b72 }
  }
"""


class Bar(NamedTuple):
    """One of a group.

    Attributes:
        label: Whose.
        value: Its length.
        says: At the edge.
        ours: Not a peer's.
    """

    label: str
    value: float
    says: str
    ours: bool


class Group(NamedTuple):
    """A row at one size: ours first."""

    name: str
    target: float | None
    bars: Sequence[Bar]


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
    """Rows in microseconds."""
    return [
        Group(f"{name}, {mib:g} MiB", _number(line, "target"), [Bar("median call", _number(line, "value"), _us(line), ours=True)])
        for (name, mib), line in found.items()
        if line.get("unit") == "us" and "target" in line
    ]


def draw(title: str, under: str, groups: Sequence[Group], *, share: bool) -> str:
    """An SVG. With `share` a bar is as long as its ratio to the bare medium; else as its part of the row's target."""
    lengths = {bar: bar.value if share else bar.value / (group.target or 1.0) for group in groups for bar in group.bars}
    longest = max(1.05, *lengths.values())
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    bars, y = list[str](), float(_HEAD)
    for group in groups:
        top = y
        bars.append(f'<text class="group" x="12" y="{y + 12:.0f}">{escape(group.name)}</text>')
        for bar in group.bars:
            width = max(1.0, lengths[bar] * scale)
            bars += [
                f'<text class="small end" x="{_LEFT - 8}" y="{y + 12:.0f}">{escape(bar.label)}</text>',
                f'<rect class="{"ours" if bar.ours else "peer"}" x="{_LEFT}" y="{y:.0f}" width="{width:.1f}" height="{_BAR - 2}"/>',
                f'<text class="small end" x="{_WIDTH - 12}" y="{y + 12:.0f}">{escape(bar.says)}</text>',
            ]
            y += _BAR
        if group.target is not None:
            at = _LEFT + (group.target if share else 1.0) * scale
            bars.append(f'<line class="target" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 2:.0f}" y2="{top + _BAR:.0f}"/>')
        y += _GAP
    whole = _LEFT + scale
    height = y + 14
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">',
            f"<style>{_STYLE}</style>",
            f'<text class="title" x="12" y="22">{escape(title)}</text>',
            f'<text class="small" x="12" y="40">{escape(under)}</text>',
            f'<line class="line" x1="{whole:.1f}" x2="{whole:.1f}" y1="{_HEAD - 8}" y2="{y:.0f}" stroke-dasharray="3 3"/>',
            f'<text class="small middle" x="{whole:.1f}" y="{_HEAD - 12}">{"bare medium" if share else "wanted"}</text>',
            *bars,
            "</svg>\n",
        ]
    )


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
        "data-plane.svg": ("Ratio to the bare medium", under, ratios(found), True),
        "latency.svg": ("Small calls", "Shorter is faster.", latencies(found), False),
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, (title, subtitle, groups, share) in pictures.items():
        if groups:
            (asked.out / name).write_text(draw(title, subtitle, groups, share=share))
            print(f"{asked.out / name}: {len(groups)} rows", file=sys.stderr)


if __name__ == "__main__":
    main()
