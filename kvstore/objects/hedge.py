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
        self._races: dict[_Race, None] = {}  # reads under way that are not slow yet, in order
        self._watching: asyncio.Task[None] | None = None
        self._next = 0.0  # when it looks again

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
        """The first GET runs in the caller's own task, and is cancelled from within it: a task for every read would cost more."""
        race = _Race(ask, into.nbytes, self._clock.monotonic() + slow)
        self._watch(race)
        try:
            return await ask(into)
        except (Unavailable, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not race.is_cut_alone:
                raise
            race.end()  # nobody cuts this task from here on
            if race.second is None or not await _comes(race.second):
                raise
            self._counts["won"] += 1
            if arrived is not None:
                arrived(0, 0)
            return await _copied(race.second.result(), into)
        finally:
            race.end()
            if race.second is not None:
                race.second.cancel()
            self._unwatch(race)

    def _watch(self, race: _Race) -> None:
        self._races[race] = None
        if self._watching is None or race.due < self._next:
            self._stop_watching()
            self._watching = asyncio.create_task(self._look_out())

    def _unwatch(self, race: _Race) -> None:
        self._races.pop(race, None)
        if not self._races:
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _look_out(self) -> None:
        """One timer for all reads under way: a second GET for each that has become slow, once."""
        while self._races:
            self._next = min(race.due for race in self._races)
            await self._clock.sleep(max(0.0, self._next - self._clock.monotonic()))
            now = self._clock.monotonic()
            for race in [race for race in self._races if race.due <= now]:
                del self._races[race]
                if self._may(race.nbytes):
                    race.begin(self._hedge(race.ask(np.empty(race.nbytes, np.uint8).data), race.nbytes))
        self._watching = None

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
        self._stop_watching()
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


class _Race:
    """A read in the caller's task, and the second GET for it once it is slow.

    Args:
        ask: Asks for it, into other memory.
        nbytes: Of that memory.
        due: When it is slow, on the monotonic clock.
    """

    def __init__(self, ask: Callable[[memoryview | None], Coroutine[Any, Any, Answer]], nbytes: int, due: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.ask, self.nbytes, self.due = ask, nbytes, due
        self.second: asyncio.Task[Answer] | None = None
        self._task, self._cancelled = task, task.cancelling()
        self._cut = self._over = False

    @property
    def is_cut_alone(self) -> bool:
        """Whether a cancellation of the task came from here and from nowhere else."""
        return self._cut and self._task.cancelling() == self._cancelled + 1

    def begin(self, second: asyncio.Task[Answer]) -> None:
        """It is slow; this is the second GET."""
        self.second = second
        second.add_done_callback(self._answered)

    def end(self) -> None:
        """The first GET is over; its task is not cancelled any more, and does not count as cancelled."""
        if self._cut and not self._over:
            self._task.uncancel()
        self._over = True

    def _answered(self, second: asyncio.Task[Answer]) -> None:
        if not self._over and not second.cancelled() and second.exception() is None:
            self._cut = True
            self._task.cancel()


async def _comes(second: asyncio.Task[Answer]) -> bool:
    """Whether it ends with an answer."""
    await asyncio.wait((second,))
    return not second.cancelled() and second.exception() is None


async def _copied(answer: Answer, into: memoryview) -> Answer:
    if not isinstance(answer, Got):
        return answer
    target = into.cast("B")
    for at in range(0, len(answer.data), _STEP):
        target[at : at + _STEP][: len(answer.data) - at] = answer.data[at : at + _STEP]
        await asyncio.sleep(0)
    return msgspec.structs.replace(answer, data=target[: len(answer.data)])
