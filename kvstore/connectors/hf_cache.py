"""Between raw block objects and the memory of a model's KV. Importing this imports torch: `hf` does so when first used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from blake3 import blake3
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstore import codec
from kvstore.connectors.hf_staging import DeviceRoom, HostRoom, Room
from kvstore.errors import Invalid, Unsupported
from kvstore.ids import Group, Namespace, Shard

DTYPES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
TORCH: Final = {spelled: dtype for dtype, spelled in DTYPES.items()}
_BITS: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bfloat16
_SAMPLED: Final = 1024  # elements of each weight tensor


def decoder_config(model: Any) -> Mapping[str, Any]:
    """The configuration of the part that has the KV cache, as plain JSON values."""
    config = model.config.get_text_config(decoder=True)
    fields: dict[str, Any] = msgspec.json.decode(config.to_json_string(use_diff=False))
    fields.setdefault("_name_or_path", getattr(model.config, "_name_or_path", ""))
    return fields


def kv_dtype(model: Any) -> str:
    """The dtype of the model's KV, in safetensors' spelling. Raises `Unsupported`."""
    if model.dtype not in DTYPES:
        raise Unsupported(f"a model in {model.dtype} is not supported; supported: {', '.join(map(str, DTYPES))}")
    return DTYPES[model.dtype]


def on_host(device: torch.device) -> bool:
    """Whether KV there is this process's own memory."""
    return device.type == "cpu"


def empty_cache(model: Any) -> DynamicCache:
    """A cache of the model, with nothing in it. Its sliding layers keep what their window passes, so that it can be stored.

    Raises:
        Unsupported: One of its layers keeps something else than K and V of its tokens.
    """
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        raise Unsupported(f"the model is spread over {len(devices)} devices; a session is restored to one")
    config = model.config.get_text_config(decoder=True)
    cache: Any = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in {DynamicLayer, DynamicSlidingWindowLayer}:
            raise Unsupported(
                f"layer {index} of this model keeps a {type(layer).__name__}; only full and sliding-window attention can be stored",
                remedy="use a model without linear or compressed attention and without layers that share their KV",
            )
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" in kinds or (not kinds and getattr(config, "attention_chunk_size", None)):
        raise Unsupported("this model has chunked attention; only full and sliding-window attention can be stored")
    if getattr(config, "use_bidirectional_attention", None) in {True, "all"}:
        raise Unsupported("this model's tokens attend to those behind them, so the KV of a prefix depends on what follows it")
    cache.activate_past_recording()
    return cache  # type: ignore[no-any-return]  # its methods have no types


def groups(cache: DynamicCache) -> tuple[Group, ...]:
    """The attention groups of an empty cache's layers: those with full attention first, then each window's."""
    windows: dict[int, list[int]] = {}
    for index, layer in enumerate(cache.layers):
        windows.setdefault(int(getattr(layer, "sliding_window", 0)), []).append(index)
    if set(windows) == {0}:
        return (Group(),)
    return tuple(
        Group(kind="window" if window else "full", window=window, layers=tuple(windows[window])) for window in sorted(windows)
    )


def weights_digest(model: Any) -> str:
    """BLAKE3 over name, shape, dtype and 1,024 evenly spaced elements of every weight.

    Cheap (a fraction of a second), and stable between processes and devices. Training changes nearly every element; a change of a
    few chosen ones may go unseen, which is why whoever manages weights passes their revision instead.
    """
    digest = blake3(b"kvtier.weights.1")
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().contiguous()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode())
        digest.update(sample.view(torch.uint8).numpy())
    return f"weights-{digest.hexdigest()[:32]}"


def adapters(model: Any) -> str:
    """The names of the adapters in force, or ""; what is in them is part of the weights' digest."""
    return ",".join(model.active_adapters()) if getattr(model, "_hf_peft_config_loaded", False) else ""


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """How a shard's block lies in memory: `[layers, 2 (K, V), tokens, kv_heads, head_dim]`, and its token ids.

    A shard is one attention group: its layers only.
    """

    namespace: Namespace
    shard: Shard

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of its layers in the model."""
        return codec.layout(self.namespace, self.shard, self.namespace.block_tokens).layers

    def since(self, tokens: int) -> int:
        """The first token that this group needs where a prefix of so many is restored; the first one of a block.

        A window's group needs the window, and of a last block that is not full all of it: the next commit completes it.
        """
        group, size = self.namespace.groups[self.shard.group], self.namespace.block_tokens
        return max(0, tokens - max(group.window, size)) // size * size if group.kind == "window" else 0

    def dims(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of the KV of that many tokens."""
        return (len(self.layers), 2, tokens, self.namespace.kv_heads, self.namespace.head_dim)

    def read(self, raw: memoryview, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(KV, token ids) of a raw object, as views."""
        found = codec.layout(self.namespace, self.shard, tokens)
        return self._split(memoryview(raw)[found.header_bytes :], found)

    def payload(self, payload: memoryview, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(KV, token ids) of a payload that is to be written, as writable views."""
        return self._split(payload, codec.layout(self.namespace, self.shard, tokens))

    def _split(self, payload: memoryview, found: codec.Layout) -> tuple[np.ndarray, np.ndarray]:
        if payload.nbytes != found.payload_bytes:
            raise Invalid(f"the payload of {found.tokens} tokens has {found.payload_bytes} bytes, and the buffer {payload.nbytes}")
        ids = found.offsets[-1]
        kv = np.frombuffer(payload[:ids], _BITS[self.namespace.dtype]).reshape(self.dims(found.tokens))
        return kv, np.frombuffer(payload[ids:], "<u4")

    def block_bytes(self, tokens: int) -> int:
        """Length of the raw object of a block."""
        return codec.layout(self.namespace, self.shard, tokens).raw_bytes

    def buffer(self, tokens: int) -> np.ndarray:
        """Room for the KV of that many tokens. By numpy: it asks for huge pages, which saves most of the page faults."""
        return np.empty(self.dims(tokens), dtype=_BITS[self.namespace.dtype])

    def room(self, model: Any, tokens: int) -> Room:
        """The same where the model keeps its own."""
        dtype = TORCH[self.namespace.dtype]
        if on_host(model.device):
            return HostRoom(self.buffer(tokens), dtype)
        return DeviceRoom(self.dims(tokens), dtype, model.device, self.namespace.block_tokens)


def as_ids(tokens: Any) -> np.ndarray | Sequence[int]:
    """Token ids of one sequence, [n], of a tensor [n] or [1, n] or any flat sequence. Raises `Invalid`."""
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.detach().cpu().numpy()
    if getattr(tokens, "ndim", 1) == 2:
        if tokens.shape[0] != 1:
            raise Invalid(
                f"input_ids holds {tokens.shape[0]} sequences; a session is one", remedy="use restore_batch and commit_batch"
            )
        tokens = tokens[0]
    return tokens  # type: ignore[no-any-return]  # what it is is checked by `as_tokens`
