"""One peer, as who asks it sees it: what is queued for it, how fast it was, and whether it is left alone."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

import msgspec

from kvstore.clock import Clock
from kvstore.mesh.delivery import Delivery
from kvstore.mesh.frames import MOST_BLOCKS
from kvstore.mesh.link import Link
from kvstore.mesh.members import Member
from tiering import Miss

_WEIGHT: Final = 0.3  # of the newest look at a speed
_LOOK: Final = 1 << 20  # bytes of one
_FIRST_S, _LONGEST_S = 1.0, 15.0  # rests
_BATCH_S: Final = 0.1  # what one request may take
_BATCH: Final = 32 << 20


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How peers are asked.

    Attributes:
        lanes: Requests under way to one peer, of what it has and of what it is to fetch, each.
        inflight: Bytes asked of one peer and not yet come; beyond them another is asked, or the bucket.
        longest_s: As seconds, of the same, where its speed is known.
        tries: Holders asked for one block.
        patience_s: Given to a peer on top of what a block should take: then the next origin is asked.
        slack: Times what a block should take by what was measured.
        through_s: Given to the owner of a block, on top, to fetch it from the bucket.
        unmeasured: Bytes a second of a peer that nothing is known of.
    """

    lanes: int = 2
    inflight: int = 1 << 30
    longest_s: float = 5.0
    tries: int = 3
    patience_s: float = 0.25
    slack: float = 4.0
    through_s: float = 2.0
    unmeasured: float = 100e6


class Rest:
    """Leaves a peer alone that did not answer, longer each time. Then all may ask: a block that waits is a request that waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until, self._pause = 0.0, 0.0

    @property
    def over(self) -> bool:
        """Whether to ask."""
        return self._clock.monotonic() >= self._until

    def answered(self) -> None:
        """It answers."""
        self._pause = 0.0

    def silent(self) -> None:
        """It did not. Several who had asked at the same time count as one."""
        if self.over:
            self._pause = min(_LONGEST_S, 2 * self._pause or _FIRST_S)
            self._until = self._clock.monotonic() + self._pause


class Supplier:
    """Batches what is wanted of one peer, for each of its lanes.

    Args:
        member: Who.
        link: To it.
        settings: Bounds.
        clock: Of its rests.

    Attributes:
        load: Bytes asked for and not yet come.
        speed: Bytes a second, as measured; 0 while unknown.
        rest: Whether it is left alone.
    """

    def __init__(self, member: Member, link: Link, settings: PeerSettings, clock: Clock) -> None:
        self.member, self._link, self._settings = member, link, settings
        self.rest = Rest(clock)
        self.load, self.speed = 0, 0.0
        self._queues: dict[bool, deque[Delivery]] = {False: deque(), True: deque()}
        self._running = {False: 0, True: 0}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumping = False

    def expected(self, nbytes: int) -> float:
        """Seconds until so many more bytes have come."""
        return (self.load + nbytes) / (self.speed or self._settings.unmeasured)

    def has_room(self, nbytes: int) -> bool:
        """Whether to ask for so many bytes more. An idle peer is asked for anything."""
        soon = not self.speed or self.expected(nbytes) <= self._settings.longest_s
        return not self.load or (soon and self.load + nbytes <= self._settings.inflight)

    def put(self, delivery: Delivery, *, through: bool) -> None:
        """Ask for one block; what is put in the same tick goes together. Whoever puts it takes it off `load` when it is over."""
        self.load += delivery.want.size
        self._queues[through].append(delivery)
        self._pump_soon()

    async def aclose(self) -> None:
        """Cut what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for queue in self._queues.values():
            for delivery in queue:
                delivery.settle(Miss.UNAVAILABLE)
            queue.clear()

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        for through, queue in self._queues.items():
            while queue and self._running[through] < self._settings.lanes:
                batch = self._batch(queue, self._settings.lanes - self._running[through])
                if not batch:
                    continue
                self._running[through] += 1
                task = asyncio.create_task(self._carry(batch, through=through))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _batch(self, queue: deque[Delivery], lanes: int) -> list[Delivery]:
        """What one request asks for: its share of one shard's blocks, as much as comes in a tenth of a second."""
        most = min(_BATCH, int((self.speed or self._settings.unmeasured) * _BATCH_S))
        share = min(MOST_BLOCKS, -(-len(queue) // lanes))
        batch: list[Delivery] = []
        nbytes = 0
        while queue and len(batch) < share:
            delivery = queue[0]
            if delivery.wanted and not delivery.over:
                if batch and (nbytes + delivery.want.size > most or not _alike(batch[0], delivery)):
                    break
                batch.append(delivery)
                nbytes += delivery.want.size
            queue.popleft()
        return batch

    async def _carry(self, batch: list[Delivery], *, through: bool) -> None:
        failed = "closed"
        try:
            carried = await self._link.carry(batch, through=through, speed=int(self.speed))
            failed = carried.failed
            if carried.nbytes >= _LOOK and carried.seconds:
                seen = carried.nbytes / carried.seconds * sum(self._running.values())
                self.speed = seen if not self.speed else self.speed + _WEIGHT * (seen - self.speed)
        finally:
            self._running[through] -= 1
            left = [each for each in batch if not (each.begun or each.over)]
            if failed:
                for delivery in left:
                    delivery.settle(Miss.UNAVAILABLE)
            else:  # cut, because of another block: these are still wanted
                self._queues[through].extendleft(reversed(left))
        if failed:
            self.rest.silent()
        self._pump_soon()


def _alike(one: Delivery, other: Delivery) -> bool:
    return one.block.name.namespace == other.block.name.namespace and one.block.name.shard == other.block.name.shard
