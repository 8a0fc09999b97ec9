"""Bytes made to hurt: each is Corrupt, costs almost no memory, and raises nothing else."""

import functools
import json
import struct
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import codec
from kvstore.codec.header import header_of, signed
from kvstore.codec.spelling import DIGEST_AT, ZEROS
from kvstore.errors import Corrupt
from kvstore.ids import BlockName, Namespace, Shard

NS = Namespace(model="kv", revision="1", layers=2, kv_heads=3, head_dim=64, block_tokens=256)
NAME = BlockName(NS.id, Shard(), "ab" * 32, 256)
LAYOUT = codec.layout(NS, Shard(), 256)
SIZE = LAYOUT.sizes[0]  # 98,304: one layer's K of a real small model
HALF = SIZE // 2
MAGIC = b"\x28\xb5\x2f\xfd"


def raw_block():
    raw = memoryview(bytearray(LAYOUT.raw_bytes))
    for key, view in codec.tensors(raw, NAME, NS).items():
        view[...] = np.arange(view.size).reshape(view.shape) % (1 << 16 if key != "token_ids" else 256)
    codec.seal(raw, NAME, NS)
    return raw


RAW = raw_block()
STORED = {kind: bytes(codec.encode(RAW, NAME, NS, kind).body) for kind in codec.CODECS}


def parts(kind):
    """Stored tensors of a good object."""
    header = codec.stored_header(memoryview(STORED[kind]), NAME, NS)
    payload = STORED[kind][header.header_bytes :]
    return [payload[a:b] for a, b in zip(header.starts, header.starts[1:], strict=False)]


def assembled(kind, stored):
    """An object whose header is right in every respect for these stored tensors: only their content can be wrong."""
    digests = "".join(blake3(part).hexdigest() for part in stored)
    of_raw = "" if kind == "raw" else codec.stored_header(memoryview(RAW), NAME, NS).raw_digests
    return header_of(LAYOUT, NAME.prefix_id, kind, [len(part) for part in stored], digests, of_raw) + b"".join(stored)


def with_first(kind, frame):
    """A good object but for the frame of its first tensor."""
    stored = parts(kind)
    stored[0] = (stored[0][:HALF] if kind == "bp-zstd" else b"") + frame
    return assembled(kind, stored)


