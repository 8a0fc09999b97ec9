"""Namespaces, the PrefixId chain, shards."""

import json
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Invalid
from kvstore.ids import (
    BlockName,
    Group,
    Namespace,
    Shard,
    as_tokens,
    block_id,
    canonical_json,
    chain,
    engine_id,
    namespace_id,
    prefix_id,
)

NS = Namespace(model="tiny", revision="1", layers=2, kv_heads=2, head_dim=4, block_tokens=16)


def ids(ns, tokens, **options):
    return [link.prefix_id for link in chain(ns, tokens, **options)]


def hits(stored, asked):
    """Length of the leading run of `asked` that was stored."""
    return next((index for index, link in enumerate(asked) if link not in stored), len(asked))


def test_b16_prefix_ids_do_not_depend_on_the_process():
    script = (
        "import json;from kvstore.ids import *;"
        "ns=Namespace(model='tiny',revision='1',layers=2,kv_heads=2,head_dim=4,block_tokens=16);"
        "print(json.dumps([[l.prefix_id for l in chain(ns,range(256))],ns.id,BlockName(ns.id,Shard(),ns.id,16).tier_key.hex()]))"
    )
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", script],
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONHASHSEED": seed},
            ).stdout
        )
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0][0] == ids(NS, range(256))
    assert len(set(runs[0][0])) == 16


def test_b17_every_rank_finds_every_block():
    shards = [Shard(rank=rank, ranks=2) for rank in (0, 1)]
    stored = {BlockName(NS.id, shard, link, 16).tier_key for shard in shards for link in ids(NS, range(160))}
    assert len(stored) == 20
    for shard in shards:
        asked = [BlockName(NS.id, Shard.parse(str(shard)), link, 16).tier_key for link in ids(NS, range(160))]
        assert hits(stored, asked) == 10
    alone = [BlockName(NS.id, Shard(), link, 16).tier_key for link in ids(NS, range(160))]
    assert hits(stored, alone) == 0


CHANGES = [
    {"dtype": "F16"},
    {"revision": "2"},
    {"lora": "adapter@1"},
    {"model": "other"},
    {"quantization": "fp8"},
    {"rope": '{"rope_theta":10000}'},
    {"fidelity": "int8"},
    {"tenant": "other"},
    {"identity": "vllm"},
    {"layers": 3},
    {"kv_heads": 4},
    {"head_dim": 8},
    {"kv_heads": 0, "head_dim": 0, "mla_rank": 16},
    {"kv_heads": 0, "head_dim": 0, "page_bytes": 512, "layout": "vllm-0.32/cpu"},
    {"groups": (Group(kind="window", window=32),)},
]


@pytest.mark.parametrize("change", CHANGES, ids=",".join)
def test_b18_one_changed_field_gives_no_hit_and_changing_back_gives_all(change):
    stored = set(ids(NS, range(64)))
    other = msgspec.structs.replace(NS, **change)
    assert hits(stored, ids(other, range(64))) == 0
    assert stored.isdisjoint(ids(other, range(64)))
    back = msgspec.structs.replace(other, **{field: getattr(NS, field) for field in change})
    assert hits(stored, ids(back, range(64))) == 4


def test_b18_block_tokens_alone_changes_every_name():
    assert set(ids(NS, range(64))).isdisjoint(ids(msgspec.structs.replace(NS, block_tokens=32), range(64)))


def test_b18_every_field_is_part_of_the_id():
    """A field that someone adds later and forgets to hash would be wrong KV served silently."""
    encoded = json.loads(NS.canonical_json())
    assert sorted(encoded) == sorted(NS.__struct_fields__)
    assert list(encoded) == sorted(encoded)
    assert sorted(encoded["groups"][0]) == sorted(Group.__struct_fields__)


def test_b19_images_whose_ids_end_alike_share_only_the_text_before_them():
    tail = bytes(28)
    images = [b"\x01\x02\x03\x04" + tail, b"\x05\x06\x07\x08" + tail]
    asked = [ids(NS, range(80), extra={2: [image + (3).to_bytes(4, "little")]}) for image in images]
    assert asked[0][:2] == asked[1][:2] == ids(NS, range(32))
    assert set(asked[0][2:]).isdisjoint(asked[1][2:])
    assert hits(set(asked[0]), asked[1]) == 2
    moved = ids(NS, range(80), extra={2: [images[0] + (4).to_bytes(4, "little")]})
    assert hits(set(asked[0]), moved) == 2


