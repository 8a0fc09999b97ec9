"""FORMAT.md is enough: an implementation written from it alone agrees with every vector."""

import importlib.util
import json
import struct
from pathlib import Path

import jsonschema
import pytest

SCHEMA = Path(__file__).parents[2] / "schema"
VECTORS = SCHEMA / "vectors"


def _load():
    spec = importlib.util.spec_from_file_location("kvtier_independent", Path(__file__).with_name("independent.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


second = _load()


def page(name):
    return json.loads((VECTORS / f"{name}.json").read_text())


def test_it_never_imports_kvstore():
    source = Path(__file__).with_name("independent.py").read_text()
    assert "import kvstore" not in source
    assert "from kvstore" not in source
    assert not any(name.startswith("kvstore") for name in vars(second))


def test_namespaces():
    vectors = page("namespaces")
    assert len(vectors["namespaces"]) >= 20
    for case in vectors["namespaces"]:
        assert second.namespace_is_valid(case["fields"])
        assert second.canonical(case["fields"]) == case["canonical"]
        assert second.namespace_id(case["fields"]) == case["id"]
    assert [second.namespace_is_valid(fields) for fields in vectors["refused"]] == [False] * len(vectors["refused"])
    for case in vectors["canonical_json"]:
        assert second.canonical(case["value"]) == case["text"]


def test_namespaces_meet_their_schema():
    schema = json.loads((SCHEMA / "namespace.schema.json").read_text())
    for case in page("namespaces")["namespaces"]:
        jsonschema.validate(case["fields"], schema)
        jsonschema.validate(json.loads(case["canonical"]), schema)


def test_prefix_ids():
    vectors = page("prefix_ids")
    assert len(vectors["chains"]) >= 12
    for case in vectors["chains"]:
        assert second.chain(case["namespace"], case["tokens"], case["extra"], case["partial"]) == case["blocks"], case["name"]
    for case in vectors["engine_keys"]:
        assert second.engine_id(case["namespace"], bytes.fromhex(case["key"])) == case["prefix_id"]


def test_the_encoding_written_out_in_the_page():
    """Section 2.1 spells one link byte by byte."""
    ns = page("namespaces")["namespaces"][0]["fields"]
    root = bytes.fromhex(second.namespace_id(ns))
    written = bytes.fromhex("0f0000006b76746965722e7072656669782e3120000000") + root + bytes.fromhex("20000000") + root
    written += bytes.fromhex("080000000100000002000000" + "0400000000000000")
    assert second.chain(ns, [1, 2], {}, True) == [[second.H(written).hex(), 2]]


def test_shards():
    vectors = page("shards")
    assert all(second.shard(text) for text in vectors["shards"])
    assert [second.shard(text) for text in vectors["refused"]] == [None] * len(vectors["refused"])
    for case in vectors["tensors"]:
        assert second.tensors(case["namespace"], case["shard"], case["tokens"]) == case["tensors"]


def test_keys():
    vectors = page("keys")
    for case in vectors["segments"]:
        assert second.id_is_valid(case["id"])
        assert second.segment(case["id"]) == case["segment"]
    assert [second.id_is_valid(text) for text in vectors["refused"]] == [False] * len(vectors["refused"])
    assert second.whole_keys(vectors["whole"]) == vectors["whole"]["keys"]


@pytest.mark.parametrize("case", page("blocks")["blocks"], ids=lambda case: case["raw"])
def test_blocks(case):
    name = (case["namespace"], case["shard"], case["prefix_id"], case["tokens"])
    data = (VECTORS / case["raw"]).read_bytes()
    raw = second.read(data, *name)
    assert [8 + struct.unpack("<Q", data[:8])[0], data[48:112].decode()] == [case["header_bytes"], case["digest"]]
    assert second.tier_key(second.namespace_id(case["namespace"]), case["shard"], case["prefix_id"]) == case["tier_key"]
    assert [[*tensor[:3]] for tensor in case["tensors"]] == second.tensors(*name[:2], case["tokens"])
    for tensor, _dtype, _shape, offset in case["tensors"]:
        assert raw[tensor] == data[offset : offset + len(raw[tensor])]
    for stored in case["stored"].values():
        assert second.read((VECTORS / stored).read_bytes(), *name) == raw
    for other in ("0" * 64, case["prefix_id"][:-1] + ("0" if case["prefix_id"][-1] != "0" else "1")):
        assert second.read(data, case["namespace"], case["shard"], other, case["tokens"]) is None


@pytest.mark.parametrize("case", page("blocks")["refused"], ids=lambda case: case["why"])
def test_refused_blocks(case):
    tiny = page("blocks")["blocks"][0]
    data = assemble(case)
    assert second.read(data, tiny["namespace"], tiny["shard"], tiny["prefix_id"], tiny["tokens"]) is None


def assemble(case):
    text = case["header"].encode()
    length = -(-(8 + len(text)) // 4096) * 4096 - 8
    return struct.pack("<Q", length) + text.ljust(length) + bytes.fromhex(case["payload"])


def test_values():
    schemas = {path.name.split(".")[0]: json.loads(path.read_text()) for path in SCHEMA.glob("*.schema.json")}
    seen = set()
    for case in page("values")["values"]:
        validator = jsonschema.Draft202012Validator(schemas[case["kind"]])
        assert second.value_is(case["text"], case["key"], validator.is_valid) == case["is"], case
        if case["is"] == "valid":
            fields = {name: value for name, value in json.loads(case["text"]).items() if name != "digest"}
            text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
            assert second.sealed(text, case["key"]) == case["text"]
        seen.add(case["is"])
    assert seen == {"valid", "corrupt", "unknown"}
