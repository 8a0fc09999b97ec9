"""The hierarchy: memory, then disk, then origins. Reads go down and promote; writes are taken in memory and go down behind."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Self

import msgspec

from tiering.behind import WriteBehind
from tiering.dram import DramSlot, DramTier
from tiering.flight import Flights
from tiering.movers import settled
from tiering.stats import TierStats
from tiering.tier import Lease, Miss, Origin, Want

if TYPE_CHECKING:
    from tiering.disk import DiskTier

_log = logging.getLogger("tiering.stack")

# Which of several misses to report: the one that leaves most hope.
_HOPE = (Miss.ABSENT, Miss.CORRUPT, Miss.UNAVAILABLE)


class Reach(enum.Enum):
    """How far down a look-up may go."""

    DRAM = "dram"
    DISK = "disk"
    ORIGIN = "origin"


class StackSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a hierarchy.

    Attributes:
        fetches: Values that one look-up fetches at once.
        behind_bytes: Bytes of values waiting for one target (the disk, or one origin). They stay leased in memory, so half the
            memory tier is a bound too.
        writers: Values written to one target at once.
        drain_s: Seconds that closing gives to what was accepted.
        linger: Fetches that go on when nobody waits for them any more, so that a slow origin asked with short deadlines still warms
            the memory.
        linger_bytes: Of those fetches; a quarter of the memory tier is a bound too.
    """

    fetches: int = 16
    behind_bytes: int = 256 << 20
    writers: int = 8
    drain_s: float = 10.0
    linger: int = 64
    linger_bytes: int = 64 << 20


