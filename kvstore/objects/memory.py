"""The reference backend: what the contract means, in one page. Compare-and-swap is atomic, reads and lists are strong."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from kvstore.clock import Clock, SystemClock
from kvstore.errors import Closed, Corrupt, Invalid
from kvstore.objects.base import (
    ABSENT,
    PAGE,
    REFUSED,
    UNCHANGED,
    Absent,
    Arrived,
    Buffer,
    Create,
    Got,
    ObjectMeta,
    PutMode,
    Refused,
    Stored,
    Unchanged,
    Update,
    check_key,
)


class _Shelf:
    """What several handles of one store share."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, ObjectMeta]] = {}
        self.lock = threading.Lock()  # handles may live on different event loops, and a swap must be atomic there too


class MemoryStore:
    """Objects in this process. Every call yields to the event loop once before it acts, so that callers interleave as they would.

    Args:
        clock: The store's own clock: `modified` and `now()` come from it.
    """

    _shelves: ClassVar[dict[str, _Shelf]] = {}

    def __init__(self, clock: Clock | None = None, *, _shelf: _Shelf | None = None) -> None:
        shelf = _shelf or _Shelf()
        self._objects, self._lock = shelf.objects, shelf.lock
        self._clock = clock or SystemClock()
        self._closed = False

    @classmethod
    def named(cls, name: str, clock: Clock | None = None) -> MemoryStore:
        """A handle of `memory://name`: the same objects for as long as this process lives, also after other handles closed."""
        return cls(clock, _shelf=cls._shelves.setdefault(name, _Shelf()))

    async def get(
        self,
        key: str,
        *,
        range: tuple[int, int] | None = None,  # noqa: A002  the contract's own name
        into: memoryview | None = None,
        if_none_match: str | None = None,
        arrived: Arrived | None = None,  # noqa: ARG002  it all comes at once
    ) -> Got | Absent | Unchanged:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        found = await self._find(key)
        if found is None:
            return ABSENT
        body, meta = found
        if meta.etag == if_none_match:
            return UNCHANGED
        part = memoryview(body) if range is None else memoryview(body)[range[0] : max(range)]
        if into is not None:
            target = into.cast("B")
            if len(part) > len(target):
                raise Corrupt(f"{key}: {len(part)} bytes where at most {len(target)} were expected")
            target[: len(part)] = part
            part = target[: len(part)]
        return Got(part, meta.etag, meta.size, meta.modified)

    async def head(self, key: str) -> ObjectMeta | Absent:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        found = await self._find(key)
        return ABSENT if found is None else found[1]

    async def put(self, key: str, body: Buffer, mode: PutMode) -> Stored | Refused:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        await self._turn(key)
        with self._lock:
            there = self._objects.get(key)
            if isinstance(mode, Create) and there is not None:
                return REFUSED
            if isinstance(mode, Update) and (there is None or there[1].etag != mode.etag):
                return REFUSED
            return Stored(self._store(key, bytes(body)).etag)

    async def copy(self, source: str, target: str) -> bool:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        check_key(source)
        if source == target:
            raise Invalid(f"copy {source}: source and target are one object, which S3 refuses")
        await self._turn(target)
        with self._lock:
            found = self._objects.get(source)
            if found is not None:
                self._store(target, found[0])
        return found is not None

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """See :class:`kvstore.objects.base.ObjectStore`. In byte order, as S3 does it."""
        while True:
            await self._turn()
            with self._lock:
                keys = sorted(k for k in self._objects if k.startswith(prefix) and k > start_after)
                page = [self._objects[key][1] for key in keys[:PAGE]]
            if page:
                yield page
            if len(keys) <= PAGE:
                return
            start_after = page[-1].key

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        await self._turn(*keys)
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)
        return []

    async def now(self) -> float:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        await self._turn()
        return self._clock.now()

    async def aclose(self) -> None:
        """Refuse further calls; the objects stay, for whoever opens the same name."""
        self._closed = True

    async def _turn(self, *keys: str) -> None:
        for key in keys:
            check_key(key)
        await asyncio.sleep(0)
        if self._closed:
            raise Closed("this store was closed")

    async def _find(self, key: str) -> tuple[bytes, ObjectMeta] | None:
        await self._turn(key)
        with self._lock:
            return self._objects.get(key)

    def _store(self, key: str, body: bytes) -> ObjectMeta:
        # A digest of the content, as on real stores: put A, put B, put A again and the first ETag is back.
        etag = f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'
        meta = ObjectMeta(key, len(body), etag, self._clock.now())
        self._objects[key] = (body, meta)
        return meta
