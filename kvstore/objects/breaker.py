"""A circuit breaker: a store that does not answer is left alone for a while, and nobody waits for it meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, Self, TypeVar

import msgspec

from kvstore.clock import Clock, Ids
from kvstore.errors import Closed, KVTierError, Overloaded, Unavailable
from kvstore.objects.base import Absent, Arrived, Buffer, Got, ObjectMeta, ObjectStore, PutMode, Refused, Stored, Unchanged

log = logging.getLogger(__name__)
_T = TypeVar("_T")
COUNTED: Final = frozenset({"unavailable", "timeout", "store_busy"})
"""What speaks against a store. A 404, a 412 or a 403 does not: it answers."""

State = Literal["closed", "open", "half_open"]


class BreakerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When to give a store up, and for how long.

    Attributes:
        consecutive: So many failures without any answer in between open it.
        window: Outcomes that are remembered.
        ratio: It opens when that part of a full window failed.
        silence_s: A request given up by its caller counts as failed once nothing was answered for so long.
        first_s: Longest pause before the first probe; it doubles from there, and each is jittered.
        longest_s: Longest pause between probes.
    """

    consecutive: int = 5
    window: int = 20
    ratio: float = 0.5
    silence_s: float = 5.0
    first_s: float = 1.0
    longest_s: float = 15.0


class Breaker:
    """Judges one origin by its answers. It does no I/O and starts nothing: whoever sends requests reports to it.

    Attributes:
        state: `closed`: requests pass. `open`: none does. `half_open`: one probe is under way, and nothing else passes.
        opened: How often it opened.
        refused: Requests that were not sent because of it.
        why: The failure that opened it last.
    """

    def __init__(self, clock: Clock, ids: Ids, settings: BreakerSettings | None = None) -> None:
        self._clock, self._ids, self._settings = clock, ids, settings or BreakerSettings()
        self.state: State = "closed"
        self.opened = self.refused = 0
        self.why = ""
        self._since = 0.0
        self._in_a_row = 0
        self._outcomes: deque[bool] = deque(maxlen=self._settings.window)
        self._asked_since: float | None = None  # the oldest request since the last answer
        self._pause = self._settings.first_s
        self._opening: asyncio.Future[None] | None = None

    def admit(self) -> None:
        """A request is about to be sent.

        Raises:
            Unavailable: kind `circuit_open`: it must not be.
        """
        if self.state != "closed":
            self.refused += 1
            raise self.refusal()
        if self._asked_since is None:
            self._asked_since = self._clock.monotonic()

    def refusal(self) -> Unavailable:
        """What to raise instead of sending a request, or of waiting on for its answer."""
        return Unavailable(f"the store is left alone: {self.why}", kind="circuit_open")

    def opening(self) -> asyncio.Future[None]:
        """Ends when the breaker opens the next time. It is everybody's: do not cancel it."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_future()
        return self._opening

    async def rest(self, seconds: float) -> None:
        """Wait so long before a retry, unless it is open or opens: then there is nothing to wait for."""
        if self.state != "closed":
            return
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait((sleeping, self.opening()), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()

    def answered(self, error: KVTierError | None = None) -> None:
        """A request ended, well or with an error. What was sent before it opened changes nothing any more."""
        if isinstance(error, Overloaded | Closed):
            return  # of our own making: it was not sent
        self._asked_since = None
        if error is not None and error.kind in COUNTED:
            self._failed(f"{error.kind}: {error.message}")
        elif self.state == "closed":
            self._in_a_row = 0
            self._outcomes.append(True)

    def abandoned(self) -> None:
        """A caller gave a request up before its answer. That alone says little; after a long silence it says enough."""
        silence = 0.0 if self._asked_since is None else self._clock.monotonic() - self._asked_since
        if silence >= self._settings.silence_s:
            self._failed(f"timeout: nothing was answered for {silence:.0f} s")

    def pause(self) -> float:
        """Seconds to wait before the next probe; longer each time."""
        longest, self._pause = self._pause, min(self._settings.longest_s, 2 * self._pause)
        return longest * (0.5 + self._ids.jitter() / 2)

    async def probe(self, attempt: Callable[[], Awaitable[object]]) -> None:
        """Half-open: one request decides whether it closes."""
        self.state = "half_open"
        try:
            await attempt()
        except KVTierError as error:
            if error.kind in COUNTED:
                self.state, self.why = "open", f"{error.kind}: {error.message}"
                return
        except BaseException:
            self.state = "open"
            raise
        log.info("the store answers again after %.1f s", self._clock.monotonic() - self._since)
        self.state, self._in_a_row, self._asked_since = "closed", 0, None
        self._pause = self._settings.first_s
        self._outcomes.clear()

    def reason(self) -> str:
        """Why requests are refused now; "" while they pass."""
        if self.state == "closed":
            return ""
        return f"{self.state} for {self._clock.monotonic() - self._since:.0f} s, {self.refused} requests refused so far: {self.why}"

    def _failed(self, why: str) -> None:
        if self.state != "closed":
            return
        self._in_a_row += 1
        self._outcomes.append(False)
        full = len(self._outcomes) == self._settings.window
        if self._in_a_row >= self._settings.consecutive or (
            full and self._outcomes.count(False) >= self._settings.ratio * self._settings.window
        ):
            log.warning("the store is left alone: %s", why)
            self.state, self.why, self._since = "open", why, self._clock.monotonic()
            self.opened += 1
            if self._opening is not None:
                self._opening.set_result(None)
                self._opening = None


class _Read:
    """A read under way that a breaker may cut short."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.was_cut = self.over = False

    def cut(self, _: object) -> None:
        if not self.over:
            self.was_cut = True
            self._task.cancel()