def test_b20_a_tenant_never_meets_the_ids_of_another():
    mine = ids(msgspec.structs.replace(NS, tenant="a"), range(256))
    theirs = ids(msgspec.structs.replace(NS, tenant="b"), range(256))
    assert set(mine).isdisjoint(theirs)
    assert hits(set(mine), theirs) == 0


def test_b21_extra_keys_are_never_joined():
    keys = [[b"12", b"3456"], [b"1234", b"56"], [b"123456"], [b"", b"123456"], [b"123456", b""], []]
    found = {block_id(NS.id, NS.id, [1, 2], extra) for extra in keys}
    assert len(found) == len(keys)
    assert block_id(NS.id, NS.id, [1, 2]) != block_id(NS.id, NS.id, [1 + (2 << 32) & 0xFFFFFFFF, 2, 0])


def test_b21_engine_keys_and_token_chains_never_meet():
    root = bytes.fromhex(NS.id)
    assert engine_id(NS.id, b"") != block_id(NS.id, NS.id, [0])
    assert engine_id(NS.id, b"a") != engine_id(NS.id, b"b")
    assert len({engine_id(NS.id, root), engine_id(NS.id, root + root)}) == 2


def test_b24_a_partial_block_is_named_only_when_asked():
    ns = msgspec.structs.replace(NS, block_tokens=256)
    whole, once = chain(ns, range(2049)), chain(ns, range(2048))
    assert whole == once
    assert [link.tokens for link in once] == [256] * 8
    assert [link.tokens for link in chain(ns, range(2050))] == [256] * 8
    exact = chain(ns, range(2049), partial=True)
    assert exact[:8] == once
    assert exact[8].tokens == 1
    assert exact[8].prefix_id == block_id(ns.id, once[-1].prefix_id, [2048])
    assert exact[8].prefix_id not in ids(ns, range(2304))


@given(st.lists(st.integers(0, 0xFFFFFFFF), max_size=80), st.integers(0, 80), st.booleans())
def test_a_prefix_of_tokens_gives_a_prefix_of_blocks(tokens, cut, partial):
    whole, part = chain(NS, tokens, partial=partial), chain(NS, tokens[:cut], partial=False)
    assert whole[: len(part)] == part
    assert sum(link.tokens for link in whole) == (len(tokens) if partial else len(tokens) // 16 * 16)


def test_one_link_is_the_documented_encoding():
    root = bytes.fromhex(NS.id)

    def field(part):
        return len(part).to_bytes(4, "little") + part

    written = b"".join(map(field, (b"kvtier.prefix.1", root, root, b"\x01\0\0\0\x02\0\0\0", (1).to_bytes(4, "little"), b"salt")))
    assert block_id(NS.id, NS.id, [1, 2], [b"salt"]) == blake3(written).hexdigest()


@pytest.mark.parametrize(
    "array", [np.arange(4, dtype=dtype) for dtype in ("u1", "<i4", ">i4", "i8", "u8")], ids=lambda a: str(a.dtype)
)
def test_token_ids_of_any_integer_type_are_the_same_tokens(array):
    assert block_id(NS.id, NS.id, array) == block_id(NS.id, NS.id, [0, 1, 2, 3])


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [1 << 70], [1.0], ["1"], [[1], [2]], [[1], [2, 3]], [True], [None]], ids=repr)
def test_tokens_that_are_no_token_ids_are_refused(tokens):
    with pytest.raises(Invalid):
        as_tokens(tokens)
    with pytest.raises(Invalid):
        chain(NS, tokens, partial=True)


def test_a_block_without_tokens_is_refused():
    with pytest.raises(Invalid):
        block_id(NS.id, NS.id, [])
    assert chain(NS, [], partial=True) == []


