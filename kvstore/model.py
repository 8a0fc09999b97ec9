"""What the protocol stores: registers and manifests, as frozen values. See schema/FORMAT.md and docs/ordering.md."""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from kvstore.errors import Corrupt, Unsupported
from kvstore.ids import MAX_BLOCK_TOKENS, NamespaceId, PrefixId

FORMAT_VERSION: Final = 1
RECENT: Final = 32  # write ids a head remembers (R8)
MAX_HEAD_BYTES: Final = 256 * 1024
MAX_MANIFEST_BYTES: Final = 64 * 1024 * 1024  # decoded; about 500,000 entries
MAX_BLOCKS: Final = 1 << 16  # of one manifest: 16 million tokens at 256

# Bounds that hold for any stored value; `parse` refuses what lies outside, and the JSON Schemas state them.
_Hex64 = msgspec.Meta(pattern="^[0-9a-f]{64}$", min_length=64, max_length=64)
_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]  # what every JSON implementation reads exactly
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_TOKENS)]

# `gc=False` below: a node caches thousands of these. They are trees of immutable values and in no cycle, so that the garbage
# collector, which stops everything while it looks, has no reason to walk them.


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """`format.json`: what wrote this root, and what its store was seen to guarantee."""

    v: int = FORMAT_VERSION
    store_id: str
    created: float
    guarantees: dict[str, bool] = {}


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """The register `epoch`. It only grows (R9)."""

    v: int = FORMAT_VERSION
    epoch: _Natural
    write: str = ""


class Version(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An older version of a branch that is still named, hence alive."""

    seq: _Natural
    manifest: str
    n: _Natural
    at: float


class Branch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A session: the first `n` blocks of a manifest.

    Attributes:
        seq: The version, as users call it; grows by one with every commit or rewind.
        manifest: `<gen>-<id>` of the manifest, or "" for a session that holds nothing yet.
        n: How many of the manifest's blocks belong to it (R10: only a commit makes it grow).
        ttl: Seconds it lives without renewal; 0 means it has no expiry.
        sliding: Whether restores and commits renew it.
        expires: Store-clock seconds; 0 means never.
        pinned: Never expired or evicted while set.
        at: Store-clock seconds when `seq` was made.
        history: Earlier versions, newest first.
    """

    seq: _Natural
    manifest: str = ""
    n: _Natural = 0
    ttl: _Natural = 0
    sliding: bool = True
    expires: float = 0
    pinned: bool = False
    at: float = 0
    history: tuple[Version, ...] = ()


class Head(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The register `heads/<tenant>/<family>`: a session and its forks.

    Attributes:
        swaps: How many swaps ever landed, seals included.
        write: The write id of the last swap; fresh every time, so that no ETag ever repeats.
        recent: The last 32 write ids, oldest first (R8).
        open: Whether blocks may be added (R3).
        sealed_at: Epoch of the collection that sealed it last.
        dead: Final: nothing is ever added again (I6).
        branches: By branch id, which is never reused (R7).
    """

    v: int = FORMAT_VERSION
    swaps: _Natural = 0
    write: str = ""
    recent: tuple[str, ...] = ()
    open: bool = True
    sealed_at: _Natural = 0
    dead: bool = False
    branches: dict[str, Branch] = {}


class Copy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stored object of a block: which shard (index into the manifest's `shards`), its generation and its size."""

    shard: _Natural
    gen: _Natural
    bytes: _Natural
    header_bytes: _Natural


class BlockRef(msgspec.Struct, frozen=True, gc=False):
    """A block as a manifest names it."""

    prefix_id: Annotated[PrefixId, _Hex64]
    tokens: _Tokens
    copies: tuple[Copy, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`manifests/<tenant>/<family>/<gen>-<id>`: immutable; the blocks of one version, in prefix order.

    Attributes:
        shards: Shard names, such as `t0of1.p0of1.g0`; a copy refers to one by index.
        tokens: Sum over blocks.
        labels: Short user-given text, shown and never interpreted.
        created: Store-clock seconds.
    """

    v: int = FORMAT_VERSION
    namespace: Annotated[NamespaceId, _Hex64]
    shards: tuple[str, ...]
    block_tokens: _Tokens
    tokens: _Natural
    labels: dict[str, str] = {}
    created: float = 0
    blocks: tuple[BlockRef, ...] = ()


class Name(msgspec.Struct, frozen=True, kw_only=True):
    """`names/<tenant>/<name>/<namespace>/<lane>`: the family and branch a session id means. Never deleted (R7)."""

    v: int = FORMAT_VERSION
    name: str
    family: str
    branch: str
    write: str = ""


T = TypeVar("T", bound=msgspec.Struct)


class _Tagged(msgspec.Struct):
    v: int


def parse(data: bytes | memoryview, kind: type[T], what: str) -> T:
    """A stored JSON value. `what` names it in errors.

    Raises:
        Unsupported: The value says a format version that this code does not know: refused, never guessed (I10).
        Corrupt: It is not such a value.
    """
    try:
        version = msgspec.json.decode(data, type=_Tagged).v
        if version != FORMAT_VERSION:
            raise Unsupported(f"{what} has format version {version}; this kvtier knows {FORMAT_VERSION}", kind="unknown_format")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:  # the latter two: deep nesting, broken UTF-8
        raise Corrupt(f"{what} is not a valid {kind.__name__}: {error}") from None


def dump(value: msgspec.Struct) -> bytes:
    """A value as stored: JSON with fields in declaration order."""
    return msgspec.json.encode(value)
