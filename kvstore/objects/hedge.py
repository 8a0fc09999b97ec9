"""A second GET where the first one is slower than nineteen of twenty: it cuts the tail, for a bounded number of extra requests."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from math import ceil
from typing import Any, Final, Self, TypeAlias

import msgspec
import numpy as np

from kvstore.clock import Clock
from kvstore.errors import Unavailable
from kvstore.objects.base import Absent, Arrived, Got, ObjectStore, Unchanged
from kvstore.objects.passing import PassingStore
from kvstore.objects.sockets import until_over

Answer: TypeAlias = Got | Absent | Unchanged
_STEP: Final = 1 << 20  # bytes copied between two turns of the event loop


class HedgeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much a shorter tail may cost.

    Attributes:
        quantile: A GET slower than this part of its size class is asked for again.
        samples: Answers of a class to have seen before.
        kept: Answers of a class that are remembered.
        share: Extra requests for each GET, at most, over time.
        saved: Extra requests that GETs without trouble save up.
        least_s: No GET is asked for again sooner.
        bytes: Of all second GETs at one time.
    """

    quantile: float = 0.95
    samples: int = 20
    kept: int = 128
    share: float = 0.05
    saved: float = 4.0
    least_s: float = 0.02
    bytes: int = 64 << 20


class HedgingStore(PassingStore):
    """A store whose slow reads are asked for twice. See :class:`kvstore.objects.base.ObjectStore`.

    Only reads into the caller's memory: their size tells what is slow. The second GET fills memory of its own; if it wins, the
    first one is cancelled and has really ended before the bytes are copied over, so nobody writes into the caller's memory later.

    Args:
        store: What to ask.
        clock: Measures and waits.
        counts: `sent` and `won` second GETs are counted here.
        settings: Bounds.
    """

    def __init__(self, store: ObjectStore, clock: Clock, counts: Counter[str], settings: HedgeSettings | None = None) -> None:
        super().__init__(store)
        self._clock, self._counts = clock, counts
        self._settings = settings or HedgeSettings()
        self._seen: dict[int, _Latencies] = {}
        self._left = 0.0
        self._bytes = 0
        self._losers: set[asyncio.Task[Answer]] = set()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, store: ObjectStore, clock: Clock, counts: Counter[str], settings: HedgeSettings | None = None
    ) -> AsyncIterator[Self]:
        """Wrap a store for as long as the block lasts; whoever opened the store closes it."""
        wrapper = cls(store, clock, counts, settings)
        try:
            yield wrapper
        finally:
            await wrapper._stop()

    async def get(
        self,
        key: str,
        *,
        range: tuple[int, int] | None = None,  # noqa: A002  the contract's own name
        into: memoryview | None = None,
        if_none_match: str | None = None,
        arrived: Arrived | None = None,
    ) -> Answer:
        """See :class:`kvstore.objects.base.ObjectStore`."""

        def ask(target: memoryview | None) -> Coroutine[Any, Any, Answer]:
            told = arrived if target is into else None  # of the second GET, nobody knows yet whether it will be the answer
            return self._store.get(key, range=range, into=target, if_none_match=if_none_match, arrived=told)

        if into is None or into.nbytes == 0:
            return await ask(into)
        self._left = min(self._settings.saved, self._left + self._settings.share)
        size = into.nbytes if range is None else min(into.nbytes, range[1] - range[0])
        latencies = self._seen.setdefault(size.bit_length(), _Latencies(self._settings))
        begun, slow = self._clock.monotonic(), latencies.slow()
        answer = await (ask(into) if slow is None else self._raced(ask, into, slow, arrived))
        if isinstance(answer, Got):
            latencies.observe(self._clock.monotonic() - begun)
        return answer

    async def aclose(self) -> None:
        """End second GETs under way, and close the store below."""
        await self._stop()
        await self._store.aclose()

    async def _raced(
        self,
        ask: Callable[[memoryview | None], Coroutine[Any, Any, Answer]],
        into: memoryview,
        slow: float,
        arrived: Arrived | None,
    ) -> Answer:
        first, second = asyncio.create_task(ask(into)), None
        try:
            await self._patience(first, slow)
            if not first.done() and self._may(into.nbytes):
                second = self._hedge(ask(np.empty(into.nbytes, np.uint8).data), into.nbytes)
                running = {first, second}
                while running and (not first.done() or _lost(first)) and not _answered(second):
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if (not first.done() or _lost(first)) and _answered(second):
                    await _end(first)
                    if _lost(first):  # else its answer came in this very moment, and is in place
                        self._counts["won"] += 1
                        if arrived is not None:
                            arrived(0, 0)
                        return await _copied(second.result(), into)
            await asyncio.wait((first,))
            return first.result()
        finally:
            if second is not None:
                second.cancel()
            await _end(first)

    async def _patience(self, first: asyncio.Task[Answer], slow: float) -> None:
        """Wait for the first GET, or until it is slow."""
        timer = asyncio.ensure_future(self._clock.sleep(slow))
        try:
            await asyncio.wait((first, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()

    def _may(self, nbytes: int) -> bool:
        if self._left < 1 or self._bytes + nbytes > self._settings.bytes:
            return False
        self._left -= 1
        return True

    def _hedge(self, asking: Coroutine[Any, Any, Answer], nbytes: int) -> asyncio.Task[Answer]:
        """Start a second GET; its memory is its own, so whoever needs it no more cancels it and leaves."""
        task = asyncio.create_task(asking)
        self._counts["sent"] += 1
        self._bytes += nbytes
        self._losers.add(task)

        def over(_: asyncio.Task[Answer]) -> None:
            self._bytes -= nbytes
            self._losers.discard(task)
            if not task.cancelled():
                task.exception()  # looked at: a loser's error is nobody's concern

        task.add_done_callback(over)
        return task

    async def _stop(self) -> None:
        for task in self._losers:
            task.cancel()
        while self._losers:
            await asyncio.wait(self._losers)


class _Latencies:
    """How long the answers of one size class took."""

    def __init__(self, settings: HedgeSettings) -> None:
        self._settings = settings
        self._seconds: deque[float] = deque(maxlen=settings.kept)
        self._slow: float | None = None
        self._stale = 0

    def observe(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._stale += 1

    def slow(self) -> float | None:
        """From how many seconds on a GET counts as slow; None where too little is known."""
        if len(self._seconds) < self._settings.samples:
            return None
        if self._slow is None or self._stale >= self._settings.samples // 2:  # sorting at every GET would be waste
            ranked = sorted(self._seconds)
            self._slow, self._stale = ranked[ceil(self._settings.quantile * len(ranked)) - 1], 0
        return max(self._settings.least_s, self._slow)


def _answered(task: asyncio.Task[Answer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _lost(task: asyncio.Task[Answer]) -> bool:
    """Over without an answer, in a way that another request may not share."""
    return task.cancelled() or isinstance(task.exception(), Unavailable)


async def _end(task: asyncio.Task[Answer]) -> None:
    """Cancel it, and wait for its real end: then nobody writes into its memory any more."""
    if not task.done():
        task.cancel()
        if await until_over(task):
            raise asyncio.CancelledError
    if not task.cancelled():
        task.exception()  # looked at: its answer came too late


async def _copied(answer: Answer, into: memoryview) -> Answer:
    if not isinstance(answer, Got):
        return answer
    target = into.cast("B")
    for at in range(0, len(answer.data), _STEP):
        target[at : at + _STEP][: len(answer.data) - at] = answer.data[at : at + _STEP]
        await asyncio.sleep(0)
    return msgspec.structs.replace(answer, data=target[: len(answer.data)])
