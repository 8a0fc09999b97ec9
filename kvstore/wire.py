"""Messages of the same-host plane: a Unix socket carries small msgpack frames, shared memory carries the bytes.

On connect the client says `Hello`, the node answers `Welcome` with two file descriptors (SCM_RIGHTS): the tenant's read arena,
sealed against writing, and a write window that belongs to this connection alone. A block is read by its offset in the arena while a
lease holds it; it is written by copying its payload into the window and publishing the extent. The window's space is
managed by the client: an extent is free again when `Published` (or `Fault`) for it has come.

Frame: u32 little-endian length of the body, then the body. Bodies are arrays tagged by their first element.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.errors import Corrupt, Problem

PROTOCOL: Final = 1
MAX_FRAME: Final = 16 * 1024 * 1024  # 65,536 blocks of a long session fit well
MAX_BATCH: Final = 65_536


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message; `array_like` with a tag: `["Hello", ...]`."""


class Hello(_Message, frozen=True):
    """The client's first message. `version` is kvtier's own, compared by minor version."""

    protocol: int
    version: str
    tenant: str


class Welcome(_Message, frozen=True):
    """The node's first answer, with the descriptors of arena and window."""

    protocol: int
    version: str
    node: str
    arena_bytes: int
    window_bytes: int


class Ask(_Message, frozen=True):
    """A call of :data:`kvstore.api.CALLS`; `body` is the request as msgpack."""

    id: int
    call: str
    body: msgspec.Raw


class Get(_Message, frozen=True):
    """Lease blocks of one shard, the longest leading run that arrives before the deadline.

    `blocks` are (prefix_id, tokens). `reach` is the farthest tier to ask.
    """

    id: int
    namespace: str
    shard: str
    blocks: list[tuple[str, int]]
    deadline_ms: int
    reach: str


class Publish(_Message, frozen=True):
    """Blocks whose payloads lie in the write window: (prefix_id, tokens, offset, length)."""

    id: int
    namespace: str
    shard: str
    blocks: list[tuple[str, int, int, int]]


class Release(_Message, frozen=True):
    """Let go of leases; not answered."""

    leases: list[int]


class Reply(_Message, frozen=True):
    """The answer to `Ask`, as msgpack."""

    id: int
    body: msgspec.Raw


class Leased(_Message, frozen=True):
    """The answer to `Get`: (lease, offset, size) of each block of the run; `miss` says why it ended, "" where it is complete."""

    id: int
    blocks: list[tuple[int, int, int]]
    miss: str


class Published(_Message, frozen=True):
    """The answer to `Publish`: whether each block was taken. Not taken means dropped under load: never an error."""

    id: int
    taken: list[bool]


class Fault(_Message, frozen=True):
    """The answer to any request that failed; `id` 0 ends the connection."""

    id: int
    problem: Problem


ToNode = Hello | Ask | Get | Publish | Release
ToClient = Welcome | Reply | Leased | Published | Fault

_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_to_client = msgspec.msgpack.Decoder(ToClient)


def frame(message: ToNode | ToClient) -> bytes:
    """A message with its length in front."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def body_length(prefix: bytes) -> int:
    """The length a frame announces, bounded before anything is allocated. Raises `Corrupt`."""
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= MAX_FRAME:
        raise Corrupt(f"a frame of {length} bytes; at most {MAX_FRAME} are allowed")
    return length


def parse_to_node(body: bytes) -> ToNode:
    """Raises `Corrupt`."""
    try:
        return _to_node.decode(body)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"not a message of this protocol: {error}") from None


def parse_to_client(body: bytes) -> ToClient:
    """Raises `Corrupt`."""
    try:
        return _to_client.decode(body)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"not a message of this protocol: {error}") from None
