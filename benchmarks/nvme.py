"""The disk tier beside the bare medium: values read into the arena and verified, and values made durable.

The baselines move as many bytes by O_DIRECT between one file and the same memory, four requests at a time, neither checked nor
synced.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import numpy as np
from _cases import MIB, Case

from tiering import DiskTier, DramSlot, DramTier, Lease, Movers, Stack, StackSettings, Want
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
        loop = asyncio.new_event_loop()
        closing.callback(loop.close)
        rig = Rig(loop, size)
        closing.callback(lambda: loop.run_until_complete(rig.close()))
        loop.run_until_complete(rig.open(folder))
        bare = closing.enter_context(Bare.open(folder, size, rig))
        yield {
            "nvme_get": Case(rig.get, CALL, TOTAL // CALL),
            "nvme_put": Case(rig.put, PUT, 1, rig.forget),
            "nvme_get_raw": Case(bare.read, CALL, TOTAL // CALL),
            "nvme_put_raw": Case(bare.write, PUT, 1),
        }


class Rig:
    """A hierarchy of DRAM and disk, with values on the disk to read, and others in DRAM to write."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int) -> None:
        self._loop, self._size = loop, size
        self._parts = AsyncExitStack()
        self._stored = [Want(key_of(n), size) for n in range(TOTAL // size)]
        self._new = [Want(key_of(1 << 20 | n), size) for n in range(PUT // size)]
        self.fresh: list[Lease] = []

    async def open(self, folder: Path) -> None:
        """Fill it."""
        movers = await self._parts.enter_async_context(Movers.open())
        dram = await self._parts.enter_async_context(DramTier.open("dram", PUT + 2 * CALL, movers))
        self.disk = await self._parts.enter_async_context(DiskTier.open(folder / f"tier{self._size}", TOTAL + 2 * PUT, movers))
        settings = StackSettings(behind_bytes=PUT)
        self.stack = await self._parts.enter_async_context(Stack.open(dram, self.disk, [], settings))
        while self.disk._catalog._space._holes.free_bytes:  # noqa: SLF001, ASYNC110  a slab is new once; that is not measured
            await asyncio.sleep(0.01)
        noise = np.random.default_rng(self._size).bytes(self._size)
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
        count = CALL // self._size
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

    def _publish(self, want: Want, value: bytes) -> Lease:
        slot = self.stack.dram.reserve(want)
        assert isinstance(slot, DramSlot)
        slot.view[:] = value
        return slot.commit()


class Bare:
    """One file, and threads that each wait for their part of it."""

    def __init__(self, descriptor: int, size: int, pool: ThreadPoolExecutor, rig: Rig) -> None:
        self._file, self._size, self._pool, self._rig = descriptor, size, pool, rig

    @classmethod
    @contextmanager
    def open(cls, folder: Path, size: int, rig: Rig) -> Iterator[Bare]:
        """Written once, as the tier's slab is."""
        descriptor = os.open(folder / "bare", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            with ThreadPoolExecutor(DEPTH) as pool:
                bare = cls(descriptor, size, pool, rig)
                for part in range(TOTAL // PUT):
                    bare.write(part)
                os.fsync(descriptor)
                yield bare
        finally:
            os.close(descriptor)

    def read(self, call: int) -> None:
        """Straight into the arena."""
        wants = [Want(key_of(1 << 21 | n), self._size) for n in range(CALL // self._size)]
        slots = [slot for slot in map(self._rig.stack.dram.reserve, wants) if isinstance(slot, DramSlot)]
        self._all(os.preadv, call * CALL, [slot.view for slot in slots])
        for slot in slots:
            slot.abort()

    def write(self, call: int) -> None:
        """Straight from the arena."""
        self._all(os.pwritev, call * PUT, [lease.view for lease in self._rig.fresh])

    def _all(self, move: Callable[[int, list[memoryview], int], int], start: int, views: Sequence[memoryview]) -> None:
        def one(at: int) -> int:
            return move(self._file, [views[at]], start + at * self._size)

        assert set(self._pool.map(one, range(len(views)))) == {self._size}
