"""A store that hands everything to the one below: what wrappers of reads have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvstore.objects.base import Absent, Buffer, ObjectMeta, ObjectStore, PutMode, Refused, Stored


class PassingStore:
    """All of :class:`kvstore.objects.base.ObjectStore` but `get`, which the wrapper is about.

    Args:
        store: What to ask; this wrapper closes it.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def head(self, key: str) -> ObjectMeta | Absent:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._store.head(key)

    async def put(self, key: str, body: Buffer, mode: PutMode) -> Stored | Refused:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._store.put(key, body, mode)

    async def copy(self, source: str, target: str) -> bool:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._store.copy(source, target)

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return self._store.list(prefix, start_after=start_after)

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._store.delete(keys)

    async def now(self) -> float:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._store.now()

    async def aclose(self) -> None:
        """Close the store below."""
        await self._store.aclose()
