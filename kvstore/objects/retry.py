"""The one place where requests are sent again: jittered back-off, a deadline for all attempts together, and a budget.

Only what is safe to repeat: reads, listings, deletions, copies and plain overwrites. A conditional write is never repeated here,
because its second answer does not tell what became of the first; the protocol above resolves that with write ids.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeVar

import msgspec

from kvstore.clock import Clock, Ids
from kvstore.errors import Unavailable
from kvstore.objects.base import (
    Absent,
    Arrived,
    Buffer,
    Got,
    ObjectMeta,
    ObjectStore,
    Overwrite,
    PutMode,
    Refused,
    Stored,
    Unchanged,
)

_T = TypeVar("_T")
_WORTH_IT: Final = frozenset({"unavailable", "timeout", "store_busy", "store_conflict"})


class RetrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient to be.

    Attributes:
        deadline_s: No new attempt starts later than this after the first one.
        first_s: Longest wait before the second attempt; it doubles from there.
        longest_s: Longest wait between attempts.
        saved: Most retries that calls without trouble save up.
    """

    deadline_s: float = 30.0
    first_s: float = 0.1
    longest_s: float = 5.0
    saved: int = 10


class RetryBudget:
    """Each call earns one retry, up to a number saved, so that requests never exceed twice the calls.

    A store in trouble thus sees its load double at worst, however many calls are waiting on it.
    """

    def __init__(self, saved: int) -> None:
        self._saved, self._left = saved, 0

    def earn(self) -> None:
        """A call begins."""
        self._left = min(self._saved, self._left + 1)

    def spend(self) -> bool:
        """Whether one more attempt may be made."""
        if self._left == 0:
            return False
        self._left -= 1
        return True


class RetryingStore:
    """A store that tries again where that is safe. See :class:`kvstore.objects.base.ObjectStore`.

    Args:
        store: What to ask; this wrapper closes it.
        clock: For deadlines and waits.
        ids: For jitter.
        settings: Patience.
        rest: Waits between attempts; by default on `clock`. A breaker's own ends when there is nothing to wait for any more.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        ids: Ids,
        settings: RetrySettings | None = None,
        *,
        rest: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        self._store, self._clock, self._ids = store, clock, ids
        self._settings = settings or RetrySettings()
        self._rest = rest or clock.sleep
        self._budget = RetryBudget(self._settings.saved)

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
        return await self._again(lambda: self._store.get(key, range=range, into=into, if_none_match=if_none_match, arrived=arrived))

    async def head(self, key: str) -> ObjectMeta | Absent:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._again(lambda: self._store.head(key))

    async def put(self, key: str, body: Buffer, mode: PutMode) -> Stored | Refused:
        """See :class:`kvstore.objects.base.ObjectStore`. Sent once, unless it is an `Overwrite`."""
        if isinstance(mode, Overwrite):
            return await self._again(lambda: self._store.put(key, body, mode))
        return await self._store.put(key, body, mode)

    async def copy(self, source: str, target: str) -> bool:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._again(lambda: self._store.copy(source, target))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """See :class:`kvstore.objects.base.ObjectStore`. A page that fails is asked for again, from the last key seen."""
        last, pages = start_after, self._store.list(prefix, start_after=start_after)

        async def page() -> Sequence[ObjectMeta] | None:
            nonlocal pages
            try:
                return await anext(pages, None)
            except Unavailable:
                pages = self._store.list(prefix, start_after=last)  # a generator that raised is over
                raise

        while (found := await self._again(page)) is not None:
            last = found[-1].key
            yield found

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._again(lambda: self._store.delete(keys))

    async def now(self) -> float:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._again(self._store.now)

    async def aclose(self) -> None:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        await self._store.aclose()

    async def _again(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        self._budget.earn()
        end = self._clock.monotonic() + self._settings.deadline_s
        longest = self._settings.first_s
        while True:
            try:
                return await attempt()
            except Unavailable as error:
                pause = self._ids.jitter() * longest
                if error.kind not in _WORTH_IT or self._clock.monotonic() + pause > end or not self._budget.spend():
                    raise
            await self._rest(pause)
            longest = min(self._settings.longest_s, 2 * longest)