def test_extra_keys_are_bounded_and_must_name_a_block():
    with pytest.raises(Invalid):
        chain(NS, range(16), extra={0: [bytes(4097)]})
    with pytest.raises(Invalid):
        block_id(NS.id, NS.id, [1], [bytes(4097)])
    for block in (-1, 1):
        with pytest.raises(Invalid):
            chain(NS, range(16), extra={block: [b"x"]})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"revision": ""}, "revision"),
        ({"model": ""}, "model"),
        ({"tenant": ""}, "tenant"),
        ({"dtype": "float16"}, "dtype"),
        ({"layers": 0}, "layers"),
        ({"layers": 4097}, "layers"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": 8193}, "block_tokens"),
        ({"kv_heads": -1}, "dimension"),
        ({"head_dim": 0}, "shape"),
        ({"mla_rank": 8}, "shape"),
        ({"mla_rope": 8}, "shape"),
        ({"page_bytes": 8}, "shape"),
        ({"layout": "opaque"}, "shape"),
        ({"kv_heads": 1 << 17}, "dimension"),
        ({"groups": ()}, "groups"),
        ({"groups": (Group(kind="window"),)}, "window"),
        ({"groups": (Group(window=4),)}, "window"),
        ({"groups": (Group(layers=(1, 0)),)}, "ascending"),
        ({"groups": (Group(layers=(0,)),)}, "partition"),
        ({"groups": (Group(layers=(0,)), Group(layers=(0, 1)))}, "partition"),
        ({"groups": (Group(), Group())}, "partition"),
        ({"model": "\ud800"}, "model"),
        ({"rope": "x" * 5000}, "rope"),
    ],
    ids=repr,
)
def test_a_namespace_that_could_not_be_right_is_refused_by_field(change, word):
    with pytest.raises(Invalid, match=word):
        msgspec.structs.replace(NS, **change)


def test_an_unknown_namespace_field_is_refused_not_ignored():
    fields = msgspec.to_builtins(NS)
    for wrong in ({**fields, "loras": "x"}, {**fields, "groups": [{"kind": "full", "size": 1}]}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Namespace)


def test_shards_parse_what_they_print_and_nothing_else():
    shard = Shard(rank=3, ranks=8, stage=1, stages=2, group=5)
    assert str(shard) == "t3of8.p1of2.g5"
    assert Shard.parse(str(shard)) == shard
    for text in (
        "",
        "t03of8.p0of1.g0",
        "t8of8.p0of1.g0",
        "t0of1.p0of1.g64",
        "t0of1.p0of1.g0\n",
        "../t0of1.p0of1.g0",
        "t٠of1.p0of1.g0",
    ):
        with pytest.raises(Invalid):
            Shard.parse(text)


@pytest.mark.parametrize("text", ["", "A" * 64, "0" * 63, "0" * 65, "0" * 63 + "g", "0" * 64 + "\n", "٠" * 64])
def test_ids_from_outside_are_64_lower_case_hex_digits(text):
    for parse in (prefix_id, namespace_id):
        with pytest.raises(Invalid):
            parse(text)
    assert prefix_id("0f" * 32) == "0f" * 32


def test_canonical_json_has_one_spelling():
    assert canonical_json({"b": 10000.0, "a": [True, None, 1e-5, 1e-7, -1.5e30, "é\u2028\n\x01"]}) == (
        '{"a":[true,null,0.00001,1e-7,-1.5e+30,"é\u2028\\n\\u0001"],"b":10000}'
    )
    assert canonical_json({"x": 1}) == canonical_json({"x": 1.0})
    for wrong in (float("nan"), float("inf"), {1: 2}, {"x": b"bytes"}, {"x": {1, 2}}):
        with pytest.raises(Invalid):
            canonical_json(wrong)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_canonical_numbers_read_back_as_themselves(value):
    assert float(canonical_json(value)) == value


def test_tier_keys_tell_shard_namespace_and_block_apart():
    link = ids(NS, range(16))[0]
    other = msgspec.structs.replace(NS, revision="2").id
    names = [BlockName(NS.id, Shard(), link, 16), BlockName(NS.id, Shard(ranks=2), link, 16), BlockName(other, Shard(), link, 16)]
    keys = {name.tier_key for name in names}
    assert len(keys) == 3
    assert all(len(key) == 32 for key in keys)
