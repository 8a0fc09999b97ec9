"""A store that counts what is asked of it, for stats, metrics and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from kvstore.errors import KVTierError
from kvstore.objects.base import Absent, Arrived, Buffer, Got, ObjectMeta, ObjectStore, PutMode, Refused, Stored, Unchanged

_T = TypeVar("_T")


class CountingStore:
    """Passes everything on. `requests` counts by (verb, outcome): `ok`, `absent`, `refused`, `unchanged`, or an error's kind."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.requests: Counter[tuple[str, str]] = Counter()

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
        return await self._counted(
            "get", self._store.get(key, range=range, into=into, if_none_match=if_none_match, arrived=arrived)
        )

    async def head(self, key: str) -> ObjectMeta | Absent:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._counted("head", self._store.head(key))

    async def put(self, key: str, body: Buffer, mode: PutMode) -> Stored | Refused:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._counted("put", self._store.put(key, body, mode))

    async def copy(self, source: str, target: str) -> bool:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._counted("copy", self._store.copy(source, target))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        try:
            async for page in self._store.list(prefix, start_after=start_after):
                self.requests["list", "ok"] += 1
                yield page
        except KVTierError as error:
            self.requests["list", error.kind] += 1
            raise

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._counted("delete", self._store.delete(keys))

    async def now(self) -> float:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._counted("head", self._store.now())

    async def aclose(self) -> None:
        """Close the store below."""
        await self._store.aclose()

    async def _counted(self, verb: str, answer: Awaitable[_T]) -> _T:
        try:
            value = await answer
        except KVTierError as error:
            self.requests[verb, error.kind] += 1
            raise
        outcome = type(value).__name__.lower() if isinstance(value, Absent | Refused | Unchanged) else "ok"
        self.requests[verb, outcome] += 1
        return value
