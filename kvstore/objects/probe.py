"""Find out whether a store keeps the promises that the protocol rests on, before anything is trusted to it.

Some S3 servers accept `If-None-Match` and `If-Match` and ignore them. On those two writers both win, and sessions are lost without
any error, so such a store is refused at start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from kvstore.clock import Clock, Ids
from kvstore.errors import KVTierError, Unavailable, Unsupported
from kvstore.objects.base import (
    CREATE,
    Got,
    ObjectStore,
    PutMode,
    Refused,
    Stored,
    Unchanged,
    Update,
)

_CREATORS: Final = 3  # SeaweedFS takes a second per round from about this many racers on
_SWAPPERS: Final = 2
_ROUNDS: Final = 3  # all of them may lose to each other by 409; then they race again


class Guarantees(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe saw. The promises that safety needs held, or it would have raised.

    Attributes:
        conditional_get: An unchanged object is not sent again (304); without it resuming costs more, nothing else.
        etag_is_digest: The same bytes get the same ETag again.
        clock_skew_s: The store's clock minus this host's; stores refuse requests from 900 s on.
    """

    conditional_get: bool
    etag_is_digest: bool
    clock_skew_s: float


async def probe(store: ObjectStore, key: str, clock: Clock, ids: Ids) -> Guarantees:
    """Try every promise on two throw-away keys, in about twenty requests, and delete them again.

    Args:
        store: The store itself, not a wrapper that tries again.
        key: As :meth:`kvstore.keys.Keys.probe` gives it, with an id nobody used before.
        clock: Of this host.
        ids: For distinct bodies.

    Raises:
        Unsupported: kind `unsafe_store`; the message names the promise that was broken.
        KVTierError: Whatever the store raises: out of reach, no rights, no bucket.
    """
    first, second = f"{key}/a", f"{key}/b"
    bodies = [f"{ids.new()} {n}".encode() for n in range(_CREATORS + _SWAPPERS)]
    trial = _Trial(store)
    try:
        created = await trial.create_and_swap(first, bodies)
        changed = await trial.read_back(first, key, bodies[1])
        await trial.refuses(second, bodies[2], Update(created), "If-Match where nothing is")
        await trial.race(second, bodies)
        again = await trial.delete_and_create(first, second, bodies[0])
        skew = await store.now() - clock.now()
    finally:
        await _clean(store, first, second)
    return Guarantees(conditional_get=changed, etag_is_digest=again == created, clock_skew_s=skew)


class _Trial:
    """The promises, one method each, in an order that needs few requests."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def create_and_swap(self, key: str, bodies: Sequence[bytes]) -> str:
        """One writer wins, every later one on the same base is refused. The second body is there in the end.

        Returns:
            The first body's ETag.
        """
        created = await self.accepts(key, bodies[0], CREATE, "If-None-Match where nothing is")
        await self.refuses(key, bodies[1], CREATE, "If-None-Match where something is")
        await self._holds(key, bodies[0], created)
        await self.refuses(key, bodies[1], Update(_foreign(created)), "If-Match with an ETag that never was")
        swapped = await self.accepts(key, bodies[1], Update(created), "If-Match with the current ETag")
        if swapped == created:
            raise _unsafe("two contents have one ETag, so a swap would not notice the other's change")
        await self.refuses(key, bodies[2], Update(created), "If-Match with an older ETag")
        return created

    async def read_back(self, key: str, prefix: str, body: bytes) -> bool:
        """Reads and lists see the last write at once. Returns whether a conditional GET spares the body."""
        etag = await self._holds(key, body, None)
        listed = [meta async for page in self._store.list(prefix) for meta in page]
        if [(meta.key, meta.size, meta.etag) for meta in listed] != [(key, len(body), etag)]:
            raise _unsafe(f"a listing right after a write does not show it: {[meta.key for meta in listed]}")
        return isinstance(await self._store.get(key, if_none_match=etag), Unchanged)

    async def race(self, key: str, bodies: Sequence[bytes]) -> None:
        """Of several writers at the same instant exactly one wins, and its bytes are there."""
        winner, etag = await self._one_wins(key, bodies[:_CREATORS], CREATE)
        await self._holds(key, winner, etag)
        # Bodies of their own: a swap to what is already there keeps the ETag, and a second winner would be right.
        winner, etag = await self._one_wins(key, bodies[_CREATORS:], Update(etag))
        await self._holds(key, winner, etag)

    async def delete_and_create(self, first: str, second: str, body: bytes) -> str:
        """What was deleted is gone, and its key free again. Returns the new ETag."""
        if await self._store.delete([first, second]):
            raise _unsafe("it does not delete what it is told to")
        if isinstance(await self._store.get(first), Got):
            raise _unsafe("a deleted object can still be read")
        return await self.accepts(first, body, CREATE, "If-None-Match after a deletion")

    async def accepts(self, key: str, body: bytes, mode: PutMode, case: str) -> str:
        """The write lands; its ETag."""
        done = await self._put(key, body, mode, case)
        if isinstance(done, Refused):
            raise _unsafe(f"{case} was refused")
        return done.etag

    async def refuses(self, key: str, body: bytes, mode: PutMode, case: str) -> None:
        """The write does not land."""
        if isinstance(await self._put(key, body, mode, case), Stored):
            raise _unsafe(f"{case} was accepted: the condition is ignored")

    async def _put(self, key: str, body: bytes, mode: PutMode, case: str) -> Stored | Refused:
        try:
            return await self._store.put(key, body, mode)
        except Unsupported as error:
            raise _unsafe(f"{case} is not implemented ({error.message})") from error

    async def _holds(self, key: str, body: bytes, etag: str | None) -> str:
        found = await self._store.get(key)
        if not isinstance(found, Got) or found.data != body:
            raise _unsafe("a read right after a write does not show it")
        if etag not in {None, found.etag}:
            raise _unsafe(f"a PUT answered ETag {etag} and a GET {found.etag}: no swap could name the right one")
        return found.etag

    async def _one_wins(self, key: str, bodies: Sequence[bytes], mode: PutMode) -> tuple[bytes, str]:
        async def write(body: bytes) -> Stored | None:
            try:
                done = await self._store.put(key, body, mode)
            except Unavailable as error:
                if error.kind != "store_conflict":
                    raise
                return None  # 409: it met another write, and lost
            return done if isinstance(done, Stored) else None

        for _ in range(_ROUNDS):
            outcomes = await asyncio.gather(*map(write, bodies))
            won = [(body, done.etag) for body, done in zip(bodies, outcomes, strict=True) if done]
            if len(won) > 1:
                raise _unsafe(f"{len(won)} of {len(bodies)} simultaneous {type(mode).__name__.lower()} writes won")
            if won:
                return won[0]
        raise Unavailable(f"of {len(bodies)} simultaneous writes none won, {_ROUNDS} times", kind="store_conflict")


def _unsafe(broken: str) -> Unsupported:
    return Unsupported(f"this store is not safe to use: {broken}", kind="unsafe_store")


def _foreign(etag: str) -> str:
    """An ETag of the same shape that no object has."""
    return etag.translate(str.maketrans("0123456789abcdef", "123456789abcdef0"))


async def _clean(store: ObjectStore, *keys: str) -> None:
    # What the probe found out matters more than two small objects left behind.
    with suppress(KVTierError):
        await store.delete(keys)