def resigned(header, payload):
    """Header text (unpadded) with length and digest made right, whatever it says."""
    length = -(-(8 + len(header)) // 4096) * 4096 - 8
    whole = struct.pack("<Q", length) + header.ljust(length)
    blank = whole[:DIGEST_AT] + ZEROS.encode() + whole[DIGEST_AT + 64 :]
    return signed(blank) + payload


def split(stored):
    size = 8 + struct.unpack("<Q", stored[:8])[0]
    return stored[8:size].rstrip(b" "), stored[size:]


def refused(stored):
    into = memoryview(bytearray(LAYOUT.raw_bytes))
    with pytest.raises(Corrupt):
        codec.decode(memoryview(stored), NAME, NS, into)
    with pytest.raises(Corrupt):
        codec.verify(memoryview(stored), NAME, NS)


def compress(data, **options):
    settings = {"level": 1, "write_checksum": True, "write_content_size": True, **options}
    return zstandard.ZstdCompressor(**settings).compress(data)


def declaring(frame, size):
    """A single-segment frame whose header declares another content size (4-byte field)."""
    declared = zstandard.get_frame_parameters(frame)
    header = zstandard.frame_header_size(frame)
    assert declared.dict_id == 0
    return MAGIC + bytes([0b10_1_0_0_1_00]) + struct.pack("<I", size) + frame[header:]


def padded_frame(frame, size):
    """The same content, and longer than any coding of it has to be: zstd allows any number of empty blocks."""
    header = zstandard.frame_header_size(frame)
    longer = frame[:header] + b"\0\0\0" * (size * 2) + frame[header:]
    assert zstandard.ZstdDecompressor().decompress(longer) == zstandard.ZstdDecompressor().decompress(frame)
    return longer


@functools.cache
def trained():
    return zstandard.train_dictionary(2048, [bytes([i % 7, i % 5, i % 3]) * 50 + bytes(range(i % 200)) for i in range(2000)])


def frames(size):
    """Frames that are no honest coding of `size` bytes, by name."""
    content = bytes(np.arange(size, dtype=np.uint32).astype(np.uint8) // 3)
    good, bomb = compress(content), compress(bytes(200 << 20))
    assert len(bomb) < 20_000
    no_size = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj()
    streamed = no_size.compress(content) + no_size.flush()
    bomb_stream = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj()
    long = zstandard.ZstdCompressionParameters(window_log=27, write_checksum=True, write_content_size=False)
    wide = zstandard.ZstdCompressor(compression_params=long).compressobj()
    dictionary = zstandard.ZstdCompressionDict(content[:4096] * 2, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    assert zstandard.ZstdDecompressor().decompress(declaring(good, size)) == content
    return {
        "empty": b"",
        "only magic": MAGIC,
        "not zstd": content[:100],
        "cut in the middle": good[: len(good) // 2],
        "cut before the checksum": good[:-4],
        "cut by one byte": good[:-1],
        "trailing byte": good + b"\0",
        "two frames": compress(content[: size // 2]) + compress(content[size // 2 :]),
        "a second, empty frame": good + compress(b""),
        "trailing skippable frame": good + b"\x50\x2a\x4d\x18\0\0\0\0",
        "leading skippable frame": b"\x50\x2a\x4d\x18\0\0\0\0" + good,
        "no checksum": compress(content, write_checksum=False),
        "wrong checksum": good[:-1] + bytes([good[-1] ^ 1]),
        "no content size": streamed,
        "shorter content": compress(content[:-1]),
        "longer content": compress(content + b"\0"),
        "no content": compress(b""),
        "declares less than it holds": declaring(good, size - 1),
        "declares more than it holds": declaring(good, size + 1),
        "holds less than it declares": declaring(compress(content[:-1]), size),
        "holds more than it declares": declaring(compress(content + b"\0"), size),
        "declares 4 GiB": declaring(good, 0xFFFFFFFF),
        "bomb": bomb,
        "bomb that declares the right size": declaring(bomb, size),
        "bomb that declares nothing": bomb_stream.compress(bytes(200 << 20)) + bomb_stream.flush(),
        "16 MiB window": MAGIC + bytes([0x84, 14 << 3]) + struct.pack("<I", size) + good[zstandard.frame_header_size(good) :],
        "padded with empty blocks": padded_frame(good, size),
        "trained dictionary": zstandard.ZstdCompressor(dict_data=trained(), write_checksum=True).compress(content),
        "128 MiB window": wide.compress(content) + wide.flush(),
        "8 EiB window": MAGIC + b"\x04\xf8" + good[zstandard.frame_header_size(good) :],
        "raw-content dictionary": zstandard.ZstdCompressor(dict_data=dictionary, write_checksum=True).compress(content),
        "reserved bit": MAGIC + bytes([good[4] | 8]) + good[5:],
    }


FRAMES = {("zstd", why): frame for why, frame in frames(SIZE).items()} | {("bp-zstd", why): f for why, f in frames(HALF).items()}


@pytest.mark.parametrize(("kind", "why"), FRAMES, ids=lambda value: value)
def test_a_dishonest_frame_is_corrupt(kind, why):
    frame = FRAMES[kind, why]
    if why == "empty" and kind == "zstd":
        stored = parts(kind)
        stored[0] = b""
        return refused(assembled(kind, stored))
    return refused(with_first(kind, frame))


def test_the_builders_of_this_file_build_good_objects():
    """Otherwise every refusal here would prove nothing."""
    into = memoryview(bytearray(LAYOUT.raw_bytes))
    for kind, stored in STORED.items():
        assert assembled(kind, parts(kind)) == stored
        header, payload = split(stored)
        assert resigned(header, payload) == stored
        codec.decode(memoryview(resigned(header, payload)), NAME, NS, into)
        assert into == RAW


@pytest.mark.parametrize("kind", codec.CODECS)
def test_a_tensor_of_an_impossible_length_is_corrupt(kind):
    for index in (0, 3, 4):
        for change in (lambda part: b"", lambda part: part + bytes(LAYOUT.sizes[0] * 2), lambda part: part[:-1]):
            stored = parts(kind)
            stored[index] = change(stored[index])
            refused(assembled(kind, stored))


HEADER = split(STORED["raw"])[0]
ENTRY = b'"layers.0.v":{"dtype":"BF16","shape":[256,3,64],"data_offsets":[98304,196608]}'
EDITS = {
    "a key twice": (ENTRY, ENTRY + b"," + ENTRY),
    "a key twice, other offsets": (ENTRY, ENTRY + b',"layers.0.v":{"dtype":"BF16","shape":[256,3,64],"data_offsets":[0,98304]}'),
    "metadata twice": (b'{"__metadata__"', b'{"__metadata__":{},"__metadata__"'),
    "overlap": (b"[98304,196608]", b"[0,98304]"),
    "gap": (b"[98304,196608]", b"[98305,196609]"),
    "backwards": (b"[98304,196608]", b"[196608,98304]"),
    "negative": (b"[98304,196608]", b"[-98304,196608]"),
    "a float": (b"[98304,196608]", b"[98304.0,196608]"),
    "an exponent": (b"[98304,196608]", b"[98304,196608e0]"),
    "leading zero": (b"[98304,196608]", b"[098304,196608]"),
    "plus sign": (b"[98304,196608]", b"[+98304,196608]"),
    "2**64": (b"[98304,196608]", b"[98304,18446744073709551616]"),
    "10**4000": (b"[98304,196608]", b"[98304,1" + b"0" * 4000 + b"]"),
    "a string": (b"[98304,196608]", b'["98304",196608]'),
    "three offsets": (b"[98304,196608]", b"[98304,196608,0]"),
    "no offsets": (b',"data_offsets":[98304,196608]', b""),
    "other dtype": (b'"layers.0.v":{"dtype":"BF16"', b'"layers.0.v":{"dtype":"F16"'),
    "other shape": (b'"layers.0.v":{"dtype":"BF16","shape":[256,3,64]', b'"layers.0.v":{"dtype":"BF16","shape":[256,64,3]'),
    "negative shape": (b'"layers.0.v":{"dtype":"BF16","shape":[256,3,64]', b'"layers.0.v":{"dtype":"BF16","shape":[-256,-3,64]'),
    "other name": (b"layers.0.v", b"layers.9.v"),
    "swapped names": (b'"layers.0.v"', b'"layers.0.k"'),
    "a tensor less": (b"," + ENTRY, b""),
    "a tensor more": (ENTRY, ENTRY + b',"more":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'),
    "no digests": (b'"digests":"', b'"digest_":"'),
    "digests that are no hex": (b'"digests":"', b'"digests":"zz'),
    "digests too short": (HEADER[HEADER.index(b'"digests":"') : HEADER.index(b'"digests":"') + 75], b'"digests":"'),
    "digests too long": (b'"digests":"', b'"digests":"' + b"0" * 64),
    "an escape": (b'"codec":"raw"', b'"codec":"\\u0072aw"'),
    "codec of the future": (b'"codec":"raw"', b'"codec":"int8"'),
    "codec of another": (b'"codec":"raw"', b'"codec":"zstd"'),
    "codec unsaid": (b'"codec":"raw",', b""),
    "encrypted": (b'"enc":"none"', b'"enc":"aes"'),
    "version 2": (b'"kvtier":"1"', b'"kvtier":"2"'),
    "another namespace": (NS.id.encode(), b"0" * 64),
    "another block": (b"ab" * 32, b"ac" * 32),
    "another shard": (b"t0of1", b"t0of2"),
    "another length": (b'"tokens":"256"', b'"tokens":"255"'),
    "negative length": (b'"tokens":"256"', b'"tokens":"-256"'),
    "white space": (b'"shape":', b'"shape": '),
    "deep nesting": (b'"enc":"none"', b'"enc":' + b"[" * 2000),
    "NUL": (b'"enc":"none"', b'"enc":"no\0e"'),
    "broken UTF-8": (b'"enc":"none"', b'"enc":"\xff\xfe"'),
    "not JSON": (HEADER, b"\x80\x04\x95pickle"),
    "nothing": (HEADER, b""),
}


CODED = {
    "no raw digests": (b'"raw_digests":"', b'"raw_digest_":"'),
    "raw digests that are no hex": (b'"raw_digests":"', b'"raw_digests":"zz'),
    "raw digests too long": (b'"raw_digests":"', b'"raw_digests":"' + b"0" * 64),
    "raw digests twice": (b'"raw_digests":"', b'"raw_digests":"' + b"0" * 64 * len(LAYOUT.specs) + b'","raw_digests":"'),
    "raw digests behind": (b'"enc":"none"', b'"enc":"none","raw_digests":"00"'),
}


@pytest.mark.parametrize("why", CODED)
def test_a_coded_object_says_the_digests_of_its_raw_tensors_in_one_way(why):
    header, payload = split(STORED["zstd"])
    old, new = CODED[why]
    assert old in header
    refused(resigned(header.replace(old, new, 1), payload))


def test_a_raw_object_does_not_say_its_digests_twice():
    header, payload = split(STORED["raw"])
    refused(resigned(header.replace(b',"digests"', b',"raw_digests":"' + b"0" * 64 * len(LAYOUT.specs) + b'","digests"'), payload))


def test_raw_digests_that_lie_are_found_by_who_verifies_the_decoded_block():
    header, payload = split(STORED["zstd"])
    at = header.index(b'"raw_digests":"') + 15
    lying = resigned(header[:at] + b"0" * 64 + header[at + 64 :], payload)
    into = memoryview(bytearray(LAYOUT.raw_bytes))
    codec.decode(memoryview(lying), NAME, NS, into)
    assert into[LAYOUT.header_bytes :] == memoryview(RAW)[LAYOUT.header_bytes :]
    with pytest.raises(Corrupt, match=r"layers\.0\.k"):
        codec.verify(into, NAME, NS)


@pytest.mark.parametrize("why", EDITS)
def test_a_header_that_is_not_the_one_right_header_is_corrupt(why):
    old, new = EDITS[why]
    assert old in HEADER
    edited = HEADER.replace(old, new, 1)
    if len(edited) < DIGEST_AT - 8 + 64:
        return refused(struct.pack("<Q", 4088) + edited.ljust(4088) + split(STORED["raw"])[1])
    return refused(resigned(edited, split(STORED["raw"])[1]))


@pytest.mark.parametrize(
    "length", [0, 1, 4087, 4089, 4088 + 4096, 1 << 20, (1 << 30) - 8, (1 << 63) - 8, (1 << 64) - 8, (1 << 64) - 1]
)
def test_a_header_length_is_bounded_before_it_is_read(length):
    stored = struct.pack("<Q", length) + STORED["raw"][8:]
    refused(stored)
    if length > LAYOUT.header_limit or (length + 8) % 4096:
        with pytest.raises(Corrupt):
            codec.header_length(memoryview(stored[:8]), NAME, NS)
    with pytest.raises(Corrupt):
        codec.block_digest(memoryview(stored))


def test_hostile_bytes_cost_less_than_ten_mib(tmp_path):
    """Each object in a process of its own memory line: how far did the resident set grow at most?"""
    objects = [with_first(kind, frame) for (kind, why), frame in FRAMES.items() if why != "empty"]
    objects += [resigned(HEADER.replace(*EDITS[why], 1), split(STORED["raw"])[1]) for why in EDITS if len(EDITS[why][1]) > 50]
    objects += [struct.pack("<Q", length) + STORED["raw"][8:] for length in ((1 << 30) - 8, (1 << 63) - 8)]
    for index, data in enumerate([*STORED.values(), *objects]):
        (tmp_path / f"{index:04d}").write_bytes(data)
    script = textwrap.dedent("""
        import json, resource, sys, tracemalloc
        from pathlib import Path
        from kvstore import codec
        from kvstore.errors import Corrupt
        from kvstore.ids import *
        ns = Namespace(model="kv", revision="1", layers=2, kv_heads=3, head_dim=64, block_tokens=256)
        name = BlockName(ns.id, Shard(), "ab" * 32, 256)
        into = memoryview(bytearray(codec.layout(ns, Shard(), 256).raw_bytes))
        files = sorted(Path(sys.argv[1]).iterdir())
        for good in files[:3]:
            codec.decode(memoryview(good.read_bytes()), name, ns, into)
        before, refused, peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, 0
        for file in files[3:]:
            data = memoryview(file.read_bytes())
            tracemalloc.start()
            try:
                codec.decode(data, name, ns, into)
            except Corrupt:
                refused += 1
            peak = max(peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, refused, peak]))
    """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    grown_kib, refused_count, traced = json.loads(done.stdout)
    assert refused_count == len(objects) >= 60
    assert grown_kib < 10 * 1024
    assert traced < 10 << 20


def attempt(stored):
    """Corrupt, or exactly the block: nothing else may come of any bytes.

    Digests of raw tensors that lie, in a header signed anew, are found by who verifies what was decoded.
    """
    into = memoryview(bytearray(LAYOUT.raw_bytes))
    try:
        codec.decode(memoryview(stored), NAME, NS, into)
    except Corrupt:
        return
    assert into[LAYOUT.header_bytes :] == RAW[LAYOUT.header_bytes :]
    if into != RAW:
        with pytest.raises(Corrupt):
            codec.verify(into, NAME, NS)


def changed(data, original):
    """`original` after a few cuts, copies and overwritten bytes."""
    text = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 40))
        what = data.draw(st.sampled_from(["cut", "copy", "set", "flip"]))
        if what == "cut":
            del text[at : at + length]
        elif what == "copy":
            text[at:at] = text[at : at + length]
        elif what == "set":
            text[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif at < len(text):
            text[at] ^= 1 << data.draw(st.integers(0, 7))
    return bytes(text)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_altered_object_raises_anything_but_corrupt(data):
    attempt(changed(data, STORED[data.draw(st.sampled_from(codec.CODECS))]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_altered_header_with_a_right_digest_raises_anything_but_corrupt(data):
    header, payload = split(STORED[data.draw(st.sampled_from(codec.CODECS))])
    tail = changed(data, header[DIGEST_AT + 56 :])
    attempt(resigned(header[: DIGEST_AT + 56] + tail, payload))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_altered_frame_with_right_digests_raises_anything_but_corrupt(data):
    kind = data.draw(st.sampled_from(["zstd", "bp-zstd"]))
    stored = parts(kind)
    low = HALF if kind == "bp-zstd" else 0
    frame = stored[0][low:]
    cut = data.draw(st.integers(0, 60))
    cut = data.draw(st.sampled_from([cut, len(frame) - cut]))
    frame = changed(data, frame[:cut]) + frame[cut:]
    into = memoryview(bytearray(LAYOUT.raw_bytes))
    try:
        codec.decode(memoryview(assembled(kind, [stored[0][:low] + frame, *stored[1:]])), NAME, NS, into)
    except Corrupt:
        return
    codec.verify(into, NAME, NS)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=5000))
def test_no_random_bytes_raise_anything_but_corrupt(data):
    attempt(data)
    with pytest.raises(Corrupt):
        codec.stored_header(memoryview(data), NAME, NS)
