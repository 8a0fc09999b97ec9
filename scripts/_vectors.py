"""schema/vectors: inputs and expected outputs for every rule of FORMAT.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from _vector_blocks import EVERYTHING, HYBRID, MLA, OPAQUE, ROPE, SMOL, TINY, blocks, fields, page
from _vector_sealing import sealing

from kvstore import codec, keys, model
from kvstore.errors import Invalid
from kvstore.ids import Group, Namespace, Shard, canonical_json, chain, engine_id


def vectors(schema: Path) -> dict[str, bytes]:
    """All files of schema/vectors; `schema` holds the present ones."""
    block_page, files = blocks(schema / "vectors" / "blocks")
    pages = {
        "namespaces": page("namespace fields -> canonical JSON -> id", _namespaces()),
        "prefix_ids": page("tokens and extra keys (hex, by block index) -> [prefix_id, tokens] of each block", _prefix_ids()),
        "shards": page("shards as text; tensors [name, dtype, shape] of a block of them; null where refused", _shards()),
        "keys": page("ids -> key segments (null where refused); whole keys", _keys()),
        "blocks": block_page,
        "sealing": sealing(),
        "values": page("stored JSON values, each with its key: `valid`, or `corrupt`, or of an `unknown` version", _values()),
    }
    return {
        **{f"schema/vectors/{name}.json": _json(page) for name, page in pages.items()},
        **{f"schema/vectors/blocks/{name}": data for name, data in files.items()},
    }


def _json(page: dict[str, Any]) -> bytes:
    return msgspec.json.format(json.dumps(page, ensure_ascii=True).encode(), indent=1) + b"\n"


def _namespaces() -> dict[str, Any]:
    base = TINY
    variants = [
        msgspec.structs.replace(base, **change)
        for change in (
            {"revision": "2"},
            {"dtype": "F16"},
            {"lora": "adapter@1"},
            {"tenant": "other"},
            {"quantization": "fp8"},
            {"rope": ROPE},
            {"block_tokens": 32},
            {"layers": 3},
            {"kv_heads": 4},
            {"head_dim": 8},
            {"fidelity": "int8"},
            {"identity": "vllm"},
            {"groups": (Group(kind="window", window=128),)},
            {"groups": (Group(layers=(0, 1)),)},
        )
    ]
    cases = [base, SMOL, MLA, OPAQUE, HYBRID, EVERYTHING, *variants]
    good = fields(base)
    refused: list[dict[str, Any]] = [
        {**good, "revision": ""},
        {**good, "unknown": 1},
        {**good, "layers": 0},
        {**good, "layers": -1},
        {**good, "kv_heads": 0},
        {**good, "mla_rank": 4},
        {**good, "mla_rope": 4},
        {**good, "page_bytes": 64},
        {**good, "layout": "opaque/1"},
        {**good, "dtype": "FLOAT"},
        {**good, "block_tokens": 8193},
        {**good, "groups": []},
        {**good, "groups": [{"kind": "full", "window": 5, "layers": []}]},
        {**good, "groups": [{"kind": "full", "window": 0, "layers": [1, 0]}]},
        {**good, "groups": [{"kind": "full", "window": 0, "layers": [0]}]},
        {**good, "model": "x" * 4097},
    ]
    for wrong in refused:
        try:
            msgspec.convert(wrong, Namespace)
        except (Invalid, msgspec.ValidationError):
            continue
        raise AssertionError(f"not refused: {wrong}")
    return {
        "namespaces": [{"fields": fields(ns), "canonical": ns.canonical_json().decode(), "id": ns.id} for ns in cases],
        "refused": refused,
        "canonical_json": [
            {"value": value, "text": canonical_json(value)}
            for value in (
                {"b": 10000.0, "a": [1e-5, 1e-7, 1.5e22, -0.0, 0.1, 123456789012345680000.0]},
                {"€": 1, "a": None, "é": True},
            )
        ],
    }


def _prefix_ids() -> dict[str, Any]:
    image = [b"image:" + bytes(range(32)) + (7).to_bytes(4, "little")]
    cases: list[tuple[str, Namespace, list[int], dict[int, list[bytes]], bool]] = [
        ("256 tokens by 16", TINY, list(range(256)), {}, False),
        ("exact multiple", TINY, list(range(32)), {}, True),
        ("partial named", TINY, list(range(35)), {}, True),
        ("partial left out", TINY, list(range(35)), {}, False),
        ("shorter than a block", TINY, [5, 4, 3], {}, True),
        ("no tokens", TINY, [], {}, True),
        ("largest token id", TINY, [0xFFFFFFFF] * 16, {}, False),
        ("a salt on the first block", TINY, list(range(48)), {0: [b"salt"]}, False),
        ("an image from the second block", TINY, list(range(48)), {1: image}, False),
        ("two keys are not one", TINY, list(range(16)), {0: [b"ab", b"c"]}, False),
        ("two keys are not one, otherwise", TINY, list(range(16)), {0: [b"a", b"bc"]}, False),
        ("an empty key is a key", TINY, list(range(16)), {0: [b""]}, False),
        ("another LoRA", msgspec.structs.replace(TINY, lora="adapter@1"), list(range(32)), {}, False),
        ("another tenant", msgspec.structs.replace(TINY, tenant="other"), list(range(32)), {}, False),
    ]
    return {
        "chains": [
            {
                "name": name,
                "namespace": fields(ns),
                "tokens": tokens,
                "extra": {str(block): [key.hex() for key in extra] for block, extra in keys_of.items()},
                "partial": partial,
                "blocks": [[link.prefix_id, link.tokens] for link in chain(ns, tokens, extra=keys_of, partial=partial)],
            }
            for name, ns, tokens, keys_of, partial in cases
        ],
        "engine_keys": [
            {"namespace": fields(OPAQUE), "key": key.hex(), "prefix_id": engine_id(OPAQUE.id, key)}
            for key in (b"", b"\x00", bytes(32), b"0123456789abcdef")
        ],
    }


def _shards() -> dict[str, Any]:
    texts = ["t0of1.p0of1.g0", "t3of8.p1of2.g63", "t4095of4096.p0of1.g0"]
    refused = [
        *(
            "",
            "t0of1",
            "t1of1.p0of1.g0",
            "t0of0.p0of1.g0",
            "t00of1.p0of1.g0",
            "t0of1.p0of1.g64",
            "t0of1.p0of1.g0 ",
            "t-1of1.p0of1.g0",
        ),
        *("t0of4097.p0of1.g0", "t٠of1.p0of1.g0", "T0of1.p0of1.g0"),
    ]
    for text in refused:
        try:
            Shard.parse(text)
        except Invalid:
            continue
        raise AssertionError(f"not refused: {text}")
    wanted: list[tuple[Namespace, str, int]] = [
        *((TINY, "t0of1.p0of1.g0", 16), (TINY, "t1of2.p0of1.g0", 5), (TINY, "t3of4.p0of1.g0", 16), (TINY, "t0of3.p0of1.g0", 16)),
        *((TINY, "t0of1.p1of2.g0", 1), (TINY, "t0of1.p2of3.g0", 1), (TINY, "t0of1.p0of1.g1", 1)),
        *((TINY, "t0of1.p0of1.g0", 0), (TINY, "t0of1.p0of1.g0", 17), (MLA, "t0of1.p0of2.g0", 8), (MLA, "t0of2.p0of1.g0", 8)),
        *(
            (HYBRID, "t0of1.p0of2.g0", 256),
            (HYBRID, "t0of1.p0of1.g1", 3),
            (HYBRID, "t1of2.p0of1.g2", 1),
            (HYBRID, "t0of1.p1of2.g2", 1),
        ),
        *((OPAQUE, "t0of1.p0of1.g0", 128), (OPAQUE, "t0of1.p0of1.g0", 1)),
    ]
    return {"shards": texts, "refused": refused, "tensors": [_tensors(*case) for case in wanted]}


def _tensors(ns: Namespace, shard: str, tokens: int) -> dict[str, Any]:
    try:
        specs: list[Any] | None = [[s.name, s.dtype, list(s.shape)] for s in codec.tensor_specs(ns, Shard.parse(shard), tokens)]
    except Invalid:
        specs = None
    return {"namespace": fields(ns), "shard": shard, "tokens": tokens, "tensors": specs}


def _keys() -> dict[str, Any]:
    good = [
        "a",
        "a b",
        "a+b",
        "a%2Bb",
        "x?y",
        "x#y",
        "~",
        "世界",
        "a/b",
        "a_b",
        "...",
        "....",
        "=",
        "=" + "0" * 64,
        "%2ex%",
        ".a",
    ]
    good += ["A", "é", "e\u0301", "t" * 255, "t" * 256, "t" * 512, "é" * 100, "12/3456", "1234/56", "%252e%252e/x"]
    bad = [
        "",
        ".",
        "..",
        "../../x",
        "a/../b",
        "a/.",
        "%2e%2e/x",
        "a%2F..%2Fb",
        "nul\x00",
        "%00",
        "bell\x07",
        "\x7f",
        "\x85",
        "%0a",
        "x" * 513,
    ]
    for text in bad:
        try:
            keys.check_id(text, "id")
        except Invalid:
            continue
        raise AssertionError(f"not refused: {text!r}")
    root, link = keys.Keys("prod/kv"), chain(TINY, list(range(16)))[0].prefix_id
    family = "f" * 32
    return {
        "segments": [{"id": keys.check_id(text, "id"), "segment": keys.escape(text)} for text in good],
        "refused": bad,
        "whole": {
            "root": "prod/kv",
            "tenant": "a/b",
            "session": "chat 42",
            "namespace": TINY.id,
            "shard": "t0of1.p0of1.g0",
            "prefix_id": link,
            "gen": 57,
            "family": family,
            "id": "0" * 32,
            "lane": "main",
            "keys": {
                "format": root.format,
                "epoch": root.epoch,
                "namespace": root.namespace(TINY.id),
                "block": root.block(TINY.id, "t0of1.p0of1.g0", link, 57),
                "head": root.head("a/b", family),
                "manifest": root.manifest("a/b", family, keys.manifest_name(57, "0" * 32)),
                "name": root.name("a/b", "chat 42", TINY.id, "main"),
            },
        },
    }


def _values() -> dict[str, Any]:
    prefix_ids = [link.prefix_id for link in chain(TINY, list(range(32)))]
    manifest = model.Manifest(
        namespace=TINY.id,
        shards=("t0of2.p0of1.g0", "t1of2.p0of1.g0"),
        block_tokens=16,
        tokens=32,
        labels={"title": "世界"},
        created=1767225600.5,
        blocks=tuple(
            model.BlockRef(prefix_id, 16, (model.Copy(0, 57, 4640, 4096), model.Copy(1, 56, 4500, 4096)))
            for prefix_id in prefix_ids
        ),
    )
    branch = model.Branch(
        seq=41,
        manifest=f"0000000057-{'a' * 32}",
        n=2,
        ttl=86400,
        history=(model.Version(seq=40, manifest=f"0000000056-{'b' * 32}", n=1, at=1.5),),
    )
    head = model.Head(swaps=812, write="c" * 32, recent=("d" * 32, "c" * 32), sealed_at=56, branches={"e" * 32: branch})
    whole = keys.Keys()
    places = {
        "format": whole.format,
        "epoch": whole.epoch,
        "head": whole.head("a/b", "f" * 32),
        "name": whole.name("a/b", "chat/42", TINY.id, "main"),
        "manifest": whole.manifest("a/b", "f" * 32, keys.manifest_name(57, "a" * 32)),
    }
    values: list[tuple[str, model.Body]] = [
        ("format", model.Format(store_id="f" * 32, created=1767225600.0, guarantees={"create": True})),
        ("epoch", model.Epoch(epoch=57, write="0" * 32)),
        ("epoch", model.Epoch(epoch=model.MAX_EPOCH)),
        ("head", model.Head()),
        ("head", head),
        ("name", model.Name(name="chat/42", family="f" * 32, branch="e" * 32)),
        ("manifest", manifest),
    ]
    kinds = {kind: type(value) for kind, value in values}
    text = msgspec.json.encode(manifest).decode()
    bad = [
        ("manifest", "unknown", text.replace('"v":1', '"v":2')),
        ("manifest", "corrupt", text.replace('"tokens":16', '"tokens":0', 1)),
        ("manifest", "corrupt", text.replace('"tokens":16', '"tokens":-256', 1)),
        ("manifest", "corrupt", text.replace('"tokens":16', '"tokens":8193', 1)),
        ("manifest", "corrupt", text.replace(prefix_ids[0], prefix_ids[0][:-1], 1)),
        ("manifest", "corrupt", text.replace(prefix_ids[0], "../" + prefix_ids[0][3:], 1)),
        ("manifest", "corrupt", text.replace("4640", str(1 << 60))),
        ("manifest", "corrupt", text.replace("4640", "-1")),
        ("manifest", "corrupt", text[:-1]),
        ("manifest", "corrupt", text.replace('"v":1,', "")),
        ("epoch", "corrupt", '{"v":1,"epoch":-1}'),
        ("epoch", "corrupt", '{"v":1,"epoch":9999999998}'),
        ("epoch", "corrupt", '{"v":1,"epoch":"57"}'),
        ("epoch", "unknown", '{"v":0,"epoch":57}'),
        ("head", "corrupt", "[]"),
        ("head", "corrupt", '{"v":1,"branches":' + "[" * 5000),
    ]

    def case(kind: str, state: str, body: str) -> dict[str, Any]:
        return {"kind": kind, "key": places[kind], "is": state, "text": body}

    sound = model.dump(head, places["head"]).decode()
    elsewhere = model.dump(head, whole.head("a/b", "e" * 32)).decode()
    damaged = [
        *("", "{}", '{"v":1}', text, elsewhere, sound + " ", " " + sound, sound[:-1]),
        *(sound.replace('"swaps":812', '"swaps":813'), sound.replace('"v":1', '"v":2'), sound.replace("true", "True", 1)),
        sound[:11] + sound[11:75].upper() + sound[75:],
        sound[:11] + "0" * 64 + sound[75:],
        '{"v":1,' + sound[1:75] + '"' + sound[82:],
    ]
    return {
        "values": [
            *(case(kind, "valid", model.dump(value, places[kind]).decode()) for kind, value in values),
            *(case(kind, state, model.sealed(body.encode(), kinds[kind], places[kind]).decode()) for kind, state, body in bad),
            *(case("head", "corrupt", body) for body in damaged),
        ]
    }
