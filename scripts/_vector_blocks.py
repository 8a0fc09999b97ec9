"""schema/vectors/blocks: block objects of every codec and shape, and altered ones that a reader must refuse."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from kvstore import codec
from kvstore.errors import Corrupt
from kvstore.ids import BlockName, Group, Namespace, PrefixId, Shard, block_id, canonical_json, chain, engine_id

ROPE = canonical_json({"rope_theta": 100000.0, "rope_type": "default", "scale": 1e-5})
SMOL = Namespace(model="HuggingFaceTB/SmolLM2-135M-Instruct", revision="main", layers=30, kv_heads=3, head_dim=64, rope=ROPE)
TINY = Namespace(model="tiny", revision="1", layers=2, kv_heads=2, head_dim=4, block_tokens=16)
MLA = Namespace(model="mla", revision="1", layers=3, mla_rank=8, mla_rope=4, dtype="F32", block_tokens=8)
OPAQUE = Namespace(
    model="opaque", revision="1", layers=2, page_bytes=1000, layout="vllm-0.32/cpu-amx/bs128", block_tokens=128, identity="vllm"
)
HYBRID = Namespace(
    model="hybrid",
    revision="1",
    layers=5,
    page_bytes=64,
    layout="engine/x",
    groups=(Group(layers=(0, 4)), Group(kind="window", window=512, layers=(1, 3)), Group(kind="state", layers=(2,))),
)
EVERYTHING = Namespace(
    model='quote " slash / back \\ tab \t bell \x07 del \x7f é 世界 \u2028 😀',
    revision="sha256:00",
    layers=1,
    kv_heads=1,
    head_dim=1,
    quantization="awq",
    lora="adapter@1234",
    dtype="F8_E4M3",
    tenant="a/b c",
    fidelity="int8",
    block_tokens=8192,
)


def page(about: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"about": about, "version": 1, **body}


def fields(ns: Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(ns)
    return fields


def _raw_block(ns: Namespace, shard: Shard, prefix_id: PrefixId, tokens: int) -> tuple[BlockName, bytearray]:
    """A block whose payload looks like numbers of similar size, so that codecs have something to do."""
    name, layout = BlockName(ns.id, shard, prefix_id, tokens), codec.layout(ns, shard, tokens)
    raw = bytearray(layout.raw_bytes)
    noise = blake3(b"kvtier.vectors" + prefix_id.encode()).digest(length=layout.payload_bytes)
    payload = bytearray(byte if index % 2 == 0 else 0x3C | byte & 0x83 for index, byte in enumerate(noise))
    if ns.identity == "tokens":
        payload[layout.offsets[-1] :] = struct.pack(f"<{tokens}I", *range(tokens))
    raw[layout.header_bytes :] = payload
    codec.seal(memoryview(raw), name, ns)
    return name, raw


def _stored(there: Path, raw: memoryview, name: BlockName, ns: Namespace, kind: codec.Codec) -> bytes:
    """The present file while it decodes to the raw object (compressed bytes may differ between versions of zstd), or a new one."""
    decoded = memoryview(bytearray(len(raw)))
    try:
        old = there.read_bytes()
        codec.decode(memoryview(old), name, ns, decoded)
    except (FileNotFoundError, Corrupt):
        old = b""
    return old if decoded == raw else bytes(codec.encode(raw, name, ns, kind).body)


def blocks(there: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    tiny, mla = chain(TINY, list(range(16)))[0].prefix_id, block_id(MLA.id, MLA.id, [0, 1, 2, 3, 4])
    wanted: list[tuple[str, Namespace, Shard, PrefixId, int, Sequence[codec.Codec]]] = [
        ("tiny", TINY, Shard(), tiny, 16, ("zstd", "bp-zstd")),
        ("tiny-rank1", TINY, Shard(rank=1, ranks=2), tiny, 16, ("bp-zstd",)),
        ("mla-partial", MLA, Shard(stage=1, stages=2), mla, 5, ("bp-zstd",)),
        ("opaque", OPAQUE, Shard(), engine_id(OPAQUE.id, b"k"), 128, ("bp-zstd",)),
    ]
    made, files = [], {}
    for title, ns, shard, prefix_id, tokens, codecs in wanted:
        name, raw = _raw_block(ns, shard, prefix_id, tokens)
        layout = codec.layout(ns, shard, tokens)
        files[f"{title}.raw.safetensors"] = bytes(raw)
        for kind in codecs:
            file = f"{title}.{kind}.safetensors"
            files[file] = _stored(there / file, memoryview(raw), name, ns, kind)
        made.append(
            {
                "raw": f"blocks/{title}.raw.safetensors",
                "stored": {kind: f"blocks/{title}.{kind}.safetensors" for kind in codecs},
                "namespace": fields(ns),
                "shard": str(shard),
                "prefix_id": prefix_id,
                "tokens": tokens,
                "tier_key": name.tier_key.hex(),
                "header_bytes": layout.header_bytes,
                "digest": codec.block_digest(memoryview(raw)),
                "tensors": [
                    [spec.name, spec.dtype, list(spec.shape), layout.header_bytes + start]
                    for spec, start in zip(layout.specs, layout.offsets, strict=True)
                ],
            }
        )
    return page(
        "block objects; `refused` are made from the tiny block, each with a right digest unless it says otherwise",
        {"blocks": made, "refused": _refused(files["tiny.raw.safetensors"])},
    ), files


def _refused(good: bytes) -> list[dict[str, str]]:
    """Objects a reader must not accept as the tiny block: header text (unpadded, or not) and payload in hex."""
    size = 8 + int.from_bytes(good[:8], "little")
    text, payload = good[8:size].decode().rstrip(" "), good[size:]
    digests = text[text.index('"digests":"') + 11 :]
    cases: list[tuple[str, str, bytes]] = [
        ("another PrefixId", re.sub('"prefix_id":"[0-9a-f]{64}', '"prefix_id":"' + "0" * 64, text), payload),
        ("version 2", text.replace('"kvtier":"1"', '"kvtier":"2"'), payload),
        ("encrypted", text.replace('"enc":"none"', '"enc":"some"'), payload),
        ("unknown codec", text.replace('"codec":"raw"', '"codec":"lz4"'), payload),
        ("coded, it says, and is not", text.replace('"codec":"raw"', '"codec":"zstd"'), payload),
        ("other token count", text.replace('"tokens":"16"', '"tokens":"15"'), payload),
        ("other shard", text.replace("t0of1", "t0of2"), payload),
        ("other shape", text.replace("[16,2,4]", "[16,4,2]", 1), payload),
        ("other dtype", text.replace('"BF16"', '"F16"', 1), payload),
        ("white space", text.replace(',"layers.0.k"', ', "layers.0.k"'), payload),
        ("a key twice", text[:-1] + ',"layers.0.k":{"dtype":"BF16","shape":[16,2,4],"data_offsets":[0,256]}}', payload),
        ("a further key", text.replace('"enc":"none"', '"enc":"none","more":"1"'), payload),
        ("a gap", text.replace("[256,512]", "[260,516]"), payload[:256] + bytes(4) + payload[256:]),
        ("an overlap", text.replace("[256,512]", "[128,384]"), payload),
        ("a negative offset", text.replace("[0,256]", "[-1,256]"), payload),
        ("a huge offset", text.replace("[256,512]", f"[256,{10**30}]"), payload),
        ("too few digests", text.replace(digests[:64], ""), payload),
        ("a digest in upper case", text.replace(digests[:64], digests[:64].upper()), payload),
        ("payload altered", text, bytes([payload[0] ^ 1]) + payload[1:]),
        ("payload cut", text, payload[:-1]),
        ("trailing byte", text, payload + b"\0"),
        ("deep nesting", "[" * 4000, payload),
    ]
    made = []
    for why, altered, body in cases:
        resigned = _resigned(altered)
        if (resigned, body) == (text, payload):
            raise AssertionError(f"not altered: {why}")
        made.append({"why": why, "header": resigned, "payload": body.hex()})
    wrong = text[:40] + ("0" if text[40] != "0" else "1") + text[41:]
    made.append({"why": "wrong block digest", "header": wrong, "payload": payload.hex()})
    return made


def _resigned(text: str) -> str:
    """The text with the digest that its padded header would have."""
    blank = text[:40] + "0" * 64 + text[104:]
    length = -(-(8 + len(blank)) // 4096) * 4096 - 8
    digest = blake3(length.to_bytes(8, "little") + blank.ljust(length).encode()).hexdigest()
    return text[:40] + digest + text[104:]
