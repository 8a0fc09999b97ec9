"""What a transformers cache, of whichever kind, holds of one sequence. Importing this imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from kvstore.connectors import hf_cache
from kvstore.connectors.hf_cache import Geometry
from kvstore.connectors.hf_staging import Leaving, Source
from kvstore.errors import Invalid, Unsupported
from kvstore.ids import Namespace

KINDS: Final = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}


class Held(msgspec.Struct, frozen=True, eq=False):
    """A sequence in a cache.

    Attributes:
        tokens: How many the cache has seen of it.
        layers: What each layer still has: a sliding one may have only the last ones.
    """

    tokens: int
    layers: tuple[Source, ...]

    @property
    def first(self) -> int:
        """From here on every layer has every token."""
        return max((layer.first for layer in self.layers), default=0)

    def leaving(self, geometry: Geometry) -> Callable[[int, np.ndarray], None]:
        """`copy_out(start, kv)` of a group, wherever it is: behind what the caller's stream was computing by now."""
        sources = [self.layers[index] for index in geometry.layers]
        device, dtype = sources[0].keys.device, hf_cache.TORCH[geometry.namespace.dtype]
        if hf_cache.on_host(device):
            return partial(_copy_out, sources, torch.uint16 if dtype is torch.bfloat16 else dtype)
        return Leaving(sources, geometry.dims(geometry.namespace.block_tokens), dtype, device).copy_out


def hold(cache: Any, namespace: Namespace, *, row: int = 0, rows: int = 1, pad: int = 0, most: int | None = None) -> Held:
    """One row of a cache, without the `pad` columns before it.

    Args:
        cache: A `DynamicCache` or `StaticCache`.
        namespace: Of its model.
        row: Which sequence of the batch.
        rows: How many there are.
        pad: Columns before its first token.
        most: Tokens of it, where the columns behind them are padding, too.

    Raises:
        Unsupported: It is a kind of cache that cannot be stored.
        Invalid: It is not of this model, or not of so many sequences.
    """
    layers = getattr(cache, "layers", ())
    if not layers or any(type(layer) not in KINDS for layer in layers) or getattr(cache, "offloading", False):
        kinds = sorted({type(layer).__name__ for layer in layers})
        raise Unsupported(
            f"past_key_values is a {type(cache).__name__} of {', '.join(kinds) or 'nothing'}; a DynamicCache or a StaticCache "
            "that is neither quantized nor offloaded is needed"
        )
    seen = int(cache.get_seq_length())
    if seen == 0:
        return Held(0, ())
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    shapes = {(tensor.shape[0], tensor.shape[1], tensor.shape[3]) for tensor in tensors}
    wanted = (rows, namespace.kv_heads, namespace.head_dim)
    if len(layers) != namespace.layers or shapes != {wanted}:
        raise Invalid(
            f"past_key_values has {len(layers)} layers of (sequences, heads, head_dim) {sorted(shapes)}; "
            f"{namespace.layers} of {wanted} are needed"
        )
    if tensors[0].dtype != hf_cache.TORCH[namespace.dtype]:
        raise Invalid(f"past_key_values holds {tensors[0].dtype}, and the model computes in {hf_cache.TORCH[namespace.dtype]}")
    tokens = max(0, seen - pad)
    return Held(tokens if most is None else min(tokens, most), tuple(_source(layer, seen, row, pad) for layer in layers))


def _source(layer: Any, seen: int, row: int, pad: int) -> Source:
    if int(layer.get_seq_length()) != seen:
        raise Invalid("past_key_values has layers of different lengths")
    kept = min(seen, layer.keys.shape[2])  # a static layer's memory may be longer, a sliding one's shorter
    begin = max(pad - (seen - kept), 0)
    keys, values = (tensor.detach()[row, :, begin:kept] for tensor in (layer.keys, layer.values))
    return Source(max(0, seen - kept - pad), keys, values)


def _copy_out(sources: Sequence[Source], bits: torch.dtype, start: int, kv: np.ndarray) -> None:
    """Copy the tokens from `start` on, as many as `kv` has room for, from the host's memory."""
    # By numpy: a thread of the client calls this, and torch would start a pool of its own there.
    for source, parts in zip(sources, kv, strict=True):
        for target, tokens in zip(parts, source.part(start, kv.shape[2]), strict=True):
            np.copyto(target, tokens.view(bits).numpy())


def crop(cache: Any, tokens: int) -> None:
    """Keep the first `tokens` tokens of a `DynamicCache`. What is dropped stays in memory until the cache grows again.

    `Cache.crop` counts what is removed, does nothing for 0, and means something else, or raises, for positive numbers.

    Raises:
        Unsupported: A sliding layer no longer has what these tokens need.
    """
    keep, seen = max(0, tokens), int(cache.get_seq_length())
    if keep == 0:
        cache.reset()
    if seen <= keep or keep == 0:
        return
    for layer in cache.layers:
        window = int(getattr(layer, "sliding_window", 0))
        passed = window and seen - layer.keys.shape[2] > max(0, keep - window + 1)
        if isinstance(layer, StaticLayer) or passed:
            raise Unsupported(f"this cache no longer has what its first {keep} tokens need", remedy="restore them instead")
    cache.crop(keep - seen)