class Stack:
    """Read-through over one memory tier, at most one disk tier, and origins in order of preference.

    It belongs to one event loop; only `locate` may be called from any thread. It opens and closes none of its parts.

    Attributes:
        dram: The memory tier: every value passes through it.
        disk: The disk tier, if any. Several stacks may share one.
        origins: Where values come from that no tier has.
        stats: Counters of each part, by its name.
    """

    def __init__(
        self,
        dram: DramTier,
        disk: DiskTier | None,
        origins: Sequence[Origin],
        settings: StackSettings,
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self.dram = dram
        self.disk = disk
        self.origins = tuple(origins)
        self._settings = settings
        self._monotonic = monotonic
        self.stats: Mapping[str, TierStats] = {
            dram.name: dram.stats,
            **({disk.name: disk.stats} if disk is not None else {}),
            **{origin.name: TierStats() for origin in origins},
        }
        if len(self.stats) != 1 + (disk is not None) + len(self.origins):
            raise ValueError("tiers and origins need names of their own")
        self._flights: Flights[Lease | Miss] = Flights(
            _release, linger=settings.linger, linger_cost=min(settings.linger_bytes, dram.limit // 4)
        )
        self._to_disk = self._behind(disk.name, self._write_disk, _always) if disk is not None else None
        self._queues = [self._behind(origin.name, partial(self._offer, origin), origin.ready) for origin in origins]
        if self._to_disk is not None:
            self._queues.insert(0, self._to_disk)
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        dram: DramTier,
        disk: DiskTier | None = None,
        origins: Sequence[Origin] = (),
        settings: StackSettings | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> AsyncIterator[Self]:
        """Put parts together, for as long as the block lasts.

        Args:
            dram: Open.
            disk: Open.
            origins: Asked in this order.
            settings: Bounds.
            monotonic: The clock of deadlines.

        Raises:
            ValueError: Two parts have one name.
        """
        stack = cls(dram, disk, origins, settings or StackSettings(), monotonic=monotonic)
        try:
            yield stack
        finally:
            await stack.aclose()

    @property
    def queued(self) -> dict[str, int]:
        """Bytes waiting to be written, by target."""
        return {queue.name: queue.queued for queue in self._queues}

    @property
    def overflows(self) -> int:
        """How often a queue was full, and a value was dropped for it."""
        return sum(queue.overflows for queue in self._queues)

    def locate(self, keys: Sequence[bytes]) -> list[str | None]:
        """Name of the fastest tier that has each key now; origins are not asked."""
        where: list[str | None] = [self.dram.name if here else None for here in self.dram.contains_many(keys)]
        if self.disk is not None:
            for i, here in enumerate(self.disk.contains_many(keys)):
                if here and where[i] is None:
                    where[i] = self.disk.name
        return where

    async def get_many(
        self,
        wants: Sequence[Want],
        *,
        deadline: float | None = None,
        stop_at_miss: bool = True,
        reach: Reach = Reach.ORIGIN,
        ahead: bool = False,
    ) -> list[Lease | Miss]:
        """Lease each value in memory, fetching what is not there; `Lease.source` says where it was found.

        Room is reserved before a lower tier is asked: ask origins only for what they are believed to have.

        Args:
            wants: In prefix order; fetches start in this order.
            deadline: A point on the monotonic clock. What has not arrived by then is TIMEOUT. Its fetch goes on alone, within the
                bounds of `StackSettings.linger`; one whose caller was cancelled does not.
            stop_at_miss: The answer ends with the first miss, and nothing behind it stays leased or is fetched any further.
            reach: How far down to look.
            ahead: Nobody wants the values yet. They make room only by evicting what was not used lately, and are not used by this.

        Returns:
            In the order asked. Whoever gets a lease releases it.
        """
        found: list[Lease | Miss] = []
        try:
            found = self.dram.lease_many(wants, use=not ahead)
            missing = [i for i, got in enumerate(found) if got is Miss.ABSENT]
            if missing and reach is not Reach.DRAM and not self._closed:
                await self._fill(wants, found, missing, deadline=deadline, stop_at_miss=stop_at_miss, reach=reach, ahead=ahead)
            if stop_at_miss:
                end = next((i + 1 for i, got in enumerate(found) if isinstance(got, Miss)), len(found))
                for got in found[end:]:
                    _release(got)
                del found[end:]
        except BaseException:
            for got in found:
                _release(got)
            raise
        return found

    def reserve(self, want: Want) -> DramSlot | Miss:
        """Room in memory for a value that somebody is about to write; then `publish` it, or abort it."""
        return self.dram.reserve(want)

    def publish(self, slot: DramSlot) -> Lease:
        """The value is complete: make it visible, and write it behind to the disk and all origins.

        Raises:
            ValueError: The slot was ended before.
            TierClosed: The memory tier is closed.
        """
        lease = slot.commit()
        self.offer(slot.want)
        return lease

    def offer(self, want: Want) -> bool:
        """Write a value that is in memory behind, to the disk and all origins.

        Returns:
            False where it is not in memory, or did not fit one of the queues.
        """
        accepted = True
        for queue in self._queues:
            lease = self.dram.lease(want)
            accepted &= isinstance(lease, Lease) and queue.put(want, lease)
        return accepted

    async def flush(self, wants: Sequence[Want], *, deadline: float | None = None) -> list[bool]:
        """Bring these values to the disk; which of them are durably there when this returns.

        What was dropped on its way is written now, from memory. To keep eviction from undoing it, `disk.hold` the keys first.

        Args:
            wants: What to make durable.
            deadline: A point on the monotonic clock.
        """
        disk, to_disk = self.disk, self._to_disk
        if disk is None or to_disk is None:
            return [False] * len(wants)
        keys = [want.key for want in wants]
        try:
            async with asyncio.timeout(self._left(deadline)):
                await to_disk.wait(keys)
                for start in range(0, len(wants), self._settings.writers):
                    await self._write_missing(disk, wants[start : start + self._settings.writers])
                return await disk.flush(keys)
        except TimeoutError:
            return disk.contains_many(keys)

    def discard_many(self, keys: Sequence[bytes]) -> int:
        """Forget these values in every tier, unless they are in use there; how many copies went."""
        return self.dram.discard_many(keys) + (self.disk.discard_many(keys) if self.disk is not None else 0)

    async def aclose(self) -> None:
        """Cancel what is being fetched, write what was accepted, within `drain_s`, and stop."""
        self._closed = True
        await self._flights.aclose()
        await asyncio.gather(*(queue.aclose(self._settings.drain_s) for queue in self._queues))

    # Reading

    async def _fill(
        self,
        wants: Sequence[Want],
        found: list[Lease | Miss],
        missing: Sequence[int],
        *,
        deadline: float | None,
        stop_at_miss: bool,
        reach: Reach,
        ahead: bool,
    ) -> None:
        """Fetch what is missing, a window at a time, writing each outcome to its place in `found`."""
        end = len(wants)  # nothing from here on is wanted any more
        running: dict[asyncio.Task[Lease | Miss], int] = {}
        todo = iter(missing)
        following = next(todo, end)
        late = False
        try:
            while running or following < end:
                while following < end and len(running) < self._settings.fetches:
                    task = asyncio.create_task(self._get(wants[following], deadline, reach, ahead=ahead))
                    running[task] = following
                    following = next(todo, end)
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    i = running.pop(task)
                    got = found[i] = task.result()
                    late = late or got is Miss.TIMEOUT
                    if stop_at_miss and isinstance(got, Miss):
                        end = min(end, i + 1)
                if end < len(wants) and not late:  # at the deadline the others leave by themselves, and let their fetches linger
                    await _cancel([task for task, i in running.items() if i >= end])
                    running = {task: i for task, i in running.items() if i < end}
        finally:
            await _cancel(list(running))

    async def _get(self, want: Want, deadline: float | None, reach: Reach, *, ahead: bool) -> Lease | Miss:
        if self._left(deadline) == 0.0:
            return Miss.TIMEOUT
        try:
            if not ahead and self._flights.running((want.key, want.size, reach, True)):
                got = await self._land(want, reach, deadline, ahead=True, use=True)
                if got is not Miss.FULL:  # who wants it now may make more room than who was fetching it
                    return got
            under_way = ahead and self._flights.running((want.key, want.size, reach, False))
            return await self._land(want, reach, deadline, ahead=ahead and not under_way, use=not ahead)
        except TimeoutError:
            return Miss.TIMEOUT
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                return Miss.UNAVAILABLE  # not this caller was cancelled: the stack is closing
            raise

    async def _land(self, want: Want, reach: Reach, deadline: float | None, *, ahead: bool, use: bool) -> Lease | Miss:
        """Join the flight for a value, or start it."""
        work, left = partial(self._fetch, want, reach, ahead=ahead), self._left(deadline)
        async with self._flights.join((want.key, want.size, reach, ahead), work, seconds=left, cost=want.size) as fetched:
            if isinstance(fetched, Miss):
                return fetched
            lease = self.dram.lease(want, use=use)
            if isinstance(lease, Lease):
                lease.source = fetched.source
            return lease

    async def _fetch(self, want: Want, reach: Reach, *, ahead: bool) -> Lease | Miss:
        """Bring a value to memory from the first place that has it."""
        lease = self.dram.lease(want)
        if isinstance(lease, Lease):
            return lease  # it came while this fetch was waiting to start
        disk = self.disk if self.disk is not None and self.disk.contains_many([want.key])[0] else None
        origins = [origin for origin in self.origins if reach is Reach.ORIGIN and self._is_ready(origin)]
        nothing = Miss.ABSENT if reach is not Reach.ORIGIN or len(origins) == len(self.origins) else Miss.UNAVAILABLE
        if disk is None and not origins:
            return nothing
        slot = self.dram.reserve(want, ahead=ahead)
        if isinstance(slot, Miss):
            return slot
        misses = [nothing]
        try:
            if disk is not None:
                miss = await disk.read_into(want, slot.padded)
                if miss is None:
                    return _found(slot, disk.name)
                misses.append(miss)
            for origin in origins:
                miss = await self._ask(origin, want, slot.view)
                if miss is None:
                    lease = _found(slot, origin.name)
                    self._keep_on_disk(want)
                    return lease
                misses.append(miss)
        finally:
            slot.abort()
        return max(misses, key=_HOPE.index)

    def _is_ready(self, origin: Origin) -> bool:
        ready = origin.ready()
        if not ready:
            self.stats[origin.name].miss(Miss.UNAVAILABLE)
        return ready

    async def _ask(self, origin: Origin, want: Want, into: memoryview) -> Miss | None:
        stats = self.stats[origin.name]
        started = self._monotonic()
        try:
            miss = await origin.fetch(want, into)
        except Exception as error:  # noqa: BLE001  an origin is foreign code: whatever it raises, it has no answer now
            _log.warning("%s: fetching failed: %r", origin.name, error)
            stats.failed(error)
            miss = Miss.UNAVAILABLE
        if miss is None:
            stats.hit(want.size)
            stats.reads.observe(self._monotonic() - started)
        else:
            stats.miss(miss)
            stats.corruptions += miss is Miss.CORRUPT
        return miss if miss in {None, *_HOPE} else Miss.UNAVAILABLE

    def _left(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - self._monotonic())

    # Writing

    def _behind(self, name: str, write: Callable[[Want, Lease], Awaitable[bool]], ready: Callable[[], bool]) -> WriteBehind:
        settings = self._settings
        limit = min(settings.behind_bytes, self.dram.limit // 2)
        return WriteBehind(name, write, ready, limit=limit, writers=settings.writers, stats=self.stats[name])

    def _keep_on_disk(self, want: Want) -> None:
        lease = self.dram.lease(want) if self._to_disk is not None else Miss.ABSENT
        if self._to_disk is not None and isinstance(lease, Lease):
            self._to_disk.put(want, lease)

    async def _write_disk(self, want: Want, lease: Lease) -> bool:
        assert self.disk is not None
        return (await self.disk.put_many([(want, lease.view)]))[0]

    async def _offer(self, origin: Origin, want: Want, lease: Lease) -> bool:
        kept = await origin.offer(want, lease)
        if kept:
            self.stats[origin.name].bytes_in += want.size
        else:
            self.stats[origin.name].drops += 1
        return kept

    async def _write_missing(self, disk: DiskTier, wants: Sequence[Want]) -> None:
        here = disk.contains_many([want.key for want in wants])
        leases = [self.dram.lease(want) for want, there in zip(wants, here, strict=True) if not there]
        held = [lease for lease in leases if isinstance(lease, Lease)]
        try:
            await disk.put_many([(Want(lease.key, lease.size), lease.view) for lease in held])
        finally:
            for lease in held:
                lease.release()


def _always() -> bool:
    return True


def _found(slot: DramSlot, source: str) -> Lease:
    lease = slot.commit()
    lease.source = source
    return lease


def _release(got: Lease | Miss) -> None:
    if isinstance(got, Lease):
        got.release()


async def _cancel(tasks: Sequence[asyncio.Task[Lease | Miss]]) -> None:
    """Cancel, wait for the end also when cancelled again, and let go of what had arrived by then."""
    if not tasks:
        return
    for task in tasks:
        task.cancel()
    ended = asyncio.gather(*tasks, return_exceptions=True)
    try:
        await settled(ended)
    finally:
        for got in ended.result():
            if isinstance(got, Lease):
                got.release()
