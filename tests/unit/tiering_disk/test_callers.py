"""Callers of the disk tier: their buffers, reads, holds and threads, and what is left when they are cancelled."""

import asyncio
import errno
import mmap
import os
import threading
import time

import pytest
from fakes.disk import MIB, disk, get, prewritten, put

from tiering import Lease, Lru, Miss
from tiering.testing import key_of, value_of, want_of


async def test_b32_a_cancelled_put_ends_when_nothing_uses_the_buffer_any_more(folder, monkeypatch):
    real, started, go = os.pwritev, threading.Event(), threading.Event()

    def slow(*args):
        started.set()
        go.wait(10)
        return real(*args)

    async with disk(folder) as tier:
        await prewritten(tier)
        monkeypatch.setattr("tiering.slab.os.pwritev", slow)
        buffer = bytearray(value_of(1, 8192))
        storing = asyncio.create_task(tier.put_many([(want_of(1, 8192), memoryview(buffer))]))
        await asyncio.to_thread(started.wait)
        storing.cancel()
        await asyncio.sleep(0.01)
        storing.cancel()
        await asyncio.sleep(0.01)
        assert not storing.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await storing
        buffer[:] = bytes(8192)
        assert await get(tier, 1, size=8192) == 1


async def test_b32_a_buffer_that_changes_while_it_is_written_is_never_served(folder, monkeypatch):
    async with disk(folder) as tier:
        buffer = mmap.mmap(-1, 8192)  # written from where it is
        buffer[:] = value_of(1, 8192)
        real = os.pwritev

        def overwrite(*args):
            buffer[:] = b"\xee" * 8192
            return real(*args)

        await prewritten(tier)
        monkeypatch.setattr("tiering.slab.os.pwritev", overwrite)
        await tier.put_many([(want_of(1, 8192), memoryview(buffer))])
        monkeypatch.undo()
        assert await get(tier, 1, size=8192) is Miss.CORRUPT


async def test_b33_twenty_puts_of_one_key_write_it_once_and_a_failed_one_is_taken_over(folder, monkeypatch):
    real, writes = os.pwritev, []

    def count(fd, parts, offset):
        writes.append(offset)
        if len(writes) == 1:
            raise OSError(errno.EIO, "first write fails")
        return real(fd, parts, offset)

    async with disk(folder) as tier:
        await prewritten(tier)
        monkeypatch.setattr("tiering.slab.os.pwritev", count)
        value = memoryview(value_of(1, 8192)[:4096] + value_of(1, 8192)[4096:])
        results = await asyncio.gather(*(tier.put_many([(want_of(1, 8192), value)]) for _ in range(20)))
        assert results.count([False]) == 1
        assert results.count([True]) == 19
        assert (tier.used, tier.count, await get(tier, 1, size=8192)) == (8192, 1, 1)


async def test_values_at_any_address_are_stored_whole(folder):
    """Aligned, off by one, longer than the bounce buffer, and as another item type."""
    async with disk(folder) as tier:
        size = 2 * MIB + 777
        raw = memoryview(bytearray(size + 1))
        raw[1:] = value_of(1, size)
        assert await tier.put_many([(want_of(1, size), raw[1:].toreadonly())]) == [True]
        assert await get(tier, 1, size=size) == 1
        assert await tier.put_many([(want_of(2, 8000), memoryview(bytearray(value_of(2, 8000))).cast("Q"))]) == [True]
        assert await get(tier, 2, size=8000) == 2
        with pytest.raises(TypeError, match="contiguous"):
            await tier.put_many([(want_of(3, 10), memoryview(bytes(20))[::2])])
        assert tier.used == size + 8000


async def test_a_value_that_is_being_read_is_neither_evicted_nor_overwritten(folder, monkeypatch):
    real, started, go = os.preadv, threading.Event(), threading.Event()

    def slow(*args):
        started.set()
        go.wait(10)
        return real(*args)

    async with disk(folder, 4 * 10_000) as tier:
        await put(tier, *range(4))
        monkeypatch.setattr("tiering.slab.os.preadv", slow)
        reading = asyncio.create_task(get(tier, 0))
        await asyncio.to_thread(started.wait)
        assert tier.discard_many([key_of(0)]) == 0
        for n in range(4, 12):
            assert await put(tier, n) == [True]
        assert tier.contains_many([key_of(0)]) == [True]
        go.set()
        assert await reading == 0
        assert tier.used <= tier.limit


