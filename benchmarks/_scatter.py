"""Predicted against measured, as SVG on logarithmic axes: no library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

_SIZE, _LEFT, _TOP, _RIGHT, _BELOW = 420, 70, 60, 150, 50
_COLOURS: Final = ("#0969da", "#1a7f37", "#bf8700", "#cf222e", "#8250df", "#59636e")
# Read on white and on GitHub's dark grey alike.
_STYLE: Final = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-size: 15px; font-weight: 600 }
  .small { font-size: 11px; fill: #59636e } .end { text-anchor: end } .middle { text-anchor: middle }
  .line { stroke: #59636e; stroke-width: 1 } .grid { stroke: #59636e; stroke-width: .3 }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9198a1 } .line, .grid { stroke: #9198a1 } }
"""
_STEPS: Final = (1, 2, 5)


def draw(title: str, under: str, points: Mapping[str, Sequence[tuple[float, float]]], *, unit: str) -> str:
    """An SVG of (predicted, measured) by kind; a line where they are the same, and one a fifth above and below it."""
    every = [value for pairs in points.values() for pair in pairs for value in pair]
    low, high = math.log10(min(every)) - 0.05, math.log10(max(every)) + 0.05

    def x(value: float) -> float:
        return _LEFT + (math.log10(value) - low) / (high - low) * _SIZE

    def y(value: float) -> float:
        return _TOP + _SIZE - (math.log10(value) - low) / (high - low) * _SIZE

    parts = list[str]()
    for tick in [step * 10.0**power for power in range(math.floor(low), math.ceil(high)) for step in _STEPS]:
        if low <= math.log10(tick) <= high:
            parts += [
                f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _SIZE}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>',
                f'<line class="grid" y1="{_TOP}" y2="{_TOP + _SIZE}" x1="{x(tick):.1f}" x2="{x(tick):.1f}"/>',
                f'<text class="small end" x="{_LEFT - 6}" y="{y(tick) + 4:.1f}">{tick:g}</text>',
                f'<text class="small middle" x="{x(tick):.1f}" y="{_TOP + _SIZE + 16}">{tick:g}</text>',
            ]
    first, last = 10**low, 10**high
    for factor, dash in ((1.0, ""), (1.2, ' stroke-dasharray="3 3"'), (1 / 1.2, ' stroke-dasharray="3 3"')):
        start, end = max(first, first / factor), min(last, last / factor)
        ends = f'x1="{x(start):.1f}" y1="{y(start * factor):.1f}" x2="{x(end):.1f}" y2="{y(end * factor):.1f}"'
        parts.append(f'<line class="line" {ends}{dash}/>')
    for index, (kind, pairs) in enumerate(points.items()):
        colour, at = _COLOURS[index % len(_COLOURS)], _TOP + 14 + 20 * index
        parts += [
            f'<circle cx="{x(told):.1f}" cy="{y(took):.1f}" r="4" fill="{colour}" fill-opacity=".75"/>' for told, took in pairs
        ]
        parts.append(f'<circle cx="{_LEFT + _SIZE + 20}" cy="{at - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + _SIZE + 30}" y="{at}">{escape(kind)}</text>')
    width, height = _LEFT + _SIZE + _RIGHT, _TOP + _SIZE + _BELOW
    middle = _TOP + _SIZE / 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
            f"<style>{_STYLE}</style>",
            f'<text class="title" x="12" y="22">{escape(title)}</text>',
            f'<text class="small" x="12" y="40">{escape(under)}</text>',
            *parts,
            f'<text class="middle" x="{_LEFT + _SIZE / 2}" y="{height - 12}">predicted, {escape(unit)}</text>',
            f'<text class="middle" transform="rotate(-90 16 {middle})" x="16" y="{middle}">measured, {escape(unit)}</text>',
            "</svg>\n",
        ]
    )
