"""What the protocol stores: registers and manifests, as frozen values. See schema/FORMAT.md and docs/ordering.md.

Each body begins with a digest of itself and of its key, so that no bit that flipped on a wire or on a disk, and no answer that was
meant for somebody else, is ever taken for a value, let alone written back by the next swap.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, TypeVar

import msgspec
from blake3 import blake3

from kvstore.errors import Corrupt, KVTierError, Unsupported
from kvstore.ids import MAX_BLOCK_TOKENS, Namespace, NamespaceId, PrefixId

FORMAT_VERSION: Final = 1
SEALED_VERSION: Final = 2  # of `format.json` alone: whoever knows only 1 must not write in the clear there
RECENT: Final = 32  # write ids a head remembers (R8)
MAX_HEAD_BYTES: Final = 256 * 1024
MAX_MANIFEST_BYTES: Final = 64 * 1024 * 1024  # decoded; about 500,000 entries
MAX_BLOCKS: Final = 1 << 16  # of one manifest: 16 million tokens at 256
MAX_EPOCH: Final = 9_999_999_997  # a generation has ten digits in a key; an epoch every second would come here in 317 years

# Bounds that hold for any stored value; `parse` refuses what lies outside, and the JSON Schemas state them.
_Hex64 = msgspec.Meta(pattern="^[0-9a-f]{64}$", min_length=64, max_length=64)
_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]  # what every JSON implementation reads exactly
_Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_TOKENS)]

# `gc=False` below: a node caches thousands of these. They are trees of immutable values and in no cycle, so that the garbage
# collector, which stops everything while it looks, has no reason to walk them.


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored as JSON with a digest of itself.

    Attributes:
        SEGMENTS: How many segments its key has under the root: the part of the key that the digest covers.
        VERSIONS: Which versions of it this code knows.
    """

    SEGMENTS: ClassVar[int] = 1
    VERSIONS: ClassVar[tuple[int, ...]] = (FORMAT_VERSION,)


class Format(Body, frozen=True, kw_only=True):
    """`format.json`: what wrote this root, and what its store was seen to guarantee. Version 2: the root is sealed."""

    VERSIONS: ClassVar[tuple[int, ...]] = (FORMAT_VERSION, SEALED_VERSION)
    v: int = FORMAT_VERSION
    store_id: str
    created: float
    guarantees: dict[str, bool] = {}


class Epoch(Body, frozen=True, kw_only=True):
    """The register `epoch`. It only grows (R9)."""

    v: int = FORMAT_VERSION
    epoch: _Epoch
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


class Head(Body, frozen=True, kw_only=True, gc=False):
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

    SEGMENTS: ClassVar[int] = 3
    v: int = FORMAT_VERSION
    swaps: _Natural = 0
    write: str = ""
    recent: tuple[str, ...] = ()
    open: bool = True
    sealed_at: _Epoch = 0
    dead: bool = False
    branches: dict[str, Branch] = {}


class Copy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stored object of a block: which shard (index into the manifest's `shards`), its generation and its size."""

    shard: _Natural
    gen: _Epoch
    bytes: _Natural
    header_bytes: _Natural


class BlockRef(msgspec.Struct, frozen=True, gc=False):
    """A block as a manifest names it."""

    prefix_id: Annotated[PrefixId, _Hex64]
    tokens: _Tokens
    copies: tuple[Copy, ...]


class Manifest(Body, frozen=True, kw_only=True, gc=False):
    """`manifests/<tenant>/<family>/<gen>-<id>`: immutable; the blocks of one version, in prefix order.

    Attributes:
        shards: Shard names, such as `t0of1.p0of1.g0`; a copy refers to one by index.
        tokens: Sum over blocks.
        labels: Short user-given text, shown and never interpreted.
        created: Store-clock seconds.
    """

    SEGMENTS: ClassVar[int] = 4
    v: int = FORMAT_VERSION
    namespace: Annotated[NamespaceId, _Hex64]
    shards: tuple[str, ...]
    block_tokens: _Tokens
    tokens: _Natural
    labels: dict[str, str] = {}
    created: float = 0
    blocks: tuple[BlockRef, ...] = ()


class ManifestText(Manifest, frozen=True, kw_only=True, gc=False):
    """A manifest whose blocks are yet to be decoded, which takes 0.1 s where there are very many."""

    blocks: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]  # the same text


