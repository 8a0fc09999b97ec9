"""The object-store contract: the few operations the protocol rests on, and what each answer means.

A store offers strong reads and lists, an atomic PUT with `If-None-Match: *` or `If-Match`, and an unconditional DELETE that may
arrive late. There is no conditional DELETE here, because stores differ. One `put` is one request: it is never split and
never sent again behind the caller's back. `tests/contract` runs one suite on every backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from kvstore.errors import Invalid

MAX_KEY_BYTES: Final = 1024
PAGE: Final = 1000
"""Most keys in one page of a listing, and in one batch of a deletion (S3's own limit for both)."""


class ObjectMeta(msgspec.Struct, frozen=True):
    """What a listing or a HEAD says. `modified` is in seconds since the epoch, by the store's clock."""

    key: str
    size: int
    etag: str
    modified: float


class Got(msgspec.Struct, frozen=True):
    """A GET's answer.

    Attributes:
        data: The bytes; the filled part of `into` where that was given.
        etag: Of the whole object.
        size: Of the whole object, also when a range was asked.
        modified: By the store's clock.
    """

    data: memoryview
    etag: str
    size: int
    modified: float


class Absent(msgspec.Struct, frozen=True):
    """No such key. A value, not an error."""


class Unchanged(msgspec.Struct, frozen=True):
    """The object still has the ETag the caller named (304)."""


class Overwrite(msgspec.Struct, frozen=True):
    """PUT whatever is there."""


class Create(msgspec.Struct, frozen=True):
    """PUT with `If-None-Match: *`: only where nothing is."""


class Update(msgspec.Struct, frozen=True):
    """PUT with `If-Match`: only over exactly this version."""

    etag: str


class Stored(msgspec.Struct, frozen=True):
    """The PUT landed; this is its ETag."""

    etag: str


class Refused(msgspec.Struct, frozen=True):
    """412: the condition did not hold when the store looked. After an SDK's or proxy's resend this may still be our own write."""


ABSENT: Final = Absent()
UNCHANGED: Final = Unchanged()
REFUSED: Final = Refused()
OVERWRITE: Final = Overwrite()
CREATE: Final = Create()

PutMode: TypeAlias = Overwrite | Create | Update
Buffer: TypeAlias = bytes | bytearray | memoryview
Arrived: TypeAlias = Callable[[int, int], None]
"""Told that bytes [start, end) of a target are in place."""


class ObjectStore(Protocol):
    """Keys are full keys, as :class:`kvstore.keys.Keys` spells them.

    Every call has a deadline of the store's own and raises, besides what each says: `Unavailable` (kinds `unavailable`, `timeout`,
    `store_busy`, `store_conflict`, `clock_skew`, `no_bucket`, `untrusted_certificate`), `Denied` (by kind: credentials, expiry,
    rights), `Invalid` (a key no store keeps as it is, a wrong region), `Overloaded` (no room for its bytes in time), `Unsupported`,
    `Closed` (kind `forked` in a forked child).
    """

    async def get(
        self,
        key: str,
        *,
        range: tuple[int, int] | None = None,  # noqa: A002  the HTTP header's own name
        into: memoryview | None = None,
        if_none_match: str | None = None,
        arrived: Arrived | None = None,
    ) -> Got | Absent | Unchanged:
        """Read an object, or the bytes [start, end) of it.

        A range that starts at or past the end of the object gives an empty `data`, never an error; one that ends past it gives
        what is there. With `into`, bytes are put there and nothing longer than it is ever buffered: an object (or range)
        larger than `into` raises `Corrupt` before its body is read. When the caller is cancelled, nobody writes into `into` any
        more once this call is over.

        `arrived` is told what is in place of `into` while the rest is still coming, on the threads that move it, several at a time
        perhaps: work on bytes there costs no hand-over. It does not raise. `arrived(0, 0)` takes back everything said before:
        another attempt begins, or its bytes were laid over. A store that has no such threads, or a wrapper that changes bytes,
        says nothing; whoever counts on all bytes looks at what was told when this call is over.
        """
        ...

    async def head(self, key: str) -> ObjectMeta | Absent:
        """What there is, without its bytes."""
        ...

    async def put(self, key: str, body: Buffer, mode: PutMode) -> Stored | Refused:
        """One request, sent once for `Create` and `Update`.

        The body is not copied: it must not change until this returns. When the caller is cancelled, the request is awaited to its
        real end first (shielded), so the buffer is free again whenever this call is over.
        """
        ...

    async def copy(self, source: str, target: str) -> bool:
        """Server-side copy over whatever is at `target`; False where there is no source. `Invalid` where they are one."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """Pages (up to 1,000) of what has this key prefix. The prefix is a plain string and need not end at a '/'.

        Each object that stays is seen exactly once, in the store's own order: bytes of the key on S3, path by path on SeaweedFS
        (`a/b` before `a-b`). `start_after` is a key in that order, and no other key's folder.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """Delete; absent keys count as deleted. Returns the keys that could not be deleted, to be tried again."""
        ...

    async def now(self) -> float:
        """The store's clock, in seconds since the epoch."""
        ...

    async def aclose(self) -> None:
        """Finish what is in flight and let go of connections."""
        ...


def check_key(key: str) -> str:
    """The key, if every store keeps it exactly as it is spelled.

    Clients and servers clean other keys up silently, so that an object lands somewhere else than was said.

    Raises:
        Invalid: It is empty or over 1,024 bytes, has a control character, or an empty, `.` or `..` path part.
    """
    if not key or len(key.encode("utf-8", "replace")) > MAX_KEY_BYTES:
        raise Invalid(f"an object key must be 1 to {MAX_KEY_BYTES} bytes long; {key[:40]!r} is not")
    if any(part in {"", ".", ".."} for part in key.split("/")) or not key.isprintable():
        raise Invalid(f"object key {key[:80]!r} has a part that is empty, '.' or '..', or a control character")
    return key
