"""Messages of the same-host plane: a Unix socket carries small msgpack frames, shared memory carries the bytes.

On connect the client says `Hello`, the node answers `Welcome` with two file descriptors (SCM_RIGHTS): the tenant's read arena,
sealed against writing, and a write window that belongs to this connection alone. A block is read by its offset in the arena while a
lease holds it; it is written by copying its payload into the window and publishing the extent. The window's space is
managed by the client. `Published` comes when the node has room for the blocks, before it has copied them: the client is released
there. Their extents are free again when the node says so (`Published.drained`, or `Drained` later), or on a `Fault`. Whoever reads
or commits after `Published`, on any connection, finds the blocks: the node lets that wait for the copy.

Who writes much has room made ahead (`Publish.ahead`): blocks that `Published.ready` promises to take need not wait for their own
`Published`. Whoever reads or commits once such a `Publish` is sent finds those, too.

Every `Ask`, `Get` and `Publish` is answered exactly once, in any order, also after `Cancel`. A client has at most `MAX_IN_FLIGHT`
of them unanswered. Whatever can be answered from memory is answered before the next message is looked at; with `wait` false
anything else is answered by `Later`, so that a client may block on an answer.

Frame: u32 little-endian length of the body, then the body. Bodies are arrays tagged by their first element. A newer minor version
may append fields that have defaults; an older one ignores them.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from kvstore.errors import Corrupt, Problem, Unsupported

PROTOCOL: Final = 2
MAX_FRAME: Final = 16 * 1024 * 1024  # 65,536 blocks of a long session fit well
MAX_HELLO: Final = 4096  # of the first frame, from a client nobody knows yet
MAX_BATCH: Final = 65_536
MAX_IN_FLIGHT: Final = 256
MAX_AHEAD: Final = 256  # blocks that a node makes room for before they have names
AHEAD_S: Final = 0.5  # a client relies on that room for so long; a node keeps it twice as long

T = TypeVar("T")
Batch = Annotated[list[T], msgspec.Meta(max_length=MAX_BATCH)]  # checked before the elements are decoded


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
    wait: bool = True


class Get(_Message, frozen=True):
    """Lease blocks of one shard, the longest leading run that arrives before the deadline.

    `prefixes` are 32 bytes for each of `tokens`. `reach` is the farthest tier to ask.
    """

    id: int
    namespace: str
    shard: str
    prefixes: bytes
    tokens: Batch[int]
    deadline_ms: int
    reach: str
    wait: bool = True


class Publish(_Message, frozen=True):
    """Blocks whose payloads lie in the write window: 32 bytes of `prefixes` for each (tokens, offset, length).

    With `filled` false they do not lie there yet: the node makes room meanwhile, and copies when `Filled` says so. `ahead` asks for
    room for so many more, where all of these have the same tokens; of what was asked for earlier, only theirs is kept.
    """

    id: int
    namespace: str
    shard: str
    prefixes: bytes
    extents: Batch[tuple[int, int, int]]
    filled: bool = True
    ahead: int = 0


class Filled(_Message, frozen=True):
    """What an earlier `Publish` named lies in the window now, or never will; not answered, but by its `Drained` where it does."""

    id: int
    good: bool


class Release(_Message, frozen=True):
    """Let go of leases, given as runs of consecutive numbers: (first, how many); not answered."""

    runs: Batch[tuple[int, int]]


class Cancel(_Message, frozen=True):
    """Nobody waits for this `Ask` or `Get` any more. It is still answered, by whatever came of it."""

    id: int


class Reply(_Message, frozen=True):
    """The answer to `Ask`, as msgpack."""

    id: int
    body: msgspec.Raw


class Leased(_Message, frozen=True):
    """The answer to `Get`: the blocks of the run lie at `offsets`, and have `sizes`; their leases are numbered from `first` on.

    `miss` says why the run ended, "" where it is complete.
    """

    id: int
    first: int
    offsets: list[int]
    sizes: list[int]
    miss: str


class Published(_Message, frozen=True):
    """The answer to `Publish`: whether each block was taken. Not taken means dropped under load: never an error.

    `drained` says that the extents are free; otherwise a `Drained` follows. `ready` more blocks of the same namespace, shard and
    tokens will be taken, on this connection, if they are published within `AHEAD_S` of the time at which this was.
    """

    id: int
    taken: list[bool]
    drained: bool
    ready: int = 0


class Drained(_Message, frozen=True):
    """The node has copied what a `Publish` named, and its extents are free. It comes unasked, after `Published`."""

    id: int


class Later(_Message, frozen=True):
    """The answer to a request that would have to wait, and must not. Nothing was done."""

    id: int


class Fault(_Message, frozen=True):
    """The answer to any request that failed; `id` 0 ends the connection."""

    id: int
    problem: Problem


ToNode = Hello | Ask | Get | Publish | Filled | Release | Cancel
ToClient = Welcome | Reply | Leased | Published | Drained | Later | Fault

_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_to_client = msgspec.msgpack.Decoder(ToClient)


def frame(message: ToNode | ToClient) -> bytes:
    """A message with its length in front."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def body_length(prefix: bytes | bytearray, limit: int = MAX_FRAME) -> int:
    """The length a frame announces, bounded before anything is allocated. Raises `Corrupt`."""
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= limit:
        raise Corrupt(f"a frame of {length} bytes; 1 to {limit} are allowed here")
    return length


def check_versions(node: str, client: str) -> None:
    """Node and client work together when their minor versions are neighbours: `0.3.x` with `0.2.y` to `0.4.y`.

    Raises:
        Unsupported: They are not (kind `version_mismatch`).
    """
    mine, theirs = _minor(node), _minor(client)
    if mine is None or theirs is None or mine[0] != theirs[0] or abs(mine[1] - theirs[1]) > 1:
        raise Unsupported(
            f"the node is kvtier {node} and the client {client}; their minor versions are not neighbours",
            kind="version_mismatch",
            node=node,
            client=client,
        )


def _minor(version: str) -> tuple[int, int] | None:
    major, minor = (*version.split("."), "", "")[:2]
    return (int(major), int(minor)) if f"{major}{minor}".isascii() and major.isdecimal() and minor.isdecimal() else None


def parse_to_node(body: bytes | bytearray | memoryview) -> ToNode:
    """Raises `Corrupt`."""
    try:
        return _to_node.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Corrupt(f"not a message of this protocol: {error}") from None


def parse_to_client(body: bytes | bytearray | memoryview) -> ToClient:
    """Raises `Corrupt`."""
    try:
        return _to_client.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Corrupt(f"not a message of this protocol: {error}") from None
