"""The KV of a model, by its dimensions, and how long a prompt of it takes to restore from a tier."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from kvstore.cli.bench.results import Line
from kvstore.errors import Invalid

_DIMENSIONS: Final = re.compile(r"(\d{1,4})x(\d{1,4})x(\d{1,5})")


class Geometry(msgspec.Struct, frozen=True):
    """Layers, KV heads and their dimension, in a dtype of two bytes."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Of K and V of one token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


KNOWN: Final = {
    "llama-3.1-8b": Geometry(32, 8, 128),
    "llama-3.1-70b": Geometry(80, 8, 128),
    "mistral-7b": Geometry(32, 8, 128),
    "qwen2.5-7b": Geometry(28, 4, 128),
    "smollm2-135m": Geometry(30, 3, 64),
}
DEFAULT: Final = "llama-3.1-8b"


def geometry(text: str) -> Geometry:
    """By name, or as `layers x kv_heads x head_dim`. Raises `Invalid`."""
    if text.lower() in KNOWN:
        return KNOWN[text.lower()]
    match = _DIMENSIONS.fullmatch(text)
    if match is None or "0" in match.groups():
        raise Invalid(
            f"--model {text!r} is not known",
            remedy=f"one of {', '.join(KNOWN)}, or layers x KV heads x head dimension, such as 32x8x128",
        )
    return Geometry(*map(int, match.groups()))


# What tells of a tier's speed, and what of the time until its first byte.
_TIERS: Final = {
    "dram": ("dram_get", "dram_lease"),
    "nvme": ("nvme_get", ""),
    "bucket": ("bucket_get_8", "bucket_get_1"),
}


def estimates(found: Mapping[str, Line], model: Geometry, tokens: int, tokens_per_second: float) -> Iterator[Line]:
    """Seconds to restore so many tokens from each tier that was measured, beside computing them.

    `value` / `baseline` is restoring / computing: below 1 it pays. Without a speed of computing there is only the break-even.
    """
    computing = tokens / tokens_per_second if tokens_per_second else None
    for tier, (speed, first) in _TIERS.items():
        one = found.get(first)
        # A slow bucket may have had no time for eight at once; one at a time is the cautious answer.
        measured = next((line for line in (found.get(speed), one) if line and line.value and line.unit == "GB/s"), None)
        if measured is None or not measured.value:
            continue
        seconds = tokens * model.token_bytes / (measured.value * 1e9) + ((one.p50_ms or 0.0) / 1e3 if one else 0.0)
        note = f"pays unless the model reads {tokens / seconds:,.0f} tokens/s or more"
        if computing is not None:
            note = f"{'load' if seconds < computing else 'compute'}: computing takes {computing:.3f} s; {note}"
        yield Line(
            name=f"restore_{tier}",
            value=seconds,
            unit="s",
            baseline=computing,
            ratio=seconds / computing if computing is not None else None,
            note=note,
        )
