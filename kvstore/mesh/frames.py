"""What two nodes say to each other: HTTP/1.1 with one spelling for everything, so that neither side reads more than it expects.

A request is a POST of msgpack. Blocks come back as one chunked body, a chunk for each block in the order asked: a frame of 16
bytes, then the object as it lies in memory. Any HTTP client can read it; ours requires the very bytes that are written here.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from kvstore.ids import Namespace
from tiering import Miss

BLOCKS: Final = "/v1/peer/blocks"
HOLDS: Final = "/v1/peer/holds"
MEDIA_TYPE: Final = "application/msgpack"  # no page in a browser may send it here without asking first
MOST_BLOCKS: Final = 512  # of one request
MOST_KEYS: Final = 16_384
MOST_HEAD: Final = 4 << 10
MOST_BODY: Final = 1 << 20

ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST: Final = b"0\r\n\r\n"
LINE_END: Final = b"\r\n"
_HELD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %08d\r\n\r\n"

RAW: Final = 0
CODED: Final = 1
_MISSES: Final = tuple(Miss)  # from 2 on
_FRAME: Final = struct.Struct("<BxxxIQ")  # what, place in the request, length
_PADDING: Final = bytes(3)
_LINE: Final = 12  # a chunk's size in ten hex digits, and the end of that line
FRAME_BYTES: Final = _LINE + _FRAME.size


class Malformed(Exception):
    """This is not what a peer says."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Blocks of one shard of one namespace.

    Attributes:
        namespace: Its fields: whoever is asked may have its blocks on disk, and not have heard of it since it started.
        shard: As text.
        prefixes: PrefixIds, 32 bytes each.
        tokens: The length of each block.
        through: Of what this node owns and has not, fetch it from the bucket.
        speed: Bytes a second that this link carries, as measured by whoever asks; 0 while unknown. It tells whether coding pays.
    """

    namespace: Namespace
    shard: str
    prefixes: bytes
    tokens: tuple[int, ...]
    through: bool = False
    speed: int = 0


class Frame(msgspec.Struct, frozen=True):
    """What follows: an object of `nbytes`, raw or coded, or nothing, because of `miss`."""

    place: int
    nbytes: int
    coded: bool
    miss: Miss | None


def request(path: str, host: str, body: bytes) -> bytes:
    """A whole request."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode("ascii") + body


def found(place: int, nbytes: int, *, coded: bool) -> bytes:
    """Ahead of an object; `LINE_END` follows it."""
    return _spelled(CODED if coded else RAW, place, nbytes)


def missed(place: int, miss: Miss) -> bytes:
    """Instead of an object, `LINE_END` included."""
    return _spelled(2 + _MISSES.index(miss), place, 0) + LINE_END


def parse_frame(data: bytes) -> Frame:
    """The frame in exactly `FRAME_BYTES`. Raises `Malformed`."""
    line, rest = data[:_LINE], data[_LINE:]
    what, place, nbytes = _FRAME.unpack(rest)
    known = what < 2 + len(_MISSES) and rest[1:4] == _PADDING
    if line != b"%010x\r\n" % (nbytes + _FRAME.size) or not known or (what > CODED and nbytes):
        raise Malformed(f"no frame: {data[:_LINE]!r}")
    return Frame(place, nbytes, what == CODED, _MISSES[what - 2] if what > CODED else None)


def held_head(keys: int) -> bytes:
    """Ahead of one byte for each key: 1 where the node has it."""
    return _HELD % keys


def _spelled(what: int, place: int, nbytes: int) -> bytes:
    return b"%010x\r\n" % (nbytes + _FRAME.size) + _FRAME.pack(what, place, nbytes)