async def test_b44_a_cancelled_read_pins_nothing(folder):
    async with disk(folder, 4 * 10_000) as tier:
        await put(tier, *range(4))
        for n in range(200):
            reading = asyncio.create_task(get(tier, n % 4))
            for _ in range(n % 5):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        assert tier._catalog._pinned == 0
        assert await tier.evict(10**9) == 40_000


async def test_held_keys_stay_and_holds_count(folder):
    async with disk(folder, 4 * 10_000) as tier:
        tier.hold([key_of(0), key_of(0), key_of(1)])  # before they are there
        for n in range(10):
            await put(tier, n)
        assert tier.contains_many([key_of(n) for n in range(4)]) == [True, True, False, False]
        assert tier.discard_many([key_of(0)]) == 0
        tier.hold([key_of(8), key_of(9)])
        assert await put(tier, 11) == [False]  # everything is held
        tier.release([key_of(0), key_of(1), key_of(8)])
        assert await put(tier, 11) + await put(tier, 12) == [True, True]
        assert tier.contains_many([key_of(n) for n in (0, 1, 8, 9, 11, 12)]) == [True, False, False, True, True, True]
        tier.release([key_of(0), key_of(9), key_of(77)])
        assert await tier.evict(10**9) == 40_000


async def test_flush_waits_for_what_is_under_way(folder, monkeypatch):
    real, go = os.pwritev, threading.Event()
    async with disk(folder) as tier:
        await prewritten(tier)
        monkeypatch.setattr("tiering.slab.os.pwritev", lambda *args: (go.wait(10), real(*args))[1])
        storing = asyncio.create_task(put(tier, 1))
        await asyncio.sleep(0.01)
        flushing = asyncio.create_task(tier.flush([key_of(1), key_of(2)]))
        await asyncio.sleep(0.01)
        assert not flushing.done()
        go.set()
        assert await flushing == [True, False]
        assert await storing == [True]


async def test_another_size_under_a_key_replaces(folder):
    async with disk(folder) as tier:
        await put(tier, 1, size=9000)
        await put(tier, 1, size=5000)
        assert (tier.used, await get(tier, 1, size=9000), await get(tier, 1, size=5000)) == (5000, Miss.ABSENT, 1)
    async with disk(folder) as tier:
        assert (tier.used, await get(tier, 1, size=5000)) == (5000, 1)


async def test_a_policy_may_refuse_and_a_closed_tier_answers(folder):
    class Nothing(Lru):
        def admit(self, key, size):
            return False

    async with disk(folder, policy=Nothing) as tier:
        assert await put(tier, 1) == [False]
    async with disk(folder) as tier:
        await put(tier, 1)
    assert await get(tier, 1) is Miss.UNAVAILABLE
    assert await put(tier, 2) == [False]
    assert (tier.discard_many([key_of(1)]), await tier.evict(1)) == (0, 0)


async def test_b42_threads_and_the_loop_together_keep_the_accounting_exact(folder):
    async with disk(folder, 12 * 10_000) as tier:
        done, problems = threading.Event(), []

        def work(seed):
            n = seed
            try:
                while not done.is_set():
                    n = (n * 7 + 3) % 31
                    tier.hold([key_of(n)])
                    tier.contains_many([key_of(n)])
                    tier.release([key_of(n)])
                    if n % 5 == 0:
                        tier.discard_many([key_of(n)])
                    assert tier.used <= tier.limit
                    time.sleep(0.0002)
            except BaseException as error:
                problems.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(7)]
        for thread in threads:
            thread.start()
        for step in range(20):
            await put(tier, step % 31, (step * 3) % 31)
            assert await get(tier, step % 31) in {step % 31, Miss.ABSENT}
        done.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert problems == []
        assert tier.used == tier.count * 10_000
        await tier.evict(10**9)
        assert tier.used == 0
        await tier._index.commit([])
        await prewritten(tier)
        assert tier._catalog._space.free_bytes == tier._slab.size


async def test_leases_of_the_disk_tier_are_their_reader_s_own(folder):
    async with disk(folder) as tier:
        await put(tier, 1)
        (lease,) = await tier.get_many([want_of(1, 10_000)])
        assert isinstance(lease, Lease)
        assert (lease.offset, lease.source, tier.direct in {True, False}) == (-1, "nvme", True)
        tier.discard_many([key_of(1)])
        await put(tier, *range(2, 50))
        assert bytes(lease.view) == value_of(1, 10_000)
        lease.release()
