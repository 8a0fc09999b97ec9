"""kvstore agrees with every golden vector."""

import json
import struct
from pathlib import Path

import msgspec
import pytest

from kvstore import codec, keys, model
from kvstore.errors import Corrupt, Invalid, Unsupported
from kvstore.ids import BlockName, Namespace, Shard, canonical_json, chain, engine_id

VECTORS = Path(__file__).parents[2] / "schema" / "vectors"
STORED = {"format": model.Format, "epoch": model.Epoch, "head": model.Head, "name": model.Name, "manifest": model.Manifest}


def page(name):
    return json.loads((VECTORS / f"{name}.json").read_text())


def namespace(fields):
    return msgspec.convert(fields, Namespace)


def test_namespaces():
    vectors = page("namespaces")
    for case in vectors["namespaces"]:
        ns = namespace(case["fields"])
        assert ns.canonical_json().decode() == case["canonical"]
        assert ns.id == case["id"]
        assert msgspec.json.decode(case["canonical"], type=Namespace) == ns
    assert len({case["id"] for case in vectors["namespaces"]}) == len(vectors["namespaces"])
    for fields in vectors["refused"]:
        with pytest.raises((Invalid, msgspec.ValidationError)):
            namespace(fields)
    for case in vectors["canonical_json"]:
        assert canonical_json(case["value"]) == case["text"]


def test_prefix_ids():
    vectors = page("prefix_ids")
    for case in vectors["chains"]:
        extra = {int(block): [bytes.fromhex(key) for key in found] for block, found in case["extra"].items()}
        links = chain(namespace(case["namespace"]), case["tokens"], extra=extra, partial=case["partial"])
        assert [[link.prefix_id, link.tokens] for link in links] == case["blocks"], case["name"]
    for case in vectors["engine_keys"]:
        assert engine_id(namespace(case["namespace"]).id, bytes.fromhex(case["key"])) == case["prefix_id"]


def test_shards():
    vectors = page("shards")
    for text in vectors["shards"]:
        assert str(Shard.parse(text)) == text
    for text in vectors["refused"]:
        with pytest.raises(Invalid):
            Shard.parse(text)
    for case in vectors["tensors"]:
        call = (namespace(case["namespace"]), Shard.parse(case["shard"]), case["tokens"])
        if case["tensors"] is None:
            with pytest.raises(Invalid):
                codec.tensor_specs(*call)
        else:
            assert [[s.name, s.dtype, list(s.shape)] for s in codec.tensor_specs(*call)] == case["tensors"]


def test_keys():
    vectors = page("keys")
    for case in vectors["segments"]:
        assert keys.escape(keys.check_id(case["id"], "id")) == case["segment"]
    for text in vectors["refused"]:
        with pytest.raises(Invalid):
            keys.check_id(text, "id")


@pytest.mark.parametrize("case", page("blocks")["blocks"], ids=lambda case: case["raw"])
def test_blocks(case):
    ns = namespace(case["namespace"])
    name = BlockName(ns.id, Shard.parse(case["shard"]), case["prefix_id"], case["tokens"])
    raw = (VECTORS / case["raw"]).read_bytes()
    codec.verify(memoryview(raw), name, ns)
    assert codec.block_digest(memoryview(raw)) == case["digest"]
    assert name.tier_key.hex() == case["tier_key"]
    layout = codec.layout(ns, name.shard, name.tokens)
    assert layout.header_bytes == case["header_bytes"]
    assert [
        [spec.name, spec.dtype, list(spec.shape), layout.header_bytes + start]
        for spec, start in zip(layout.specs, layout.offsets, strict=True)
    ] == case["tensors"]
    for kind, path in case["stored"].items():
        into = memoryview(bytearray(layout.raw_bytes))
        stored = memoryview((VECTORS / path).read_bytes())
        codec.decode(stored, name, ns, into)
        assert bytes(into) == raw
        assert codec.stored_header(stored, name, ns).codec == kind


@pytest.mark.parametrize("case", page("blocks")["refused"], ids=lambda case: case["why"])
def test_refused_blocks(case):
    tiny = page("blocks")["blocks"][0]
    ns = namespace(tiny["namespace"])
    name = BlockName(ns.id, Shard.parse(tiny["shard"]), tiny["prefix_id"], tiny["tokens"])
    text = case["header"].encode()
    length = -(-(8 + len(text)) // 4096) * 4096 - 8
    data = memoryview(struct.pack("<Q", length) + text.ljust(length) + bytes.fromhex(case["payload"]))
    into = memoryview(bytearray(codec.layout(ns, name.shard, name.tokens).raw_bytes))
    with pytest.raises(Corrupt):
        codec.decode(data, name, ns, into)
    with pytest.raises(Corrupt):
        codec.verify(data, name, ns)


def test_values():
    for case in page("values")["values"]:
        kind = STORED[case["kind"]]
        if case["is"] == "valid":
            value = model.parse(case["text"].encode(), kind, case["key"])
            assert model.parse(case["text"].encode(), kind, f"some/root/{case['key']}") == value
            again = model.dump(value, case["key"])
            assert model.dump(value, f"some/root/{case['key']}") == again
            fields = [json.loads(text) | {"digest": ""} for text in (again, case["text"])]
            assert fields[0] == fields[1]
        else:
            with pytest.raises(Corrupt if case["is"] == "corrupt" else Unsupported):
                model.parse(case["text"].encode(), kind, case["key"])
