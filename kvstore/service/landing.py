"""What writers have published and the node has yet to take over: copies first, for they free a writer's window; then digests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from kvstore.fairness import Lines
from tiering import Movers

log = logging.getLogger(__name__)
_REST_S: Final = 0.002  # without a write: the burst is over
_BATCH: Final = 8 << 20  # bytes that one visit to a thread copies: enough to make the visit cheap


class Room(Protocol):
    """Where a payload goes; see :class:`kvstore.service.plane.Room`."""

    @property
    def payload(self) -> memoryview:
        """Writable."""
        ...

    async def publish(self) -> bool:
        """Digest it, and make it visible."""
        ...

    def abort(self) -> None:
        """Give the room back."""
        ...


class _Load:
    """Blocks of one publication. `copied` is told, once, that their source is not read any more."""

    __slots__ = ("copied", "copies", "landed", "nbytes", "rooms", "tenant")

    def __init__(
        self, tenant: str, rooms: Sequence[Room], copies: Sequence[Callable[[], None]], copied: Callable[[], None]
    ) -> None:
        self.tenant, self.rooms, self.copies, self.copied = tenant, rooms, copies, copied
        self.nbytes = sum(room.payload.nbytes for room in rooms)
        self.landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Landing:
    """Copies and seals behind the writers' backs.

    On two cores whatever is done meanwhile holds the writer up. So a burst of writes lies where it is, and is copied and digested
    when it is over; its source is copied sooner where it runs out of room. Who asks for one of these blocks meanwhile has it
    copied and digested at once, and waits for it (`settled`). Tenants take turns by bytes, at copies as at digests.

    Args:
        movers: The threads. Half of them work here at a time: the other cores are the writers'.
        unsealed: Bytes that may be copied and not digested yet; beyond them writers are held up by digests too.
    """

    def __init__(self, movers: Movers, unsealed: int) -> None:
        self._movers, self._limit = movers, unsealed
        self._most = max(1, movers.threads // 2)
        self._loads: Lines[_Load] = Lines()
        self._due: dict[str, _Load] = {}  # by tenant: the last that is to be copied without waiting for the end of the burst
        self._copied: Lines[tuple[_Load, Room]] = Lines()
        self._unsealed = 0
        self._reading = 0  # batches that are being copied
        self._pending: dict[str, dict[_Load, int]] = {}  # by tenant: blocks of each load that are not visible yet
        self._queued: Counter[str] = Counter()  # bytes of those loads
        self._working: set[asyncio.Task[None]] = set()
        self._taken = 0.0  # when a load came last
        self._resting: asyncio.TimerHandle | None = None
        self._hurried = 0  # by how many that wait

    @property
    def copying(self) -> bool:
        """Whether a source is being read just now."""
        return self._reading > 0

    def take(
        self,
        tenant: str,
        rooms: Sequence[Room],
        copies: Sequence[Callable[[], None]],
        copied: Callable[[], None],
        *,
        soon: bool = False,
    ) -> None:
        """Take blocks over: `copies` fill the rooms, on threads; then the source is free, and `copied` is called on the loop.

        Args:
            tenant: Whose they are.
            rooms: Where they go.
            copies: Fill the rooms together, in any order or at the same time.
            copied: Told, once, that the source is not read any more.
            soon: The source is running out of room: this is not left for the end of the burst.
        """
        load = _Load(tenant, rooms, copies, copied)
        self._loads.put(tenant, load, cost=load.nbytes)
        self._pending.setdefault(tenant, {})[load] = len(rooms)
        self._queued[tenant] += load.nbytes
        self._taken = time.monotonic()
        if soon:
            self._due[tenant] = load
        self._start()

    def pending(self, tenant: str) -> bool:
        """Whether blocks of a tenant are on their way."""
        return tenant in self._pending

    def queued(self, tenant: str) -> int:
        """Bytes of a tenant that are not visible yet."""
        return self._queued[tenant]

    async def settled(self, tenant: str, seconds: float | None = None) -> None:
        """Wait until what a tenant has published by now is visible, or that long."""
        await self._wait([load.landed for load in self._pending.get(tenant, ())], seconds)

    async def aclose(self) -> None:
        """Land what was taken."""
        await self._wait([load.landed for loads in self._pending.values() for load in loads], None)
        while self._working:
            await asyncio.wait(self._working)

    async def _wait(self, landings: Sequence[asyncio.Future[None]], seconds: float | None) -> None:
        if not landings:
            return
        self._hurried += 1
        try:
            self._start()
            await asyncio.wait(landings, timeout=seconds)
        finally:
            self._hurried -= 1

    def _start(self) -> None:
        if len(self._working) < self._most:
            worker = asyncio.create_task(self._work())
            self._working.add(worker)

    async def _work(self) -> None:
        me = cast("asyncio.Task[None]", asyncio.current_task())  # asked now: in the end there may be no loop any more
        try:
            await self._work_off()
        finally:  # not by a callback: what is taken before that is called would find nobody
            self._working.discard(me)

    async def _work_off(self) -> None:
        copied = False
        while True:
            copies = self._loads and self._unsealed < self._limit and (self._due or self._calm())
            if copies and not (copied and self._copied and len(self._pending) > 1):
                await self._copy()
                copied = True  # where tenants meet, a digest is next: whose blocks are copied waits for no more of others' copies
            elif self._copied and (copies or self._calm()):
                await self._seal(*self._copied.take())
                copied = False
            else:
                return

    def _calm(self) -> bool:
        """Whether nobody is writing just now; otherwise there is a look later."""
        if self._hurried or self._unsealed >= self._limit or time.monotonic() - self._taken > _REST_S:
            return True
        if self._resting is None:
            self._resting = asyncio.get_running_loop().call_later(_REST_S, self._rested)
        return False

    def _rested(self) -> None:
        self._resting = None
        self._start()

    async def _copy(self) -> None:
        """Copy the loads that come next, a batch of them in one visit to a thread."""
        batch, nbytes = [self._loads.take()], 0
        while self._loads and (nbytes := nbytes + batch[-1].nbytes) < _BATCH:
            batch.append(self._loads.take())
        for load in batch if self._due else ():
            if self._due.get(load.tenant) is load:
                del self._due[load.tenant]
        self._unsealed += sum(load.nbytes for load in batch)
        self._reading += 1
        try:
            failed = await self._failed(batch)
            for load in failed:
                self._drop(load)
        finally:
            self._reading -= 1
            for load in batch:
                load.copied()
        for load in batch:
            if load not in failed:
                for room in load.rooms:
                    self._copied.put(load.tenant, (load, room), cost=room.payload.nbytes)

    async def _failed(self, batch: Sequence[_Load]) -> set[_Load]:
        """Copy these; those that could not be."""
        try:
            if len(batch) > 1:
                return await self._movers.run(_copy_each, batch)
            async with asyncio.TaskGroup() as parts:  # large: its writer is about to wait for it, and leaves a core meanwhile
                for copy in batch[0].copies:
                    parts.create_task(self._movers.run(copy))  # the group ends when all of them have, as `run` does
        except Exception:
            log.exception("published blocks could not be copied")
            return set(batch)
        return set()

    async def _seal(self, load: _Load, room: Room) -> None:
        nbytes = room.payload.nbytes
        try:
            await room.publish()
        except Exception:
            log.exception("a published block was dropped")
        finally:
            self._unsealed -= nbytes
            self._done(load, 1)

    def _drop(self, load: _Load) -> None:
        for room in load.rooms:
            room.abort()
        self._unsealed -= load.nbytes
        self._done(load, len(load.rooms))

    def _done(self, load: _Load, blocks: int) -> None:
        loads = self._pending[load.tenant]
        loads[load] -= blocks
        if not loads[load]:
            del loads[load]
            self._queued[load.tenant] -= load.nbytes
            if not loads:
                del self._pending[load.tenant], self._queued[load.tenant]
            load.landed.set_result(None)


def _copy_each(batch: Sequence[_Load]) -> set[_Load]:
    """Copy loads one after the other, whatever becomes of one of them: others in the batch are not its writer's."""
    failed: set[_Load] = set()
    for load in batch:
        try:
            for copy in load.copies:
                copy()
        except Exception:
            log.exception("published blocks could not be copied")
            failed.add(load)
    return failed
