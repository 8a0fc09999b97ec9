"""Bars in groups, as SVG: no library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

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
        value: Its length, as a part of the whole.
        says: At the edge.
        ours: Stands out.
    """

    label: str
    value: float
    says: str
    ours: bool


class Group(NamedTuple):
    """Bars that are compared, and a mark at the length that was wanted."""

    name: str
    target: float | None
    bars: Sequence[Bar]


def draw(title: str, under: str, groups: Sequence[Group], *, whole: str) -> str:
    """An SVG. A line goes through all bars at the length of 1, and bears the name `whole`."""
    longest = max([1.05, *(bar.value for group in groups for bar in group.bars)])
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    bars, y = list[str](), float(_HEAD)
    for group in groups:
        top = y
        bars.append(f'<text class="group" x="12" y="{y + 12:.0f}">{escape(group.name)}</text>')
        for bar in group.bars:
            width = max(1.0, bar.value * scale)
            bars += [
                f'<text class="small end" x="{_LEFT - 8}" y="{y + 12:.0f}">{escape(bar.label)}</text>',
                f'<rect class="{"ours" if bar.ours else "peer"}" x="{_LEFT}" y="{y:.0f}" width="{width:.1f}" height="{_BAR - 2}"/>',
                f'<text class="small end" x="{_WIDTH - 12}" y="{y + 12:.0f}">{escape(bar.says)}</text>',
            ]
            y += _BAR
        if group.target is not None:
            at = _LEFT + group.target * scale
            bars.append(f'<line class="target" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 2:.0f}" y2="{top + _BAR:.0f}"/>')
        y += _GAP
    one = _LEFT + scale
    height = y + 14
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">',
            f"<style>{_STYLE}</style>",
            f'<text class="title" x="12" y="22">{escape(title)}</text>',
            f'<text class="small" x="12" y="40">{escape(under)}</text>',
            f'<line class="line" x1="{one:.1f}" x2="{one:.1f}" y1="{_HEAD - 8}" y2="{y:.0f}" stroke-dasharray="3 3"/>',
            f'<text class="small middle" x="{one:.1f}" y="{_HEAD - 12}">{escape(whole)}</text>',
            *bars,
            "</svg>\n",
        ]
    )
