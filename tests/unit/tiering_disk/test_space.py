"""A disk that is full, or that is still being written for the first time."""

import asyncio
import errno
import subprocess
import time

from fakes.disk import MIB, disk, get, prewritten, put, raising

from tiering import Miss


async def test_b40_a_full_disk_refuses_and_the_same_key_is_stored_when_there_is_room(small_disk):
    """The file system is smaller than the limit. What was stored stays readable; nothing raises."""
    async with disk(small_disk / "tier", 64 * MIB) as tier:
        results = []
        for n in range(20):
            results += await put(tier, n, size=MIB)
        stored = [n for n, ok in enumerate(results) if ok]
        assert 3 <= len(stored) < 20
        assert tier.used == len(stored) * MIB
        assert tier.stats.drops == 20 - len(stored)
        assert tier.stats.errors >= 20 - len(stored)
        assert [await get(tier, n, size=MIB) for n in stored] == stored
        refused = next(n for n in range(20) if n not in stored)
        assert await get(tier, refused, size=MIB) is Miss.ABSENT
        await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,size=64m", small_disk], check=True)
        assert await put(tier, refused, size=MIB) == [True]
        assert await get(tier, refused, size=MIB) == refused


async def test_b40_an_index_that_cannot_be_written_loses_no_room(folder, monkeypatch):
    async with disk(folder, 10 * 10_000) as tier:
        await put(tier, *range(10))
        real = tier._index._write
        monkeypatch.setattr(tier._index, "_write", raising(errno.ENOSPC))
        assert await put(tier, *range(10, 14)) == [False] * 4
        assert tier.used == tier.count * 10_000
        monkeypatch.setattr(tier._index, "_write", real)
        assert await put(tier, *range(20, 30)) == [True] * 10
        assert [await get(tier, n) for n in range(20, 30)] == list(range(20, 30))
        assert tier.used == tier.limit
        await tier.evict(10**9)
        await tier._index.commit([])
        await prewritten(tier)
        assert tier._catalog._space.free_bytes == tier._slab.size
    async with disk(folder, 10 * 10_000) as tier:
        assert tier.count == 0


async def test_a_new_slab_is_written_once_while_the_tier_works(folder):
    async with disk(folder, 24 * MIB) as tier:
        assert await put(tier, *range(8), size=MIB) == [True] * 8
        await prewritten(tier)
        await tier._index.commit([])
        assert (folder / "slab").stat().st_blocks * 512 >= tier._slab.size
        assert [await get(tier, n, size=MIB) for n in range(8)] == list(range(8))
    async with disk(folder, 24 * MIB) as tier:
        assert tier._catalog._space._holes.free_bytes == 0  # not again
        assert [await get(tier, n, size=MIB) for n in range(8)] == list(range(8))


async def test_a_slab_that_is_still_being_written_holds_all_that_it_should(folder, monkeypatch):
    monkeypatch.setattr("tiering.slab.Slab.zero", lambda *_: time.sleep(0.02))
    async with disk(folder, 40 * MIB) as tier:
        for n in range(40):
            assert await put(tier, n, size=MIB) == [True]
        assert (tier.used, tier.count) == (40 * MIB, 40)
        assert [await get(tier, n, size=MIB) for n in range(40)] == list(range(40))
