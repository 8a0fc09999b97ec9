"""Block objects: every codec gives back every bit, anyone's safetensors library can read them, layers can be read alone."""

import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import codec
from kvstore.codec.header import header_of
from kvstore.codec.layout import coded_limit
from kvstore.errors import Corrupt, Invalid
from kvstore.ids import DTYPE_BYTES, BlockName, Group, Namespace, Shard, prefix_id

LINK = prefix_id("ab" * 32)
KV = Namespace(model="kv", revision="1", layers=4, kv_heads=4, head_dim=16, block_tokens=32)
MLA = Namespace(model="mla", revision="1", layers=3, mla_rank=24, mla_rope=8, block_tokens=32)
OPAQUE = Namespace(model="o", revision="1", layers=2, page_bytes=4096, layout="vllm/x", block_tokens=32, identity="vllm")
BYTES = Namespace(model="b", revision="1", layers=2, page_bytes=999, dtype="U8", layout="vllm/x", block_tokens=32)
GROUPS = Namespace(
    model="g",
    revision="1",
    layers=5,
    page_bytes=128,
    layout="x/1",
    block_tokens=32,
    groups=(Group(layers=(0, 4)), Group(kind="window", window=64, layers=(1, 3)), Group(kind="state", layers=(2,))),
)
CASES = {
    "kv": (KV, Shard(), 32),
    "partial": (KV, Shard(), 1),
    "rank": (KV, Shard(rank=1, ranks=2), 32),
    "more ranks than heads": (KV, Shard(rank=7, ranks=8), 32),
    "stage": (KV, Shard(stage=1, stages=3), 17),
    "mla": (MLA, Shard(), 32),
    "opaque": (OPAQUE, Shard(), 32),
    "odd bytes": (BYTES, Shard(), 31),
    "window group": (GROUPS, Shard(group=1), 32),
    "state group": (GROUPS, Shard(group=2), 32),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_codec = pytest.mark.parametrize("kind", codec.CODECS)


def block(ns, shard, tokens, *, seed=0, link=LINK):
    """A sealed raw object whose floats look like KV: many exponents alike, mantissas random."""
    name, found = BlockName(ns.id, shard, link, tokens), codec.layout(ns, shard, tokens)
    raw, rng = memoryview(bytearray(found.raw_bytes)), np.random.default_rng(seed)
    for key, view in codec.tensors(raw, name, ns).items():
        if key == "token_ids":
            view[...] = np.arange(tokens)
        elif found.specs[0].dtype == "BF16":
            view[...] = rng.standard_normal(view.shape).astype(ml_dtypes.bfloat16).view(np.uint16)
        else:
            view[...] = rng.integers(0, 100, view.shape)
    codec.seal(raw, name, ns)
    return raw, name


def decoded(stored, name, ns):
    into = memoryview(bytearray(codec.layout(ns, name.shard, name.tokens).raw_bytes))
    codec.decode(memoryview(stored), name, ns, into)
    return into


@every_case
@every_codec
def test_every_codec_gives_back_every_bit(case, kind):
    raw, name = block(*case)
    encoded = codec.encode(raw, name, case[0], kind)
    assert decoded(encoded.body, name, case[0]) == raw
    header = codec.stored_header(memoryview(encoded.body), name, case[0])
    assert (header.codec, header.header_bytes, header.stored_bytes) == (kind, encoded.header_bytes, encoded.nbytes)
    assert encoded.nbytes <= header.layout.stored_limit
    assert encoded.header_bytes % 4096 == 0
    assert codec.header_length(memoryview(encoded.body)[:8], name, case[0]) == encoded.header_bytes


@every_case
def test_the_safetensors_library_reads_a_raw_object(case, tmp_path):
    raw, name = block(*case)
    path = tmp_path / "block.safetensors"
    path.write_bytes(raw)
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        seen = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a dict
    assert (metadata["namespace"], metadata["prefix_id"], metadata["shard"]) == (case[0].id, LINK, str(name.shard))
    assert (metadata["tokens"], metadata["codec"], metadata["enc"], metadata["kvtier"]) == (str(name.tokens), "raw", "none", "1")
    mine = codec.tensors(raw, name, case[0])
    assert set(seen) == set(mine)
    for key, tensor in seen.items():
        assert tensor.shape == mine[key].shape
        assert tensor.tobytes() == mine[key].tobytes()
    if case[0].dtype == "BF16":
        assert next(iter(seen.values())).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("kind", ["zstd", "bp-zstd"])
def test_the_safetensors_library_reads_a_coded_object(kind, tmp_path):
    raw, name = block(KV, Shard(), 32)
    path = tmp_path / "block.safetensors"
    path.write_bytes(codec.encode(raw, name, KV, kind).body)
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a dict
    assert metadata["codec"] == kind
    assert metadata["raw"].split(";") == ["BF16[32,4,16]"] * 8 + ["U32[32]"]
    assert all(tensor.dtype == np.uint8 for tensor in stored.values())
    if kind == "bp-zstd":
        low = codec.tensors(raw, name, KV)["layers.2.v"].astype(np.uint8).tobytes()
        assert stored["layers.2.v"][: len(low)].tobytes() == low


def test_storage_order_is_layer_by_layer_and_token_ids_last():
    names = [spec.name for spec in codec.tensor_specs(KV, Shard(), 32)]
    assert names == [f"layers.{layer}.{part}" for layer in range(4) for part in "kv"] + ["token_ids"]
    assert [spec.name for spec in codec.tensor_specs(OPAQUE, Shard(), 32)] == ["layers.0.kv", "layers.1.kv"]
    assert [spec.name for spec in codec.tensor_specs(GROUPS, Shard(group=2), 32)] == ["layers.2.state", "token_ids"]


def test_shapes_follow_the_shard():
    def shape(ns, shard):
        return codec.tensor_specs(ns, shard, 32)[0].shape

    assert shape(KV, Shard(rank=1, ranks=2)) == (32, 2, 16)
    assert shape(KV, Shard(rank=7, ranks=8)) == (32, 1, 16)
    assert shape(MLA, Shard()) == (32, 32)
    assert shape(OPAQUE, Shard(rank=1, ranks=2)) == (2048,)
    stages = [codec.shard_layers(KV, Shard(stage=stage, stages=3)) for stage in range(3)]
    assert stages == [(0, 1), (2,), (3,)]
    for ns, shard in (
        *((KV, Shard(rank=0, ranks=3)), (KV, Shard(rank=0, ranks=6)), (MLA, Shard(rank=0, ranks=2)), (KV, Shard(group=1))),
        *((KV, Shard(stage=4, stages=5)), (GROUPS, Shard(group=2, stage=1, stages=2))),
    ):
        with pytest.raises(Invalid):
            codec.layout(ns, shard, 32)


@pytest.mark.parametrize("tokens", [0, -256, 33, 1 << 70])
def test_b27_a_block_of_an_impossible_length_is_never_a_slice_of_another(tokens):
    raw, name = block(KV, Shard(), 32)
    with pytest.raises(Invalid):
        codec.verify(raw, BlockName(KV.id, Shard(), LINK, tokens), KV)
    for other in (1, 16, 31):
        shorter = BlockName(KV.id, Shard(), LINK, other)
        into = memoryview(bytearray(codec.layout(KV, Shard(), other).raw_bytes))
        with pytest.raises(Corrupt):
            codec.decode(raw, shorter, KV, into)
    assert codec.tensors(raw, name, KV)["token_ids"].size == 32


def test_b17_an_object_of_one_rank_is_none_of_another():
    for mine, theirs in ((Shard(rank=0, ranks=2), Shard(rank=1, ranks=2)), (Shard(rank=0, ranks=4), Shard(rank=0, ranks=8))):
        raw, name = block(KV, mine, 32)
        with pytest.raises(Corrupt):
            decoded(raw, BlockName(KV.id, theirs, name.prefix_id, 32), KV)


def test_b18_an_object_of_another_model_is_refused():
    raw, name = block(KV, Shard(), 32)
    other = Namespace(model="kv", revision="2", layers=4, kv_heads=4, head_dim=16, block_tokens=32)
    with pytest.raises(Corrupt):
        decoded(raw, BlockName(other.id, Shard(), LINK, 32), other)
    with pytest.raises(Invalid):  # a name and a namespace that do not belong together are the caller's mistake
        decoded(raw, name, other)


@every_codec
def test_b36_an_empty_object_is_corrupt(kind):
    raw, name = block(KV, Shard(), 32)
    stored = memoryview(codec.encode(raw, name, KV, kind).body)
    for size in (0, 1, 7, 8, 100, 4095, 4096, len(stored) - 1):
        with pytest.raises(Corrupt):
            decoded(stored[:size], name, KV)
        with pytest.raises(Corrupt):
            codec.verify(stored[:size], name, KV)
        if size < 4096:
            with pytest.raises(Corrupt):
                codec.stored_header(stored[:size], name, KV)
            with pytest.raises(Corrupt):
                codec.block_digest(stored[:size])
    with pytest.raises(Corrupt):
        decoded(bytes(len(stored)), name, KV)


def test_b37_bytes_that_a_proxy_decoded_are_refused():
    """A proxy that undoes a Content-Encoding it imagined, or one that rewrites line ends."""
    raw, name = block(KV, Shard(), 32)
    stored = bytes(codec.encode(raw, name, KV, "bp-zstd").body)
    for altered in (stored + b"\n", stored.rstrip(b"\0")[:-1], stored.replace(b"\n", b"\r\n"), stored[::-1]):
        with pytest.raises(Corrupt):
            decoded(altered, name, KV)


@every_codec
@pytest.mark.parametrize("which", ["kv", "mla", "rank"])
def test_a_flipped_bit_anywhere_is_found(kind, which):
    ns, shard, _ = CASES[which]
    raw, name = block(ns, shard, 2)
    stored = bytearray(codec.encode(raw, name, ns, kind).body)
    into = memoryview(bytearray(len(raw)))
    for at in range(len(stored)):
        stored[at] ^= 1 << (at % 8)
        with pytest.raises(Corrupt):
            codec.decode(memoryview(stored), name, ns, into)
        stored[at] ^= 1 << (at % 8)
    codec.decode(memoryview(stored), name, ns, into)
    assert into == raw


def test_a_header_has_one_length_for_every_block_of_a_layout():
    lengths = set()
    for seed in range(3):
        raw, name = block(KV, Shard(), 32, seed=seed, link=prefix_id(f"{seed:064x}"))
        lengths.add(codec.encode(raw, name, KV, "raw").header_bytes)
        assert codec.stored_header(raw, name, KV).header_bytes == codec.layout(KV, Shard(), 32).header_bytes
    assert lengths == {codec.layout(KV, Shard(), 32).header_bytes}


def test_headers_of_the_largest_models_stay_within_their_limit():
    for ns in (
        Namespace(model="x", revision="1", layers=4096, kv_heads=1, head_dim=63, dtype="F8_E4M3", block_tokens=8192),
        Namespace(model="x", revision="1", layers=1, kv_heads=64, head_dim=4096, dtype="F8_E4M3", block_tokens=8192),
    ):
        shard = Shard(rank=4095, ranks=4096, stage=0, stages=1)
        found = codec.layout(ns, shard, 8192)
        assert found.header_bytes <= found.header_limit
        digests = "0" * 64 * len(found.specs)
        largest = header_of(found, LINK, "bp-zstd", [coded_limit(size) for size in found.sizes], digests, digests)
        assert len(largest) <= found.header_limit
    with pytest.raises(Invalid, match="more than"):
        codec.layout(Namespace(model="x", revision="1", layers=200, kv_heads=64, head_dim=512, block_tokens=8192), Shard(), 8192)


def test_raw_is_sent_without_a_copy():
    raw, name = block(KV, Shard(), 32)
    encoded = codec.encode(raw, name, KV, "raw")
    assert isinstance(encoded.body, memoryview)
    assert encoded.body.obj is raw.obj
    assert encoded.nbytes == len(raw)


def test_tensors_are_views_of_the_object():
    raw, name = block(KV, Shard(), 32)
    views = codec.tensors(raw, name, KV)
    assert views["layers.0.k"].dtype == np.uint16  # the bits of BF16
    views["layers.3.v"][31, 3, 15] ^= 1
    with pytest.raises(Corrupt, match=r"layers\.3\.v"):
        codec.verify(raw, name, KV)
    codec.seal(raw, name, KV)
    codec.verify(raw, name, KV)
    assert not codec.tensors(raw.toreadonly(), name, KV)["token_ids"].flags.writeable


def test_rot_in_memory_is_never_signed_as_truth():
    raw, name = block(KV, Shard(), 32)
    raw[-1] ^= 1
    for kind in codec.CODECS:
        with pytest.raises(Corrupt):
            codec.encode(raw, name, KV, kind)


def test_the_digest_binds_the_payload_and_is_that_of_the_raw_object_it_names():
    (one, name), (two, _) = block(KV, Shard(), 32), block(KV, Shard(), 32, seed=1)
    assert codec.block_digest(one) != codec.block_digest(two)
    assert codec.block_digest(one) == codec.stored_header(one, name, KV).digest
    assert codec.block_digest(decoded(codec.encode(one, name, KV, "zstd").body, name, KV)) == codec.block_digest(one)


@every_case
@every_codec
def test_consecutive_layer_ranges_make_up_the_block(case, kind):
    ns, shard, tokens = case
    raw, name = block(ns, shard, tokens)
    stored = memoryview(codec.encode(raw, name, ns, kind).body)
    header = codec.stored_header(stored[: codec.header_length(stored[:8], name, ns)], name, ns)
    layers = header.layout.layers
    ranges = [codec.tensor_range(header, layer, layer) for layer in layers]
    assert ranges[0][0] == header.header_bytes
    assert ranges[-1][1] == len(stored)
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert codec.tensor_range(header, layers[0], layers[-1]) == (header.header_bytes, len(stored))
    into = memoryview(bytearray(len(raw)))
    for layer, (start, end) in reversed(list(zip(layers, ranges, strict=True))):
        codec.decode_layers(header, stored[start:end], layer, layer, into)
    codec.seal(into, name, ns)
    assert into == raw


def test_a_range_is_verified_before_its_neighbours_arrive():
    raw, name = block(KV, Shard(), 32)
    stored = bytearray(codec.encode(raw, name, KV, "bp-zstd").body)
    header = codec.stored_header(memoryview(stored), name, KV)
    start, end = codec.tensor_range(header, 1, 2)
    into = memoryview(bytearray(len(raw)))
    stored[end] ^= 1  # layer 3 is bad: nobody asked for it
    codec.decode_layers(header, memoryview(stored)[start:end], 1, 2, into)
    assert codec.tensors(into, name, KV)["layers.2.v"].tobytes() == codec.tensors(raw, name, KV)["layers.2.v"].tobytes()
    assert not codec.tensors(into, name, KV)["layers.3.k"].any()
    stored[start + 5] ^= 1
    with pytest.raises(Corrupt, match=r"layers\.1\.k"):
        codec.decode_layers(header, memoryview(stored)[start:end], 1, 2, into)
    for cut in (0, 1, end - start - 1):
        with pytest.raises(Corrupt):
            codec.decode_layers(header, memoryview(stored)[start : start + cut], 1, 2, into)
    for first, last in ((-1, 0), (2, 1), (0, 4), (9, 9)):
        with pytest.raises(Invalid):
            codec.tensor_range(header, first, last)


def test_a_buffer_of_the_wrong_size_is_the_callers_mistake():
    raw, name = block(KV, Shard(), 32)
    for wrong in (memoryview(bytearray(len(raw) - 1)), memoryview(bytearray(len(raw) + 4096)), raw.toreadonly()):
        with pytest.raises(Invalid):
            codec.decode(raw, name, KV, wrong)
        with pytest.raises(Invalid):
            codec.seal(wrong, name, KV)


def test_byte_planes_beat_plain_zstd_on_numbers_that_look_like_kv():
    ns = Namespace(model="kv", revision="1", layers=4, kv_heads=8, head_dim=64, block_tokens=256)
    raw, name = block(ns, Shard(), 256)
    sizes = {kind: codec.encode(raw, name, ns, kind).nbytes for kind in codec.CODECS}
    assert sizes["bp-zstd"] < 0.75 * sizes["raw"]
    assert sizes["bp-zstd"] < sizes["zstd"] < sizes["raw"]


def test_what_does_not_compress_still_fits():
    ns = Namespace(model="r", revision="1", layers=3, kv_heads=2, head_dim=64, block_tokens=64)
    name, found = BlockName(ns.id, Shard(), LINK, 64), codec.layout(ns, Shard(), 64)
    raw = memoryview(bytearray(found.raw_bytes))
    raw[found.header_bytes :] = np.random.default_rng(0).bytes(found.payload_bytes)
    codec.seal(raw, name, ns)
    for kind in codec.CODECS:
        encoded = codec.encode(raw, name, ns, kind)
        assert encoded.nbytes <= found.stored_limit
        assert decoded(encoded.body, name, ns) == raw


def test_many_threads_code_at_once():
    blocks = [block(KV, Shard(), 32, seed=seed) for seed in range(8)]

    def round_trip(index):
        raw, name = blocks[index % 8]
        kind = ("zstd", "bp-zstd")[index % 2]
        return decoded(codec.encode(raw, name, KV, kind).body, name, KV) == raw

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(160)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_round_trips(data):
    draw = data.draw
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    ns = Namespace(
        model="any",
        revision="1",
        layers=draw(st.integers(1, 5)),
        kv_heads=heads,
        head_dim=draw(st.integers(1, 9)),
        dtype=dtype,
        block_tokens=8,
        identity=draw(st.sampled_from(["tokens", "engine"])),
    )
    tokens, ranks = draw(st.integers(1, 8)), draw(st.sampled_from([1, heads, 2 * heads]))
    shard = Shard(rank=draw(st.integers(0, ranks - 1)), ranks=ranks, stage=ns.layers - 1, stages=ns.layers)
    name, found = BlockName(ns.id, shard, LINK, tokens), codec.layout(ns, shard, tokens)
    raw = memoryview(bytearray(found.raw_bytes))
    raw[found.header_bytes :] = draw(st.binary(min_size=found.payload_bytes, max_size=found.payload_bytes))
    codec.seal(raw, name, ns)
    kind = draw(st.sampled_from(codec.CODECS))
    assert decoded(codec.encode(raw, name, ns, kind).body, name, ns) == raw
    seen = safetensors.deserialize(bytes(raw))
    assert {key: (entry["dtype"], tuple(entry["shape"])) for key, entry in seen} == {
        s.name: (s.dtype, s.shape) for s in found.specs
    }


def test_the_base_install_reads_and_writes_raw_objects_without_zstandard():
    script = textwrap.dedent("""
        import sys, json
        sys.modules["zstandard"] = None  # as if it were not installed
        from kvstore import codec
        from kvstore.errors import Unsupported
        from kvstore.ids import *
        ns = Namespace(model="kv", revision="1", layers=1, kv_heads=1, head_dim=4, block_tokens=8)
        name = BlockName(ns.id, Shard(), "ab" * 32, 8)
        raw = memoryview(bytearray(codec.layout(ns, Shard(), 8).raw_bytes))
        codec.seal(raw, name, ns)
        codec.verify(raw, name, ns)
        into = memoryview(bytearray(len(raw)))
        codec.decode(codec.encode(raw, name, ns, "raw").body, name, ns, into)
        try:
            codec.encode(raw, name, ns, "zstd")
        except Unsupported as error:
            print(json.dumps([into == raw, "kvtier[embed]" in str(error)]))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, True]
