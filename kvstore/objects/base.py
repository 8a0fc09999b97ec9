"""The object-store contract: the few operations the protocol rests on, and what each answer means.

A store offers strong reads and lists, an atomic PUT with `If-None-Match: *` or `If-Match`, and an unconditional DELETE that may
arrive late. There is no conditional DELETE here, because stores differ. One `put` is one request: it is never split and
never sent again behind the caller's back. `tests/contract` runs one suite on every backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec


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


class ObjectStore(Protocol):
    """Keys are full keys, as :class:`kvstore.keys.Keys` spells them.

    Every call has a deadline of the store's own and raises, besides what each says: `Unavailable` (kinds `unavailable`,
    `timeout`, `store_busy`, `store_conflict`), `Denied` (by kind: credentials, expiry, rights, clock skew is `Unavailable`),
    `Unsupported`, `Closed` (kind `forked` in a forked child).
    """

    async def get(
        self,
        key: str,
        *,
        range: tuple[int, int] | None = None,  # noqa: A002  the HTTP header's own name
        into: memoryview | None = None,
        if_none_match: str | None = None,
    ) -> Got | Absent | Unchanged:
        """Read an object, or the bytes [start, end) of it.

        A range that starts at or past the end of the object gives an empty `data`, never an error; one that ends past it gives
        what is there. With `into`, bytes are copied there and nothing longer than it is ever buffered: an object (or range)
        larger than `into` raises `Corrupt` before its body is read.
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
        """Server-side copy over whatever is at `target`; False where the source is absent."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """Pages (up to 1,000) of what has this key prefix, in key order. The prefix is a plain string and need not end at a '/'."""
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
