"""How a value comes to memory: from the disk by a lane, from an origin by a task."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tiering.dram import DramSlot, DramTier
from tiering.early import Coming, Early
from tiering.flight import Work
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


class Fetcher:
    """Brings values to one memory tier.

    Args:
        dram: Where to.
        disk: Asked first.
        origins: Asked next, in this order.
        stats: Of each, by name.
        keep: Told of a value that came from an origin.
        early: Told of the first bytes of a value that comes from an origin.
        lenders: Names of origins whose values make way first.
        who: For whom it reads: a disk that several hierarchies share serves them in turns.
        monotonic: The clock of latencies.
    """

    def __init__(
        self,
        dram: DramTier,
        disk: DiskTier | None,
        origins: Sequence[Origin],
        *,
        stats: Mapping[str, TierStats],
        keep: Callable[[Want], None],
        early: Early,
        lenders: Container[str] = (),
        who: int,
        monotonic: Callable[[], float],
    ) -> None:
        self.who = who
        self._lenders = lenders
        self._dram, self._disk, self._origins = dram, disk, origins
        self._stats, self._keep, self._early, self._monotonic = stats, keep, early, monotonic

    def begin(self, want: Want, reach: Reach, *, ahead: bool) -> Work[Lease | Miss]:
        """Start to bring one value; see `Stack.get_many`. What is known at once is done when this returns."""
        lease = self._dram.lease(want)
        if isinstance(lease, Lease):
            return _known(lease)  # it came while this fetch was waiting to start
        if self._disk is not None and self._disk.contains_many([want.key])[0]:
            slot = self._dram.reserve(want, ahead=ahead)
            return _known(slot) if isinstance(slot, Miss) else _FromDisk(self, self._disk, slot, reach).work()
        origins, nothing = self._ready(reach)
        if not origins:
            return _known(nothing)
        slot = self._dram.reserve(want, ahead=ahead)
        if isinstance(slot, Miss):
            return _known(slot)
        task = asyncio.create_task(self._from_origins(slot, origins, [nothing]))
        task.add_done_callback(lambda _: slot.abort())  # it may be cancelled before it begins
        return Work(task, task.cancel)

    def beyond_the_disk(self, slot: DramSlot, reach: Reach, miss: Miss) -> asyncio.Task[Lease | Miss] | Miss:
        """The disk had a value, and does not: ask the others, where there are any."""
        origins, nothing = self._ready(reach)
        if not origins:
            return _best([nothing, miss])
        return asyncio.create_task(self._from_origins(slot, origins, [nothing, miss]))

    def _ready(self, reach: Reach) -> tuple[list[Origin], Miss]:
        """Whom to ask, and what the answer is when there is nobody."""
        if reach is not Reach.ORIGIN:
            return [], Miss.ABSENT
        origins = [origin for origin in self._origins if self._is_ready(origin)]
        return origins, Miss.ABSENT if len(origins) == len(self._origins) else Miss.UNAVAILABLE

    def _is_ready(self, origin: Origin) -> bool:
        ready = origin.ready()
        if not ready:
            self._stats[origin.name].miss(Miss.UNAVAILABLE)
        return ready

    async def _from_origins(self, slot: DramSlot, origins: Sequence[Origin], misses: list[Miss]) -> Lease | Miss:
        """From the first that has it. Whoever starts this aborts the slot afterwards."""
        for origin in origins:
            coming = Coming(self._early, slot)
            try:
                miss = await self._ask(origin, slot.want, slot.view, coming)
            finally:
                await coming.drained()
            if miss is None:
                lent = origin.name in self._lenders
                lease = found(slot, origin.name, borrowed=lent)
                if not lent:
                    self._keep(slot.want)
                return lease
            misses.append(miss)
        return _best(misses)

    async def _ask(self, origin: Origin, want: Want, into: memoryview, coming: Coming) -> Miss | None:
        stats = self._stats[origin.name]
        started = self._monotonic()
        try:
            miss = await origin.fetch(want, into, coming.tell)
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
        return miss if miss is None or miss in _HOPE else Miss.UNAVAILABLE


class _FromDisk:
    """A value that a lane reads into its slot: no task, unless the disk fails and others are asked."""

    __slots__ = ("_disk", "_done", "_elsewhere", "_fetcher", "_reach", "_read", "_slot", "_stopped")

    def __init__(self, fetcher: Fetcher, disk: DiskTier, slot: DramSlot, reach: Reach) -> None:
        self._fetcher, self._disk, self._slot, self._reach = fetcher, disk, slot, reach
        self._done: asyncio.Future[Lease | Miss] = asyncio.get_running_loop().create_future()
        self._elsewhere: asyncio.Task[Lease | Miss] | None = None
        self._stopped = False
        self._read = disk.read(slot.want, slot.padded, self._came, who=fetcher.who)
        if isinstance(self._read, Miss):
            self._missed(self._read)

    def work(self) -> Work[Lease | Miss]:
        """To be waited for."""
        return Work(self._done, self._stop)

    def _stop(self) -> None:
        self._stopped = True
        if self._elsewhere is not None:
            self._elsewhere.cancel()
        elif not isinstance(self._read, Miss) and self._disk.withdraw(self._read):
            self._give_up()
        # else the read has begun, and its end is the end: the slot is in use until then

    def _came(self, miss: Miss | None) -> None:
        if self._stopped:
            self._give_up()
        elif miss is not None:
            self._missed(miss)
        else:
            _settle(self._done, partial(found, self._slot, self._disk.name))

    def _missed(self, miss: Miss) -> None:
        elsewhere = self._fetcher.beyond_the_disk(self._slot, self._reach, miss)
        if isinstance(elsewhere, Miss):
            self._slot.abort()
            self._done.set_result(elsewhere)
        else:
            self._elsewhere = elsewhere
            elsewhere.add_done_callback(self._came_from_elsewhere)

    def _came_from_elsewhere(self, task: asyncio.Task[Lease | Miss]) -> None:
        self._slot.abort()
        if task.cancelled():
            self._done.cancel()
        else:
            _settle(self._done, task.result)

    def _give_up(self) -> None:
        self._slot.abort()
        self._done.cancel()


def found(slot: DramSlot, source: str, *, borrowed: bool = False) -> Lease:
    """A slot's value is complete."""
    lease = slot.commit(borrowed=borrowed)
    lease.source = source
    return lease


def _settle(done: asyncio.Future[Lease | Miss], outcome: Callable[[], Lease | Miss]) -> None:
    try:
        done.set_result(outcome())
    except Exception as error:  # noqa: BLE001  it reaches whoever waits
        done.set_exception(error)


def _known(outcome: Lease | Miss) -> Work[Lease | Miss]:
    done: asyncio.Future[Lease | Miss] = asyncio.get_running_loop().create_future()
    done.set_result(outcome)
    return Work(done, lambda: None)


def _best(misses: Sequence[Miss]) -> Miss:
    return max(misses, key=_HOPE.index)
