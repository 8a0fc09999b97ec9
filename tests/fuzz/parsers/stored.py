"""Block objects, which are safetensors files: their headers, and what is coded behind them."""

import contextlib

from kvstore import codec
from kvstore.codec.header import signed
from kvstore.codec.spelling import ALIGN, DIGEST_AT, ZEROS, padded
from kvstore.errors import Corrupt
from kvstore.ids import BlockName, Shard
from kvstore.repo.testing import raw_block, tiny
from parsers.target import Target

_NS = tiny()
_NAME = BlockName(_NS.id, Shard(), "ab" * 32, 4)
_RAW = raw_block(_NS, _NAME, range(4))
_STORED = {kind: bytes(codec.encode(memoryview(bytearray(_RAW)), _NAME, _NS, kind).body) for kind in codec.CODECS}


def block_object(data):
    for stored in (data, _made_right(data)):
        into = memoryview(bytearray(len(_RAW)))
        try:
            header = codec.stored_header(memoryview(stored), _NAME, _NS)
            codec.decode(memoryview(stored), _NAME, _NS, into)
        except Corrupt:
            continue
        assert header.stored_bytes == len(stored)
        if stored in _STORED.values():
            assert into == _RAW
    for read in (codec.block_digest, lambda view: codec.header_length(view, _NAME, _NS)):
        with contextlib.suppress(Corrupt):
            read(memoryview(data))


def _made_right(data):
    """The same with the length and the digest that its text should have: text, a line's end, the payload."""
    text, _, payload = data[8:].partition(b"}}\n") if b"}}\n" in data[:ALIGN] else (data[8:ALIGN].rstrip(), b"", data[ALIGN:])
    length = padded(8 + len(text)) - 8
    whole = length.to_bytes(8, "little") + text.ljust(length)
    return signed(whole[:DIGEST_AT] + ZEROS.encode() + whole[DIGEST_AT + len(ZEROS) :]) + payload


TARGETS = (
    Target(
        "block_object",
        block_object,
        tuple(_STORED.values()),
        (
            b'"digests":"',
            b'"raw_digests":"',
            b'"codec":"bp-zstd"',
            b'"codec":"zstd"',
            b'"data_offsets":[',
            b"\x28\xb5\x2f\xfd",
            b"F32",
            b"__metadata__",
        ),
        1 << 14,
    ),
)