class Name(Body, frozen=True, kw_only=True):
    """`names/<tenant>/<name>/<namespace>/<lane>`: the family and branch a session id means. Never deleted (R7)."""

    SEGMENTS: ClassVar[int] = 5
    v: int = FORMAT_VERSION
    name: str
    family: str
    branch: str
    write: str = ""


T = TypeVar("T", bound=Body)

_OPENING: Final = b'{"digest":"'
_BLANK: Final = _OPENING + b"0" * 64  # the digest always stands here, so that no JSON is read before it is verified
_FIELDS: Final = len(_BLANK)
_encoder: Final = msgspec.json.Encoder()
_REMEDY: Final = "docs/recovery.md (damaged registers) says how it comes back; `kvtier fsck` lists what else is damaged"


class _Tagged(msgspec.Struct):
    v: int


def parse(data: bytes | bytearray | memoryview, kind: type[T], key: str) -> T:
    """A stored JSON value.

    Args:
        data: The body.
        kind: What it must be.
        key: Where it was read.

    Raises:
        Unsupported: The value says a format version that this code does not know: refused, never guessed (I10).
        Corrupt: It is not what was stored at that key, or no such value.
    """
    body = memoryview(data)
    if body[:_FIELDS].tobytes() != _OPENING + _digest(body[_FIELDS:], kind, key):
        raise Corrupt(f"{key} is not a valid {kind.__name__}: its bytes do not match their digest", remedy=_REMEDY)
    try:
        version = msgspec.json.decode(body, type=_Tagged).v
        if version not in kind.VERSIONS:
            raise Unsupported(f"{key} has format version {version}; this kvtier knows {kind.VERSIONS[-1]}", kind="unknown_format")
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:  # the latter two: deep nesting, broken UTF-8
        raise Corrupt(f"{key} is not a valid {kind.__name__}: {error}", remedy=_REMEDY) from None


def dump(value: Body, key: str) -> bytes:
    """A value as it is stored at `key`: JSON with the digest first, then fields in declaration order."""
    body = bytearray(_FIELDS + 1)
    _encoder.encode_into(value, body, _FIELDS + 1)  # its opening brace lands on the comma's place
    return _sealed(body, type(value), key)


def sealed(text: bytes, kind: type[Body], key: str) -> bytes:
    """The text of a JSON object that has no digest yet, as it is stored at `key`."""
    return _sealed(bytearray(_FIELDS + 1) + text, kind, key)


def _sealed(body: bytearray, kind: type[Body], key: str) -> bytes:
    body[: _FIELDS + 2] = _BLANK + b'",'
    found = blake3(body)
    found.update(_place(kind, key))
    body[len(_OPENING) : _FIELDS] = found.hexdigest().encode()
    return bytes(body)


def parse_namespace(body: bytes, namespace: NamespaceId) -> Namespace:
    """What is stored at `namespaces/<id>.json`. Its name is the digest of these bytes.

    Raises:
        Corrupt: They are another's, or nobody's.
    """
    remedy = "delete it: the next commit into this namespace writes it again"
    if blake3(body).hexdigest() != namespace:
        raise Corrupt(f"namespaces/{namespace}.json holds other bytes than that namespace's", remedy=remedy)
    try:
        return msgspec.json.decode(body, type=Namespace)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, KVTierError) as error:
        raise Corrupt(f"namespaces/{namespace}.json is not a namespace: {error}", remedy=remedy) from None


def stored_bytes(value: Body) -> int:
    """How long `dump` is."""
    return len(msgspec.json.encode(value)) + _FIELDS + 1  # `{` became `",`


def _digest(rest: bytes | memoryview, kind: type[Body], key: str) -> bytes:
    """Of a body with 64 zeros for its digest, `rest` being what follows them, and of its key under the root."""
    found = blake3(_BLANK)
    found.update(rest)
    found.update(_place(kind, key))
    return found.hexdigest().encode()


def _place(kind: type[Body], key: str) -> bytes:
    """The key under the root."""
    return "/".join(key.split("/")[-kind.SEGMENTS :]).encode()
