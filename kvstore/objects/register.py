"""A small typed value in the store that changes only by compare-and-swap: heads, names and the epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from kvstore.clock import Clock, Ids
from kvstore.errors import Corrupt, Invalid, Unavailable
from kvstore.objects.base import CREATE, Absent, ObjectStore, Refused, Stored, Unchanged, Update

_V = TypeVar("_V")

MAX_BYTES: Final = 256 << 10
"""Of an encoded value. A larger object under a register's key is not ours."""
_FIRST_S: Final = 0.01
_LONGEST_S: Final = 1.0


class Reading(msgspec.Struct, Generic[_V], frozen=True):
    """A value, and the ETag that the next swap must name."""

    value: _V
    etag: str


class Register(Generic[_V]):
    """One register.

    ETags are digests of the content, so a value that was there before brings its old ETag back: whoever relies on a swap having
    been the only one puts a fresh write id into every value.

    Args:
        store: Where it is.
        key: Its full key.
        type: What it holds, as msgspec decodes it.
    """

    def __init__(self, store: ObjectStore, key: str, type: type[_V]) -> None:  # noqa: A002  what it is
        self._store, self.key = store, key
        self._decoder = msgspec.json.Decoder(type)

    async def read(self, known: Reading[_V] | None = None) -> Reading[_V] | Absent:
        """What it holds now; `known` itself if that is still it, for the price of an answer without a body.

        Raises:
            Corrupt: Larger than a register may be, or not what it should hold.
        """
        # The buffer is sized by the bound, never by what an older reading or a listing said: a value that grew is read whole.
        buffer = memoryview(bytearray(MAX_BYTES))
        found = await self._store.get(self.key, into=buffer, if_none_match=known.etag if known else None)
        if isinstance(found, Absent):
            return found
        if isinstance(found, Unchanged):
            assert known is not None
            return known
        if len(found.data) != found.size:
            raise Corrupt(f"register {self.key}: {len(found.data)} of {found.size} bytes")
        try:
            return Reading(self._decoder.decode(found.data), found.etag)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(f"register {self.key} does not hold what it should: {error}") from error

    async def create(self, value: _V) -> Stored | Refused:
        """Put the first value, if nothing is there."""
        return await self._store.put(self.key, self._encode(value), CREATE)

    async def swap(self, etag: str, value: _V) -> Stored | Refused:
        """Put a value over exactly the one that has this ETag."""
        return await self._store.put(self.key, self._encode(value), Update(etag))

    async def update(
        self, change: Callable[[_V | None], _V | None], clock: Clock, ids: Ids, *, deadline_s: float = 30.0
    ) -> Reading[_V] | Absent:
        """Change it, as often as others get in between.

        Args:
            change: From the value of the moment (None: absent) to the next one, or None to leave it. May run several times.
            clock: For the waits and the deadline.
            ids: For their jitter.
            deadline_s: Seconds from now.

        Returns:
            What it holds then.

        Raises:
            Unavailable: A write's answer was lost, so it may have landed; or others won for as long as `deadline_s`.
        """
        end, longest = clock.monotonic() + deadline_s, _FIRST_S
        while True:
            now = await self.read()
            value = change(now.value if isinstance(now, Reading) else None)
            if value is None:
                return now
            done = await (self.swap(now.etag, value) if isinstance(now, Reading) else self.create(value))
            if isinstance(done, Stored):
                return Reading(value, done.etag)
            pause = ids.jitter() * longest
            if clock.monotonic() + pause > end:
                raise Unavailable(f"register {self.key}: others changed it for {deadline_s:.0f} s", kind="store_conflict")
            await clock.sleep(pause)
            longest = min(_LONGEST_S, 2 * longest)

    def _encode(self, value: _V) -> bytes:
        body = msgspec.json.encode(value)
        if len(body) > MAX_BYTES:
            raise Invalid(f"register {self.key} would hold {len(body)} bytes, more than {MAX_BYTES}")
        return body
