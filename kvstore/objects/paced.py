"""A store that is asked no faster than agreed: background work that leaves the store's request rate to those who wait for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvstore.clock import Clock
from kvstore.objects.base import Absent, Arrived, Buffer, Got, ObjectMeta, ObjectStore, PutMode, Refused, Stored, Unchanged


class PacedStore:
    """Passes everything on, one request every 1/rate seconds. See :class:`kvstore.objects.base.ObjectStore`.

    A page of a listing and a batch of a deletion are one request each. Callers wait in the order they came.

    Args:
        store: What to ask; this wrapper closes it.
        rate: Requests per second.
        clock: For the waits.
    """

    def __init__(self, store: ObjectStore, rate: float, clock: Clock) -> None:
        self._store, self._gap, self._clock = store, 1 / rate, clock
        self._next = clock.monotonic()

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
        await self._turn()
        return await self._store.get(key, range=range, into=into, if_none_match=if_none_match, arrived=arrived)

    async def head(self, key: str) -> ObjectMeta | Absent:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        await self._turn()
        return await self._store.head(key)

    async def put(self, key: str, body: Buffer, mode: PutMode) -> Stored | Refused:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        await self._turn()
        return await self._store.put(key, body, mode)

    async def copy(self, source: str, target: str) -> bool:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        await self._turn()
        return await self._store.copy(source, target)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        await self._turn()
        async for page in self._store.list(prefix, start_after=start_after):
            yield page
            await self._turn()

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        await self._turn()
        return await self._store.delete(keys)

    async def now(self) -> float:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        await self._turn()
        return await self._store.now()

    async def aclose(self) -> None:
        """Close the store below."""
        await self._store.aclose()

    async def _turn(self) -> None:
        now = self._clock.monotonic()
        mine = max(now, self._next)
        self._next = mine + self._gap
        if mine > now:
            await self._clock.sleep(mine - now)
