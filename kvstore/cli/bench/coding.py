"""The codec: how fast KV is coded and decoded here, and how small it gets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore import codec
from kvstore.cli.bench.geometry import Geometry
from kvstore.cli.bench.results import Line, timed
from kvstore.ids import BlockName, Namespace, Shard, chain

_TOKENS = 256


def measure(geometry: Geometry, seconds: float) -> Iterator[Line]:
    """One block of the model's, of made-up keys and values, by `bp-zstd` on one core."""
    layers = max(1, min(geometry.layers, (16 << 20) // (geometry.token_bytes // geometry.layers * _TOKENS)))
    space = Namespace(
        model="bench", revision="1", layers=layers, kv_heads=geometry.kv_heads, head_dim=geometry.head_dim, dtype="BF16",
        block_tokens=_TOKENS,
    )  # fmt: skip
    tokens = np.arange(_TOKENS, dtype=np.uint32)
    (link,), shard = chain(space, tokens), Shard()
    name, plan = BlockName(space.id, shard, link.prefix_id, _TOKENS), codec.layout(space, shard, _TOKENS)
    raw = np.empty(plan.raw_bytes, np.uint8).data
    values = _like_kv(plan.payload_bytes - 4 * _TOKENS, geometry.head_dim)
    raw[plan.header_bytes : plan.header_bytes + values.nbytes] = values
    raw[plan.header_bytes + values.nbytes :] = tokens.tobytes()
    codec.seal(raw, name, space)
    stored = codec.encode(raw, name, space, "bp-zstd")
    into = np.empty(plan.raw_bytes, np.uint8).data

    def encode(_: int) -> int:
        codec.encode(raw, name, space, "bp-zstd")
        return raw.nbytes

    def decode(_: int) -> int:
        codec.decode(memoryview(stored.body), name, space, into)
        return raw.nbytes

    ratio = raw.nbytes / stored.nbytes
    yield Line(name="codec_ratio", value=ratio, unit="raw/stored", note="made-up bf16 KV; that of models: 1.4 to 1.5")
    yield timed(encode, 64, seconds / 2).line("codec_encode", "bp-zstd, one core")
    yield timed(decode, 64, seconds / 2).line("codec_decode", "bp-zstd, one core, verified")


def _like_kv(nbytes: int, channels: int) -> memoryview:
    """bf16 values whose scale differs from channel to channel, as those of keys do."""
    chance = np.random.default_rng(3)
    scale = np.exp(chance.normal(0.0, 1.0, channels)).astype(np.float32)
    numbers = chance.standard_normal((nbytes // 2 // channels, channels), np.float32) * scale
    return np.ascontiguousarray(numbers.view(np.uint32) >> 16, np.uint16).view(np.uint8).reshape(-1).data
