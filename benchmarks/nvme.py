"""The disk tier beside the bare medium: values read into the arena and verified, and values made durable.

The baselines move the same bytes by O_DIRECT, four requests at a time, neither checked nor synced: between the same memory and the
same places of the same file. A file of their own would lie elsewhere, in other pieces, and other memory has larger or smaller
pages: either changes what the medium gives by more than what is measured.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import numpy as np
import uvloop
from _cases import MIB, Case

from tiering import DiskTier, DramSlot, DramTier, Lease, Movers, Stack, StackSettings, Want
from tiering.extents import PAGE
from tiering.sealer import Seals
from tiering.testing import key_of

CASES = ("nvme_get", "nvme_put", "nvme_get_raw", "nvme_put_raw")
TOTAL = 512 * MIB  # on disk to be read
CALL = 128 * MIB  # read in one call
PUT = 256 * MIB  # written in one call
DEPTH = 4


@contextmanager
def cases(size: int, folder: Path) -> Iterator[dict[str, Case]]:
    """See :class:`_cases.Rows`."""
    with ExitStack() as closing:
        sys.setswitchinterval(0.0005)  # this and the loop as in a node's process
        loop = uvloop.new_event_loop()
        closing.callback(loop.close)
        rig = Rig(loop, size)
        closing.callback(lambda: loop.run_until_complete(rig.close()))
        loop.run_until_complete(rig.open(folder))
        bare = closing.enter_context(Bare.open(rig))
        yield {
            "nvme_get": Case(rig.get, CALL, TOTAL // CALL),
            "nvme_put": Case(rig.put, PUT, 1, rig.forget),
            "nvme_get_raw": Case(bare.read, CALL, TOTAL // CALL),
            "nvme_put_raw": Case(bare.write, PUT, 1),
        }


class Rig:
    """A hierarchy of DRAM and disk, with values on the disk to read, and others in DRAM to write."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, seals: Seals | None = None) -> None:
        self._loop, self.size, self._seals = loop, size, seals
        self._parts = AsyncExitStack()
        self._stored = [Want(key_of(n), size) for n in range(TOTAL // size)]
        self._new = [Want(key_of(1 << 20 | n), size) for n in range(PUT // size)]
        self.fresh: list[Lease] = []

    async def open(self, folder: Path) -> None:
        """Fill it."""
        self.file = folder / f"tier{self.size}" / "slab"
        movers = await self._parts.enter_async_context(Movers.open())
        dram = await self._parts.enter_async_context(DramTier.open("dram", PUT + 2 * CALL, movers))
        opening = DiskTier.open(self.file.parent, TOTAL + 2 * PUT, movers, seals=self._seals)
        self.disk = await self._parts.enter_async_context(opening)
        settings = StackSettings(behind_bytes=PUT)
        self.stack = await self._parts.enter_async_context(Stack.open(dram, self.disk, [], settings))
        while not self.disk.prewritten:  # noqa: ASYNC110  a slab is new once; that is not measured
            await asyncio.sleep(0.01)
        noise = np.random.default_rng(self.size).bytes(self.size)
        self.fresh = [self._publish(want, noise) for want in self._new]
        for want in self._stored:
            with self._publish(want, noise):
                assert await self.stack.flush([want]) == [True]
            dram.discard_many([want.key])

    async def close(self) -> None:
        """Empty it."""
        for lease in self.fresh:
            lease.release()
        await self._parts.aclose()

    def get(self, call: int) -> None:
        """Values that are on the disk only."""
        count = CALL // self.size
        wants = self._stored[call * count : (call + 1) * count]
        leases = self._loop.run_until_complete(self.stack.get_many(wants))
        for lease in leases:
            assert isinstance(lease, Lease)
            lease.release()
        assert self.stack.dram.discard_many([want.key for want in wants]) == count == len(leases)

    def put(self, _: int) -> None:
        """Values that are in DRAM, as a writer leaves them there; durable when it returns."""

        async def store() -> list[bool]:
            for want in self._new:
                self.stack.offer(want)
            return await self.stack.flush(self._new)

        assert self._loop.run_until_complete(store()) == [True] * len(self._new)

    def forget(self) -> None:
        """What `put` wrote."""
        assert self.disk.discard_many([want.key for want in self._new]) == len(self._new)
        self._loop.run_until_complete(self.disk._index.commit([]))  # noqa: SLF001  the room is free again

    def places(self, *, stored: bool) -> list[int]:
        """Where in the file the bytes are of what is stored, or of what `put` wrote just now."""
        entries = self.disk._catalog._entries  # noqa: SLF001  only who measures the medium cares
        return [entries[want.key].placed.offset + PAGE for want in (self._stored if stored else self._new)]

    def _publish(self, want: Want, value: bytes) -> Lease:
        slot = self.stack.dram.reserve(want)
        assert isinstance(slot, DramSlot)
        slot.view[:] = value
        return slot.commit()


class Bare:
    """The tier's file, and threads that each wait for their part of it."""

    def __init__(self, descriptor: int, pool: ThreadPoolExecutor, rig: Rig) -> None:
        self._file, self._pool, self._rig = descriptor, pool, rig
        self._stored = rig.places(stored=True)
        rig.put(0)
        self._room = rig.places(stored=False)  # nobody has it between two calls of `put`
        rig.forget()

    @classmethod
    @contextmanager
    def open(cls, rig: Rig) -> Iterator[Bare]:
        """Until the block ends."""
        descriptor = os.open(rig.file, os.O_RDWR | os.O_DIRECT)
        try:
            with ThreadPoolExecutor(DEPTH) as pool:
                yield cls(descriptor, pool, rig)
        finally:
            os.close(descriptor)

    def read(self, call: int) -> None:
        """Straight into the arena."""
        count = CALL // self._rig.size
        wants = [Want(key_of(1 << 21 | n), self._rig.size) for n in range(count)]
        slots = [slot for slot in map(self._rig.stack.dram.reserve, wants) if isinstance(slot, DramSlot)]
        self._all(os.preadv, [slot.view for slot in slots], self._stored[call * count : (call + 1) * count])
        for slot in slots:
            slot.abort()

    def write(self, _: int) -> None:
        """Straight from the arena."""
        self._all(os.pwritev, [lease.view for lease in self._rig.fresh], self._room)

    def _all(self, move: Callable[[int, list[memoryview], int], int], views: Sequence[memoryview], places: Sequence[int]) -> None:
        moved = self._pool.map(lambda view, at: move(self._file, [view], at), views, places)
        assert list(moved) == [self._rig.size] * len(places)
