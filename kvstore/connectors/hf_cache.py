"""Between raw block objects and a transformers `DynamicCache`. Importing this imports torch: `hf` does so when first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import torch
from blake3 import blake3
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvstore import codec
from kvstore.connectors.hf_staging import DeviceRoom, HostRoom, Leaving, Room
from kvstore.errors import Invalid, Unsupported
from kvstore.ids import Namespace, Shard

DTYPES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_TORCH: Final = {spelled: dtype for dtype, spelled in DTYPES.items()}
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
    """A cache of the model, with nothing in it.

    Raises:
        Unsupported: One of its layers keeps something else than K and V of every token.
    """
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        raise Unsupported(f"the model is spread over {len(devices)} devices; a session is restored to one")
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise Unsupported(
                f"layer {index} of this model keeps a {type(layer).__name__}; only full attention can be stored yet",
                remedy="use a model without sliding-window, chunked or linear attention",
            )
    return cache


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
    """How a shard's block lies in memory: `[layers, 2 (K, V), tokens, kv_heads, head_dim]`, and its token ids."""

    namespace: Namespace
    shard: Shard

    def _dims(self, tokens: int) -> tuple[int, int, int, int, int]:
        return (self.namespace.layers, 2, tokens, self.namespace.kv_heads, self.namespace.head_dim)

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
        kv = np.frombuffer(payload[:ids], _BITS[self.namespace.dtype]).reshape(self._dims(found.tokens))
        return kv, np.frombuffer(payload[ids:], "<u4")

    def block_bytes(self, tokens: int) -> int:
        """Length of the raw object of a block."""
        return codec.layout(self.namespace, self.shard, tokens).raw_bytes

    def buffer(self, tokens: int) -> np.ndarray:
        """Room for the KV of that many tokens. By numpy: it asks for huge pages, which saves most of the page faults."""
        return np.empty(self._dims(tokens), dtype=_BITS[self.namespace.dtype])

    def room(self, model: Any, tokens: int) -> Room:
        """The same where the model keeps its own."""
        dtype = _TORCH[self.namespace.dtype]
        if on_host(model.device):
            return HostRoom(self.buffer(tokens), dtype)
        return DeviceRoom(self._dims(tokens), dtype, model.device, self.namespace.block_tokens)

    def cache(self, model: Any, kv: torch.Tensor) -> DynamicCache:
        """A cache of views of `kv`, which is `[layers, 2, tokens, kv_heads, head_dim]`."""
        cache = empty_cache(model)
        if kv.shape[2] == 0:
            return cache
        layers: list[Any] = cache.layers
        for layer, (keys, values) in zip(layers, kv.transpose(2, 3).unsqueeze(2), strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache

    def leaving(self, cache: Any) -> Callable[[int, np.ndarray], None]:
        """`copy_out` of that cache, wherever it is: behind what the caller's stream was computing by now."""
        device = cache.layers[0].keys.device
        if on_host(device):
            return partial(self.copy_out, cache)
        return Leaving(cache, self._dims(self.namespace.block_tokens), _TORCH[self.namespace.dtype], device).copy_out

    def copy_out(self, cache: Any, start: int, kv: np.ndarray) -> None:
        """Copy the tokens from `start` on, as many as `kv` has room for, out of a cache on the host."""
        # By numpy: a thread of the client calls this, and torch would start a pool of its own there.
        stop = start + kv.shape[2]
        bits = torch.uint16 if self.namespace.dtype == "BF16" else _TORCH[self.namespace.dtype]
        for layer, (keys, values) in zip(cache.layers, kv, strict=True):
            for target, source in ((keys, layer.keys), (values, layer.values)):
                np.copyto(target, source.detach()[0, :, start:stop].transpose(0, 1).view(bits).numpy())

    def check(self, cache: Any) -> int:
        """The number of tokens in a cache that can be stored.

        Raises:
            Unsupported: It is a kind of cache that cannot be stored yet.
            Invalid: It is not of this model, or of several sequences.
        """
        layers = getattr(cache, "layers", ())
        if not layers or any(type(layer) is not DynamicLayer for layer in layers):
            kinds = sorted({type(layer).__name__ for layer in layers})
            raise Unsupported(
                f"past_key_values is a {type(cache).__name__} of {', '.join(kinds) or 'nothing'}; a DynamicCache is needed"
            )
        length: int = cache.get_seq_length()
        if length == 0:
            return 0
        ns = self.namespace
        wanted = (1, ns.kv_heads, length, ns.head_dim)
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        if len(layers) != ns.layers or any(tuple(tensor.shape) != wanted for tensor in tensors):
            shapes = sorted({tuple(tensor.shape) for tensor in tensors})
            raise Invalid(f"past_key_values has {len(layers)} layers of {shapes}; this session needs {ns.layers} of {wanted}")
        if tensors[0].dtype != _TORCH[ns.dtype]:
            raise Invalid(f"past_key_values holds {tensors[0].dtype}, and the model computes in {_TORCH[ns.dtype]}")
        return length


def crop(cache: Any, tokens: int) -> None:
    """Keep the first `tokens` tokens of a cache. What is dropped stays in memory until the cache grows again.

    `Cache.crop` counts what is removed, does nothing for 0, and means something else, or raises, for positive numbers.
    """
    surplus = cache.get_seq_length() - max(0, tokens)
    if surplus > 0:
        cache.crop(-surplus)


def as_ids(tokens: Any) -> np.ndarray | Sequence[int]:
    """Token ids of one sequence, [n], of a tensor [n] or [1, n] or any flat sequence. Raises `Invalid`."""
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.detach().cpu().numpy()
    if getattr(tokens, "ndim", 1) == 2:
        if tokens.shape[0] != 1:
            raise Invalid(f"input_ids holds {tokens.shape[0]} sequences; a session is one")
        tokens = tokens[0]
    return tokens  # type: ignore[no-any-return]  # what it is is checked by `as_tokens`
