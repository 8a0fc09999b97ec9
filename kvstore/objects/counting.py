"""A store that counts what is asked of it, for stats, metrics and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from kvstore.accounts import Accounts
from kvstore.errors import KVTierError, Overloaded
from kvstore.objects.base import CREATE, Absent, Arrived, Buffer, Got, ObjectMeta, ObjectStore, PutMode, Refused, Stored, Unchanged
from kvstore.payer import payer

_T = TypeVar("_T")


class CountingStore:
    """Passes everything on. `requests` counts by (verb, outcome): `ok`, `absent`, `refused`, `unchanged`, or an error's kind.

    Args:
        store: What is counted.
        accounts: Where requests and bytes are counted for whom they are made.
    """

    def __init__(self, store: ObjectStore, accounts: Accounts | None = None) -> None:
        self._store, self._accounts = store, accounts or Accounts()
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
        got = await self._counted("get", self._store.get(key, range=range, into=into, if_none_match=if_none_match, arrived=arrived))
        if isinstance(got, Got):
            self._accounts.of(*payer()).fetched += got.data.nbytes
        return got

    async def head(self, key: str) -> ObjectMeta | Absent:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._counted("head", self._store.head(key))

    async def put(self, key: str, body: Buffer, mode: PutMode) -> Stored | Refused:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        answer = await self._counted("put", self._store.put(key, body, mode))
        account, nbytes = self._accounts.of(*payer()), memoryview(body).nbytes
        account.sent += nbytes
        if mode == CREATE and isinstance(answer, Stored):
            account.kept += nbytes
        return answer

    async def copy(self, source: str, target: str) -> bool:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._counted("copy", self._store.copy(source, target))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        try:
            async for page in self._store.list(prefix, start_after=start_after):
                self._count("list", "ok")
                yield page
        except KVTierError as error:
            self._failed("list", error)
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
            self._failed(verb, error)
            raise
        self._count(verb, type(value).__name__.lower() if isinstance(value, Absent | Refused | Unchanged) else "ok")
        return value

    def _count(self, verb: str, outcome: str) -> None:
        self.requests[verb, outcome] += 1
        self._accounts.of(*payer()).requests[verb] += 1

    def _failed(self, verb: str, error: KVTierError) -> None:
        if isinstance(error, Overloaded):  # it waited for its turn in vain, and was not sent
            self.requests[verb, error.kind] += 1
        else:
            self._count(verb, error.kind)
