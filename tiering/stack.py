"""The hierarchy: memory, then disk, then origins. Reads go down and promote; writes are taken in memory and go down behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Self

import msgspec

from tiering.behind import Write, WriteBehind
from tiering.dram import DramSlot, DramTier
from tiering.early import Early
from tiering.fetching import Fetcher, Reach
from tiering.flight import Flights
from tiering.lookup import LookUp
from tiering.stats import TierStats
from tiering.tier import Lease, Miss, Origin, Want

if TYPE_CHECKING:
    from tiering.disk import DiskTier

_DISK_BATCH = 1024  # values handed to the disk at once: they share a commit


class StackSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a hierarchy.

    Attributes:
        fetches: Values that one look-up fetches at once.
        behind_bytes: Bytes of values waiting for one target (the disk, or one origin). They stay leased in memory, so half the
            memory tier is a bound too.
        writers: Values offered to one origin at once.
        drain_s: Seconds that closing gives to what was accepted.
        linger: Fetches that go on when nobody waits for them any more, so that a slow origin asked with short deadlines still warms
            the memory.
        linger_bytes: Of those fetches; a quarter of the memory tier is a bound too.
        lenders: Names of origins that lend what they keep themselves. They are offered nothing. What comes from them is not written
            to the disk, and makes way in memory before all else until it is used again.
    """

    fetches: int = 16
    behind_bytes: int = 256 << 20
    writers: int = 8
    drain_s: float = 10.0
    linger: int = 64
    linger_bytes: int = 64 << 20
    lenders: frozenset[str] = frozenset()


class Stack:
    """Read-through over one memory tier, at most one disk tier, and origins in order of preference.

    It belongs to one event loop; only `locate` may be called from any thread. It opens and closes none of its parts.

    Attributes:
        dram: The memory tier: every value passes through it.
        disk: The disk tier, if any. Several stacks may share one.
        origins: Where values come from that no tier has.
        early: Who wants to hear of the first bytes of what comes from them.
        stats: Counters of each part, by its name.
    """

    def __init__(
        self,
        dram: DramTier,
        disk: DiskTier | None,
        origins: Sequence[Origin],
        settings: StackSettings,
        *,
        who: int,
        monotonic: Callable[[], float],
    ) -> None:
        self.dram = dram
        self.disk = disk
        self.origins = tuple(origins)
        self._settings = settings
        self._who = who
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
        self.early = Early()
        self._fetcher = Fetcher(
            dram,
            disk,
            self.origins,
            stats=self.stats,
            keep=self._keep_on_disk,
            early=self.early,
            lenders=settings.lenders,
            who=who,
            monotonic=monotonic,
        )
        self._to_disk = None
        if disk is not None:
            self._to_disk = self._behind(disk.name, partial(self._write_disk, disk), _always, writers=2, batch=_DISK_BATCH)
        self._queues = [
            self._behind(origin.name, partial(self._offer, origin), origin.ready, writers=settings.writers, batch=1)
            for origin in self.origins
            if origin.name not in settings.lenders
        ]
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
        who: int = 0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> AsyncIterator[Self]:
        """Put parts together, for as long as the block lasts.

        Args:
            dram: Open.
            disk: Open.
            origins: Asked in this order.
            settings: Bounds.
            who: Whose it is, among those that share the disk; see :meth:`tiering.DiskTier.open`.
            monotonic: The clock of deadlines.

        Raises:
            ValueError: Two parts have one name.
        """
        stack = cls(dram, disk, origins, settings or StackSettings(), who=who, monotonic=monotonic)
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
        after: Sequence[bytes] = (),
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
            after: Keys that the same request asked for before, in prefix order, where it asks in pieces.

        Returns:
            In the order asked. Whoever gets a lease releases it.
        """
        found: list[Lease | Miss] = []
        try:
            found = self.dram.lease_many(wants, use=not ahead, after=after)
            if self.disk is not None and not ahead:
                self.disk.asked([*after, *(want.key for want in wants)], len(after), who=self._who)
            missing = [i for i, got in enumerate(found) if got is Miss.ABSENT]
            if missing and reach is not Reach.DRAM and not self._closed:
                look_up = LookUp(
                    self.dram,
                    self._flights,
                    self._fetcher,
                    wants,
                    found,
                    deadline=deadline,
                    stop_at_miss=stop_at_miss,
                    reach=reach,
                    ahead=ahead,
                    window=self._settings.fetches,
                    monotonic=self._monotonic,
                )
                await look_up.run(missing)
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

    def asked(self, keys: Sequence[bytes], told: int = 0) -> None:
        """Tell every tier's policy of a request that no look-up tells of, such as a commit; see :class:`tiering.policy.Policy`."""
        self.dram.asked(keys, told)
        if self.disk is not None:
            self.disk.asked(keys, told, who=self._who)

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
                await self._write_missing(disk, wants)
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

    def _left(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - self._monotonic())

    # Writing

    def _behind(self, name: str, write: Write, ready: Callable[[], bool], *, writers: int, batch: int) -> WriteBehind:
        limit = min(self._settings.behind_bytes, self.dram.limit // 2)
        return WriteBehind(name, write, ready, limit=limit, writers=writers, batch=batch, stats=self.stats[name])

    def _keep_on_disk(self, want: Want) -> None:
        lease = self.dram.lease(want) if self._to_disk is not None else Miss.ABSENT
        if self._to_disk is not None and isinstance(lease, Lease):
            self._to_disk.put(want, lease)

    async def _write_disk(self, disk: DiskTier, batch: Sequence[tuple[Want, Lease]]) -> None:
        await disk.put_many([(want, lease.view) for want, lease in batch], who=self._who)

    async def _offer(self, origin: Origin, batch: Sequence[tuple[Want, Lease]]) -> None:
        stats = self.stats[origin.name]
        for want, lease in batch:
            if await origin.offer(want, lease):
                stats.bytes_in += want.size
            else:
                stats.drops += 1

    async def _write_missing(self, disk: DiskTier, wants: Sequence[Want]) -> None:
        here = disk.contains_many([want.key for want in wants])
        leases = [(want, self.dram.lease(want)) for want, there in zip(wants, here, strict=True) if not there]
        held = [(want, lease) for want, lease in leases if isinstance(lease, Lease)]
        try:
            await disk.put_many([(want, lease.view) for want, lease in held], must=True, who=self._who)
        finally:
            for _, lease in held:
                lease.release()


def _always() -> bool:
    return True


def _release(got: Lease | Miss) -> None:
    if isinstance(got, Lease):
        got.release()
