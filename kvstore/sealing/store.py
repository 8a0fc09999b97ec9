"""A store whose blocks, manifests and session names are sealed on their way out, and opened on their way in."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

from cachetools import LRUCache

from kvstore.errors import Corrupt, Denied, KVTierError, Unavailable
from kvstore.ids import NamespaceId
from kvstore.keys import Keys, escape
from kvstore.model import parse_namespace
from kvstore.objects.base import ABSENT, Absent, Arrived, Buffer, Got, ObjectMeta, ObjectStore, PutMode, Refused, Stored, Unchanged
from kvstore.objects.gate import ByteGate
from kvstore.objects.passing import PassingStore
from kvstore.sealing.frames import FRAME, HEADER, SALT, TAG, Opening, UnknownKey, content_bytes, frames_of, seal_into, sealed_bytes
from kvstore.sealing.scratch import Scratch
from kvstore.sealing.tenants import Ring, TenantKeyring

_INLINE: Final = 64 << 10  # sealed or opened where we are: a hand-over to a thread costs more
_NAMESPACES: Final = 10_000
_NAMESPACE_BYTES: Final = 256 << 10
_PATIENCE_S: Final = 120.0


class SealedStore(PassingStore):
    """See :class:`kvstore.objects.base.ObjectStore`. Keys are as the root's veiled `Keys` spell them; sizes are those of contents.

    A copy inside the store keeps its bytes, so that what is bound to a block is its name without the generation.

    Besides what a store raises: `Gone` (`key_destroyed`), `Denied` (`no_key`). Neither is `Corrupt`: nobody may repair or delete on
    the strength of a key that is not at hand.

    Args:
        store: The sealed objects; this wrapper closes it.
        keys: Of the root.
        tenants: Their keys.
        run: Seals and opens on threads.
        inflight: Most bytes of sealed objects in memory.
    """

    def __init__(
        self, store: ObjectStore, keys: Keys, tenants: TenantKeyring, run: Callable[..., Awaitable[Any]], inflight: int
    ) -> None:
        super().__init__(store)
        self._keys, self.tenants, self._run = keys, tenants, run
        self._gate, self._scratch = ByteGate(inflight, _PATIENCE_S), Scratch()
        self._whose: LRUCache[str, str] = LRUCache(_NAMESPACES)

    # --- reads ---

    async def get(
        self,
        key: str,
        *,
        range: tuple[int, int] | None = None,  # noqa: A002  the contract's own name
        into: memoryview | None = None,
        if_none_match: str | None = None,
        arrived: Arrived | None = None,
    ) -> Got | Absent | Unchanged:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        if not self._keys.seals(key):
            return await self._store.get(key, range=range, into=into, if_none_match=if_none_match, arrived=arrived)
        tenant = await self._tenant(key)
        if tenant is None:
            return ABSENT  # a namespace is stored before its first block
        if range is not None:
            return await self._get_range(key, tenant, range, into, if_none_match)
        if into is None:
            return await self._get_whole(key, tenant, if_none_match)
        target = into.cast("B")
        room = sealed_bytes(len(target))
        async with self._gate.hold(room):
            scratch = self._scratch.take(room)
            try:
                return await self._get_into(key, tenant, scratch[:room], target, if_none_match, arrived)
            finally:
                self._scratch.give_back(scratch)

    async def _get_into(
        self, key: str, tenant: str, scratch: memoryview, into: memoryview, if_none_match: str | None, arrived: Arrived | None
    ) -> Got | Absent | Unchanged:
        ring = await self.tenants.opening(tenant)
        opening = Opening(scratch, ring.keys if ring is not None else {}, self._bound(key), into, arrived)
        got = await self._store.get(key, into=scratch, if_none_match=if_none_match, arrived=opening.arrived)
        if not isinstance(got, Got):
            return got
        try:
            size = await self._do(got.size, opening.finish, got.size)
        except UnknownKey as unknown:
            opening = Opening(scratch, (await self._anew(key, tenant, unknown)).keys, self._bound(key), into)
            try:
                size = await self._do(got.size, opening.finish, got.size)
            except UnknownKey:
                raise await self._without_key(key, bytes(scratch[:HEADER]), unknown) from None
        return Got(into[:size], got.etag, size, got.modified)

    async def _get_whole(self, key: str, tenant: str, if_none_match: str | None) -> Got | Absent | Unchanged:
        got = await self._store.get(key, if_none_match=if_none_match)
        if not isinstance(got, Got):
            return got
        return await self._opened(key, tenant, got, bytes(got.data[:HEADER]), (0, got.size), 0)

    async def _get_range(
        self, key: str, tenant: str, span: tuple[int, int], into: memoryview | None, if_none_match: str | None
    ) -> Got | Absent | Unchanged:
        first = span[0] // FRAME
        start = HEADER + first * (FRAME + TAG) if first else 0
        end = HEADER + -(-span[1] // FRAME) * (FRAME + TAG)
        got = await self._store.get(key, range=(start, end), if_none_match=if_none_match)
        if not isinstance(got, Got):
            return got
        head = got
        if first:
            begin = await self._store.get(key, range=(0, HEADER))
            if not isinstance(begin, Got):
                return begin
            head = begin
            if head.etag != got.etag:
                raise Unavailable(f"GET {key}: the object changed while it was read")
        whole = await self._opened(key, tenant, got, bytes(head.data[:HEADER]), span, first)
        if into is None:
            return whole
        if whole.data.nbytes > into.nbytes:
            raise Corrupt(f"GET {key}: {whole.data.nbytes} bytes where at most {into.nbytes} were expected")
        target = into.cast("B")[: whole.data.nbytes]
        target[:] = whole.data
        return Got(target, whole.etag, whole.size, whole.modified)

    async def _opened(self, key: str, tenant: str, got: Got, head: bytes, span: tuple[int, int], first: int) -> Got:
        """Bytes [span) of the content, out of frames from `first` on."""
        ring, most = await self.tenants.opening(tenant), got.size
        try:
            frames = frames_of(head, ring.keys if ring is not None else {}, self._bound(key), most)
        except UnknownKey as unknown:
            try:
                frames = frames_of(head, (await self._anew(key, tenant, unknown)).keys, self._bound(key), most)
            except UnknownKey:
                raise await self._without_key(key, head, unknown) from None
        if got.size != sealed_bytes(frames.content):
            raise Corrupt(f"{key}: {got.size} bytes where its header says {sealed_bytes(frames.content)}")
        begin, end = first * FRAME, min(span[1], frames.content)
        if begin >= end and frames.content:
            return Got(memoryview(b""), got.etag, frames.content, got.modified)
        last = max(first + 1, -(-end // FRAME))
        room = memoryview(bytearray(min(last * FRAME, frames.content) - begin))
        base = (0 if first else HEADER) - first * (FRAME + TAG)

        def work() -> None:
            for index in range(first, last):
                frames.open(index, got.data, room, base=base, start=begin)

        await self._do(room.nbytes, work)
        return Got(room[max(0, span[0] - begin) : max(0, end - begin)], got.etag, frames.content, got.modified)

    async def head(self, key: str) -> ObjectMeta | Absent:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        meta = await self._store.head(key)
        return meta if isinstance(meta, Absent) or not self._keys.seals(key) else _inside(meta)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        async for page in self._store.list(prefix, start_after=start_after):
            yield [_inside(meta) if self._keys.seals(meta.key) else meta for meta in page]

    # --- writes ---

    async def put(self, key: str, body: Buffer, mode: PutMode) -> Stored | Refused:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        if not self._keys.seals(key):
            return await self._store.put(key, body, mode)
        tenant = await self._tenant(key)
        if tenant is None:
            raise Unavailable(f"nothing says yet whose key seals {key}: its namespace is not registered")
        ring = await self.tenants.sealing(tenant)
        content = memoryview(body).cast("B")
        room = sealed_bytes(len(content))
        async with self._gate.hold(room):
            scratch = self._scratch.take(room)
            try:
                sealed = scratch[:room]
                await self._do(room, seal_into, ring.current, os.urandom(SALT), self._bound(key), content, sealed)
                return await self._store.put(key, sealed, mode)
            finally:
                self._scratch.give_back(scratch)

    # --- inside ---

    async def _do(self, nbytes: int, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args) if nbytes <= _INLINE else await self._run(fn, *args)

    def _bound(self, key: str) -> bytes:
        return self._keys.bound(key).encode()

    async def _without_key(self, key: str, head: bytes, unknown: UnknownKey) -> KVTierError:
        """What to say of an object whose key is not there. A key's id that was damaged on the way is damage, not a missing key."""
        again = await self._store.get(key, range=(0, HEADER))
        if isinstance(again, Got) and bytes(again.data) != head:
            return Corrupt(f"GET {key}: its header was another one when it was read again")
        return _no_key(key, unknown)

    async def _anew(self, key: str, tenant: str, unknown: UnknownKey) -> Ring:
        ring = await self.tenants.opening(tenant, anew=True)
        if ring is None:
            raise _no_key(key, unknown)
        return ring

    async def _tenant(self, key: str) -> str | None:
        """The segment of the tenant whose object this is; None for a block of a namespace that nobody registered."""
        folder, owner = key.removeprefix(self._keys.root).split("/", 2)[:2]
        if folder != "blocks":
            return owner
        known = self._whose.get(owner)
        if known is None:
            known = await self._tenant_of(NamespaceId(owner))
            if known is not None:
                self._whose[owner] = known
        return known

    async def _tenant_of(self, namespace: NamespaceId) -> str | None:
        got = await self._store.get(self._keys.namespace(namespace), into=memoryview(bytearray(_NAMESPACE_BYTES)))
        return escape(parse_namespace(bytes(got.data), namespace).tenant) if isinstance(got, Got) else None


def _inside(meta: ObjectMeta) -> ObjectMeta:
    return ObjectMeta(meta.key, content_bytes(meta.size), meta.etag, meta.modified)


def _no_key(key: str, unknown: UnknownKey) -> Denied:
    return Denied(
        f"{key} was sealed under data key {unknown}, which its tenant's register does not hold: it is lost, or the object damaged",
        kind="no_key",
    )
