"""What tiers, origins and leases promise each other.

A hierarchy here moves opaque, immutable byte strings under 32-byte keys. It knows nothing of sessions, tensors or S3: whoever
composes it injects an :class:`Origin` that fetches and verifies values.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import msgspec


class TierError(Exception):
    """A tier cannot be opened or used as asked: a fault of set-up, never the absence of a value."""


class SealedOtherwise(TierError):
    """A folder is sealed, and was opened without what seals; or the other way round."""


class PathInUse(TierError):
    """Another tier, in this process or another, has this path open."""


class JournalFull(TierError):
    """The record or the journal is too large: the work it would announce must not be promised."""


class TierClosed(TierError):
    """The tier was closed before this value could become visible."""


class Miss(enum.Enum):
    """Why there are no bytes: a value, never an exception."""

    ABSENT = "absent"  # nobody has it
    CORRUPT = "corrupt"  # somebody had it, and the bytes were not what they claim; they were dropped
    TIMEOUT = "timeout"  # the deadline passed first; it may arrive later
    FULL = "full"  # everything that could make room is leased
    UNAVAILABLE = "unavailable"  # the tier or origin failed


class Want(msgspec.Struct, frozen=True):
    """One value somebody wants.

    Attributes:
        key: 32 bytes.
        size: Length of the value in bytes; known before it is read, so that room is reserved exactly. Nothing is ever found
            under a size below 1.
        ref: Whatever an origin needs to find the value; opaque to this package.

    Raises:
        ValueError: The key is not 32 bytes long.
    """

    key: bytes
    size: int
    ref: object = None

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise ValueError(f"a key has 32 bytes, not {len(self.key)}")


class Lease:
    """Bytes that stay as they are until released: nothing leased is evicted, moved or overwritten.

    Attributes:
        key: The value's key.
        view: The bytes, read-only.
        offset: Where they start in the tier's shared arena, for a reader that maps it; -1 where there is no arena.
        size: Length in bytes.
        source: Name of the tier or origin that had them when they were asked for.
    """

    __slots__ = ("_release", "key", "offset", "size", "source", "view")

    def __init__(self, key: bytes, view: memoryview, offset: int, release: Callable[[], None], source: str = "") -> None:
        self.key = key
        self.view = view.toreadonly()
        self.size = view.nbytes
        self.offset = offset
        self.source = source
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Let go. Calling it again does nothing. The view must not be used afterwards; touching it raises ValueError."""
        release, self._release = self._release, None
        if release is not None:
            with contextlib.suppress(BufferError):  # an array made from the view is still alive; its owner broke the rule above
                self.view.release()
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Slot(Protocol):
    """Room reserved for one value that is being written. Exactly one of `commit` and `abort` ends it.

    Attributes:
        want: The value it is for.
        view: Exactly `want.size` writable bytes.
        padded: The same bytes and those up to the next multiple of 4,096; page-aligned, so that O_DIRECT can read into it.
    """

    want: Want
    view: memoryview
    padded: memoryview

    def commit(self) -> Lease:
        """The bytes are complete: make them visible under the key, and lease them to the writer."""
        ...

    def abort(self) -> None:
        """Give the room back. Calling it after `commit` or twice does nothing."""
        ...


class Tier(Protocol):
    """A place that keeps values under a byte limit. `used` counts payload bytes, reservations included."""

    name: str

    @property
    def used(self) -> int:
        """Payload bytes held or reserved; never above `limit`."""
        ...

    @property
    def limit(self) -> int:
        """Payload bytes it may hold."""
        ...

    async def get_many(self, wants: Sequence[Want]) -> list[Lease | Miss]:
        """Each value leased, or why not; in the order asked."""
        ...

    async def put_many(self, items: Sequence[tuple[Want, memoryview]]) -> list[bool]:
        """Keep a copy of each value. False where there was no room: a tier drops, it never stalls. A repeat is True."""
        ...

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are here now. Cheap; never waits."""
        ...

    def discard_many(self, keys: Sequence[bytes]) -> int:
        """Forget these values unless they are leased; how many went."""
        ...

    async def evict(self, nbytes: int) -> int:
        """Drop values, least useful first, until that many bytes are freed or all that is left is leased; how many were freed."""
        ...

    async def aclose(self) -> None:
        """Stop. What is durable stays."""
        ...


Tell = Callable[[int], None]
"""From any thread, one at a time: `tell(n)`: the first n bytes are there and verified, while the others still come. `tell(0)`: they
are about to be overwritten by another attempt; when it returns, nobody reads them any more."""

Watch = Callable[[bytes, int, object], None]
"""From any thread, in a tier's own order: `watch(key, 1, ref)`: the tier has it now; `watch(key, -1, None)`: it has it no more.
`ref` is its want's, from a tier that has the want at hand, else None. The tier's lock is held: it returns at once, and calls
nothing of the tier."""


class Origin(Protocol):
    """Where values come from when no tier has them: a bucket, later peers. It verifies before it answers."""

    name: str

    async def fetch(self, want: Want, into: memoryview, tell: Tell | None = None) -> Miss | None:
        """Fill `into` (exactly `want.size` bytes) with verified bytes. None: done. On a miss `into` holds garbage.

        When this is cancelled, `into` is somebody else's as soon as the coroutine has ended: nothing may write there then, nor
        call `tell`. An origin that only knows whole values tells nothing.
        """
        ...

    async def offer(self, want: Want, value: Lease) -> bool:
        """Here is a value you may keep. It may decline or fail silently (False). The caller keeps the lease until then."""
        ...

    def ready(self) -> bool:
        """Whether asking it has a chance now. Where not, it is not asked: reads are UNAVAILABLE, and offers dropped, at once."""
        ...

    async def contains(self, wants: Sequence[Want]) -> int:
        """Length of the leading run that it holds."""
        ...
