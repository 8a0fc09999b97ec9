"""A store whose large reads are several at once: one block comes faster, and its first layers are there sooner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from kvstore.errors import Corrupt
from kvstore.objects.answers import no_answer
from kvstore.objects.base import Absent, Arrived, Got, ObjectStore, Unchanged
from kvstore.objects.passing import PassingStore

PART: Final = 8 << 20
"""Ranges start at multiples of so many bytes, where stores cut objects, too: a range across such a cut costs a store more.

Objects of less than two of them are read whole: a request costs money and, far away, a round trip.
"""
_WIDE: Final = 8  # requests of large reads: with that many under way, connections have enough to do, and another adds whole reads


class RangedStore(PassingStore):
    """Reads whole large objects by ranges, side by side. See :class:`kvstore.objects.base.ObjectStore`.

    Each range is a request of its own to everything below: counted, hedged and tried again alone. They are of one version of the
    object, or there is no answer. The more large reads are under way, the fewer ranges another is cut into: the first of many
    blocks comes fast, and the others keep the connections busy as they are.

    Args:
        store: What to ask; this wrapper closes it.
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self._under_way = 0

    async def get(
        self,
        key: str,
        *,
        range: tuple[int, int] | None = None,  # noqa: A002  the contract's own name
        into: memoryview | None = None,
        if_none_match: str | None = None,
        arrived: Arrived | None = None,
    ) -> Got | Absent | Unchanged:
        """See :class:`kvstore.objects.base.ObjectStore`. Give `into` the object's length where it is known."""
        if into is None or range is not None or if_none_match is not None or into.nbytes < 2 * PART:
            return await self._store.get(key, range=range, into=into, if_none_match=if_none_match, arrived=arrived)
        target = into.cast("B")
        cut = spans(len(target), max(1, _WIDE // (self._under_way + 1)))
        self._under_way += len(cut)
        try:
            if len(cut) == 1:
                return await self._store.get(key, into=into, arrived=arrived)
            return await self._by_ranges(key, target, cut, arrived)
        finally:
            self._under_way -= len(cut)

    async def _by_ranges(
        self, key: str, target: memoryview, cut: Sequence[tuple[int, int]], arrived: Arrived | None
    ) -> Got | Absent | Unchanged:
        parts = [asyncio.create_task(self._part(key, target, span, arrived)) for span in cut]
        try:
            answers = await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)  # nobody writes into `into` any more
        return _joined(key, target, answers)

    async def _part(self, key: str, target: memoryview, span: tuple[int, int], arrived: Arrived | None) -> Got | Absent | Unchanged:
        first, last = span
        told = False

        def here(start: int, end: int) -> None:
            nonlocal told
            assert arrived is not None
            if end > start:
                told = True
                arrived(first + start, first + end)
            elif told:  # it begins again, and of the others nobody keeps count
                arrived(0, 0)

        return await self._store.get(key, range=span, into=target[first:last], arrived=None if arrived is None else here)


def spans(nbytes: int, most: int) -> list[tuple[int, int]]:
    """At most so many ranges, in order; the last one takes what is left."""
    whole = max(1, nbytes // PART)
    each = -(-whole // min(most, whole)) * PART
    starts = [start for start in range(0, nbytes, each) if start == 0 or nbytes - start >= PART]
    return list(pairwise([*starts, nbytes]))


def _joined(key: str, target: memoryview, answers: Sequence[Got | Absent | Unchanged]) -> Got | Absent | Unchanged:
    first = answers[0]
    if not isinstance(first, Got):
        return first
    if any(not isinstance(answer, Got) or answer.etag != first.etag for answer in answers):
        raise no_answer(f"GET {key}", "the object changed while it was read")
    if first.size > len(target):
        raise Corrupt(f"GET {key}: {first.size} bytes where at most {len(target)} were expected")
    return Got(target[: first.size], first.etag, first.size, first.modified)
