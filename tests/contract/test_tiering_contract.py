"""Every tier keeps the one contract."""

import errno
import os
from contextlib import asynccontextmanager

import pytest

from tiering import DiskTier, DramTier, Miss, Movers
from tiering.testing import MemoryTier, TierContract, key_of, value_of, want_of


class TestMemory(TierContract):
    def open(self, limit):
        return MemoryTier.open(limit)


class TestDram(TierContract):
    @asynccontextmanager
    async def open(self, limit):
        async with Movers.open() as movers, DramTier.open("dram", limit, movers) as tier:
            yield tier
            assert tier.leases == 0

    async def test_leases_leave_no_room_and_say_so(self):
        async with self.open(30_000) as tier:
            for n in range(3):
                await self._put(tier, n, 10_000)
            leases = await tier.get_many([want_of(n, 10_000) for n in range(3)])
            assert tier.reserve(want_of(9, 1)) is Miss.FULL
            assert await tier.put_many([(want_of(9, 10_000), memoryview(value_of(9, 10_000)))]) == [False]
            assert tier.discard_many([key_of(0)]) == 0
            assert await tier.evict(1) == 0
            leases[1].release()
            await self._put(tier, 9, 10_000)
            assert tier.contains_many([key_of(n) for n in (0, 1, 2, 9)]) == [True, False, True, True]
            leases[0].release()
            leases[2].release()


class TestDisk(TierContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.path = tmp_path / "tier"

    @asynccontextmanager
    async def open(self, limit):
        async with Movers.open() as movers, DiskTier.open(self.path, limit, movers) as tier:
            yield tier


class TestDiskBuffered(TestDisk):
    """A file system without O_DIRECT."""

    @pytest.fixture(autouse=True)
    def _no_o_direct(self, monkeypatch):
        real = os.open

        def refuse(path, flags, *args, **kwargs):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr("tiering.slab.os.open", refuse)

    async def test_it_says_that_it_is_buffered(self):
        async with self.open(1 << 20) as tier:
            assert tier.direct is False