class BreakingStore:
    """A store behind a breaker. See :class:`kvstore.objects.base.ObjectStore`.

    While the breaker is open every call raises `Unavailable` (kind `circuit_open`) at once, and nothing is sent but probes: a HEAD
    now and then, on nobody's behalf, so that no caller pays for finding out. Reads under way when it opens end in the same way:
    whoever waits for one has better things to do. Writes are left to their real end.

    Args:
        store: What to ask.
        breaker: Judges it. Several wrappers, one after the other, may share it.
        clock: For the pauses between probes.
        probe_key: What a probe asks for; any answer about it will do.
        told: Told how each request ended that was sent: its error, or None.
    """

    def __init__(
        self, store: ObjectStore, breaker: Breaker, clock: Clock, probe_key: str, told: Callable[[KVTierError | None], None]
    ) -> None:
        self._store, self._breaker, self._clock, self._probe_key, self._told = store, breaker, clock, probe_key, told
        self._probing: asyncio.Task[None] | None = None
        self._over = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        store: ObjectStore,
        breaker: Breaker,
        clock: Clock,
        probe_key: str,
        told: Callable[[KVTierError | None], None] = lambda _: None,
    ) -> AsyncIterator[Self]:
        """Wrap a store for as long as the block lasts; whoever opened the store closes it."""
        wrapper = cls(store, breaker, clock, probe_key, told)
        wrapper._watch()
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
    ) -> Got | Absent | Unchanged:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._through(
            lambda: self._cut_short(self._store.get(key, range=range, into=into, if_none_match=if_none_match, arrived=arrived))
        )

    async def head(self, key: str) -> ObjectMeta | Absent:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._through(lambda: self._cut_short(self._store.head(key)))

    async def put(self, key: str, body: Buffer, mode: PutMode) -> Stored | Refused:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._through(lambda: self._store.put(key, body, mode))

    async def copy(self, source: str, target: str) -> bool:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._through(lambda: self._store.copy(source, target))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        pages = self._store.list(prefix, start_after=start_after)
        while (page := await self._through(lambda: anext(pages, None))) is not None:
            yield page

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._through(lambda: self._store.delete(keys))

    async def now(self) -> float:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._through(self._store.now)

    async def aclose(self) -> None:
        """Stop probing, and close the store below."""
        await self._stop()
        await self._store.aclose()

    async def _through(self, call: Callable[[], Awaitable[_T]]) -> _T:
        self._breaker.admit()
        try:
            value = await call()
        except KVTierError as error:
            self._judge(error)
            raise
        except asyncio.CancelledError:
            self._breaker.abandoned()
            self._watch()
            raise
        self._judge(None)
        return value

    async def _cut_short(self, reading: Awaitable[_T]) -> _T:
        """A read's outcome, unless the breaker opens first. Either way the read has really ended, and its memory is free.

        It is cancelled from within its own task: a task for every read would cost more than all else here.
        """
        task, opening = asyncio.current_task(), self._breaker.opening()
        assert task is not None
        state = _Read(task)
        opening.add_done_callback(state.cut)
        try:
            return await reading
        except asyncio.CancelledError:
            if state.was_cut and not task.cancelling() - 1:
                raise self._breaker.refusal() from None
            raise
        finally:
            state.over = True
            opening.remove_done_callback(state.cut)
            if state.was_cut:
                task.uncancel()

    def _judge(self, error: KVTierError | None) -> None:
        self._breaker.answered(error)
        self._told(error)
        self._watch()

    def _watch(self) -> None:
        if self._breaker.state != "closed" and self._probing is None and not self._over:
            self._probing = asyncio.create_task(self._probe(), name="breaker")
            self._probing.add_done_callback(self._probed)

    def _probed(self, task: asyncio.Task[None]) -> None:
        self._probing = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("probing the store failed", exc_info=error)

    async def _probe(self) -> None:
        while self._breaker.state != "closed":
            await self._clock.sleep(self._breaker.pause())
            await self._breaker.probe(lambda: self._store.head(self._probe_key))

    async def _stop(self) -> None:
        self._over = True
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait((self._probing,))
