"""Restored KV into a transformers cache: dynamic or static, of one sequence or of a batch. Importing this imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import torch
from transformers import GenerationMixin, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from kvstore.connectors.hf_cache import empty_cache
from kvstore.connectors.hf_deliver import Part
from kvstore.connectors.hf_held import KINDS
from kvstore.errors import Invalid, Unsupported


def arguments(cache: Any) -> Mapping[str, Any]:
    """The cache under the name that this transformers' `generate` has for it."""
    new = "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return {"cache" if new else "past_key_values": cache}


def emptied(model: Any, into: Any, rows: int, tokens: int) -> Any:
    """The cache that is to be filled: `into`, with nothing in it any more, or a new one.

    Args:
        model: The model.
        into: A `StaticCache`, or None.
        rows: Sequences.
        tokens: So many it must have room for.

    Raises:
        Invalid: `into` is too small, or was used for another number of sequences.
        Unsupported: It is another kind of cache.
    """
    if into is None:
        return empty_cache(model)
    layers: Any = getattr(into, "layers", ())
    static: Any = into if isinstance(into, StaticCache) else None
    if static is None or any(type(layer) not in KINDS for layer in layers) or getattr(into, "offloading", False):
        raise Unsupported(f"into is a {type(into).__name__}; a StaticCache that is not offloaded is needed")
    room = min((layer.max_cache_len for layer in layers if type(layer) is StaticLayer), default=tokens)
    if tokens > room:
        raise Invalid(f"the static cache has room for {room} tokens, and there are {tokens}: make it with a larger max_cache_len")
    if any(layer.is_initialized and layer.keys.shape[0] != rows for layer in layers):
        raise Invalid(f"the static cache was used for a batch of another size than {rows}: make a new one")
    with _writing(layers[0]):
        static.reset()
    return static


def fill(cache: Any, rows: Sequence[Sequence[Part]], pads: Sequence[int], columns: int) -> None:
    """Fill an empty cache with the first `columns` columns of a batch.

    Args:
        cache: As `emptied` made it.
        rows: Of each sequence its parts, one for each attention group.
        pads: Of each sequence: the column of its first token.
        columns: All parts reach to here.
    """
    if columns == 0:
        return
    for parts in zip(*rows, strict=True):
        for index, (keys, values) in zip(parts[0].geometry.layers, _columns(parts, pads, columns), strict=True):
            _put(cache.layers[index], keys, values, columns)


def _columns(parts: Sequence[Part], pads: Sequence[int], columns: int) -> torch.Tensor:
    """`[layers, 2, rows, heads, columns from some on, head_dim]` of one attention group; views where there is one row."""
    if len(parts) == 1 and pads[0] == 0:
        kv: torch.Tensor = parts[0].kv[:, :, : columns - parts[0].first]
        return kv.transpose(2, 3).unsqueeze(2)
    # From where on every row has all its tokens: one that has them from its first token on is followed by nothing but padding.
    first = max((part.first + pad for part, pad in zip(parts, pads, strict=True) if part.first), default=0)
    layers, two, _, heads, dim = parts[0].kv.shape
    found: torch.Tensor = parts[0].kv.new_zeros((layers, two, len(parts), heads, columns - first, dim))
    for row, (part, pad) in enumerate(zip(parts, pads, strict=True)):
        begin, origin = max(first, pad), pad + part.first
        if begin < columns:
            found[:, :, row, :, begin - first :] = part.kv[:, :, begin - origin : columns - origin].transpose(2, 3)
    return found


def _put(layer: Any, keys: torch.Tensor, values: torch.Tensor, columns: int) -> None:
    if isinstance(layer, StaticLayer):
        kept = min(columns, layer.max_cache_len)
        with _writing(layer):
            layer.update(keys[:, :, -kept:], values[:, :, -kept:])
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = columns
        return
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):  # a sliding one: it cannot tell from what it has
        layer.cumulative_length = columns


def _writing(layer: Any) -> AbstractContextManager[Any]:
    # Memory that was made in inference mode is written in it only, and what is made here should be usable outside.
    return torch.inference_mode(layer.is_initialized and layer.keys.is_inference())
