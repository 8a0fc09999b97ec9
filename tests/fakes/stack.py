"""A hierarchy over real tiers and scripted origins."""

import asyncio
import os

from tiering import Lease
from tiering.testing import key_of, value_of, want_of

MIB = 1 << 20


SIZE = 10_000


class Rig:
    """A stack over real tiers and scripted origins, with its parts at hand."""

    def __init__(self, stack, origins):
        self.stack = stack
        self.dram, self.disk = stack.dram, stack.disk
        self.origins = origins
        self.origin = origins[0] if origins else None

    async def get(self, *numbers, **options):
        """Numbers of the values that came, and misses; everything is released again."""
        got = await self.stack.get_many([want_of(n, SIZE) for n in numbers], **options)
        shown = []
        for n, one in zip(numbers, got, strict=False):
            if isinstance(one, Lease):
                assert bytes(one.view) == value_of(n, SIZE)
                one.release()
                shown.append(n)
            else:
                shown.append(one)
        return shown

    async def sources(self, *numbers):
        got = await self.stack.get_many([want_of(n, SIZE) for n in numbers])
        for one in got:
            one.release()
        return [one.source for one in got]

    def publish(self, n, size=SIZE):
        slot = self.stack.reserve(want_of(n, size))
        slot.view[:] = value_of(n, size)
        return self.stack.publish(slot)

    async def on_disk(self, *numbers):
        """Put values on disk only."""
        items = [(want_of(n, SIZE), memoryview(value_of(n, SIZE))) for n in numbers]
        assert await self.disk.put_many(items) == [True] * len(numbers)

    def in_origin(self, *numbers):
        for n in numbers:
            self.origin.values[key_of(n)] = value_of(n, SIZE)

    def forget_memory(self, *numbers):
        self.dram.discard_many([key_of(n) for n in numbers])

    async def settle(self):
        """Wait until nothing is being written behind."""
        while any(self.stack.queued.values()):  # noqa: ASYNC110  no event tells; only tests care
            await asyncio.sleep(0.002)

    def spoil_disk(self, n):
        """Flip one bit of a value on disk."""
        placed = self.disk._catalog._entries[key_of(n)].placed
        fd = os.open(self.folder / "slab", os.O_RDWR)
        old = os.pread(fd, 1, placed.offset + 4096 + 77)
        os.pwrite(fd, bytes([old[0] ^ 8]), placed.offset + 4096 + 77)
        os.fsync(fd)
        os.close(fd)
