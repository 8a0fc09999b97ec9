"""What happens behind a writer: on to the disk and to every origin, bounded, and counted where it is dropped."""

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack

from fakes.stack import MIB, SIZE, Rig

from tiering import DiskTier, DramTier, Miss, Movers, Stack, StackSettings
from tiering.testing import ScriptedOrigin, key_of, value_of, want_of


async def test_what_is_published_goes_behind_to_the_disk_and_to_every_origin(rig):
    async with rig(origins=2) as r:
        lease = r.publish(1)
        assert bytes(lease.view) == value_of(1, SIZE)
        lease.release()
        await r.settle()
        assert r.disk.contains_many([key_of(1)]) == [True]
        assert [origin.values for origin in r.origins] == [{key_of(1): value_of(1, SIZE)}] * 2
        assert (r.stack.stats["bucket"].bytes_in, r.disk.stats.bytes_in) == (SIZE, SIZE)


async def test_a_slow_origin_never_stalls_a_writer_and_what_does_not_fit_is_counted(rig):
    async with rig(behind_bytes=3 * SIZE, drain_s=0.05) as r:
        go = asyncio.Event()

        async def wait(_):
            await go.wait()

        r.origin.before = wait
        for n in range(20):
            r.publish(n).release()
            await asyncio.sleep(0)
        assert r.stack.queued["bucket"] == 3 * SIZE
        assert r.stack.stats["bucket"].drops == 17
        go.set()
        await r.settle()
        assert set(r.origin.offered) == {key_of(n) for n in range(3)}
        assert r.stack.offer(want_of(10, SIZE))  # what was dropped may be offered again
        await r.settle()
        assert key_of(10) in r.origin.values
        assert not r.stack.offer(want_of(77, SIZE))


async def test_what_waits_to_be_written_never_takes_more_than_half_of_memory(rig):
    async with rig(dram=10 * SIZE, behind_bytes=1 << 40, drain_s=0.0) as r:
        r.origin.before = lambda _: asyncio.sleep(10)
        for n in range(30):
            r.publish(n).release()
        assert r.stack.queued["bucket"] == 5 * SIZE


async def test_an_origin_that_fails_or_declines_is_counted_and_costs_nothing(rig):
    async with rig() as r:

        async def down(_):
            raise ConnectionError("no route")

        r.origin.before = down
        r.publish(1).release()
        await r.settle()
        assert r.stack.stats["bucket"].errors == 1
        r.origin.before, r.origin.accepts = None, False
        r.publish(2).release()
        await r.settle()
        assert (r.stack.stats["bucket"].bytes_in, r.dram.leases, r.origin.values) == (0, 0, {})


async def test_closing_writes_what_was_accepted(tmp_path):
    origin = ScriptedOrigin()
    origin.before = lambda _: asyncio.sleep(0.02)
    async with AsyncExitStack() as parts:
        movers = await parts.enter_async_context(Movers.open())
        dram = await parts.enter_async_context(DramTier.open("dram", 4 * MIB, movers))
        disk = await parts.enter_async_context(DiskTier.open(tmp_path / "t", 4 * MIB, movers))
        async with Stack.open(dram, disk, [origin], StackSettings(writers=2, drain_s=10)) as stack:
            r = Rig(stack, [origin])
            for n in range(10):
                r.publish(n).release()
        assert disk.count == len(origin.values) == 10
        assert dram.leases == 0


async def test_closing_is_bounded_and_counts_what_it_drops(tmp_path):
    origin = ScriptedOrigin()
    origin.before = lambda _: asyncio.sleep(60)
    async with Movers.open() as movers, DramTier.open("dram", 4 * MIB, movers) as dram:
        async with Stack.open(dram, None, [origin], StackSettings(writers=2, drain_s=0.05)) as stack:
            r = Rig(stack, [origin])
            for n in range(10):
                r.publish(n).release()
        assert (stack.stats["bucket"].drops, dram.leases, origin.values) == (10, 0, {})
        assert not stack.offer(want_of(1, SIZE))


async def test_flush_makes_values_durable_even_those_that_were_dropped_on_their_way(rig):
    async with rig(behind_bytes=2 * SIZE) as r:
        for n in range(6):
            r.publish(n).release()
        assert r.disk.stats.drops == 4
        assert await r.stack.flush([want_of(n, SIZE) for n in (0, 3, 5, 9)]) == [True, True, True, False]
        assert r.disk.contains_many([key_of(n) for n in (0, 3, 5)]) == [True] * 3


async def test_flush_answers_at_its_deadline(rig, monkeypatch):
    async with rig() as r:
        r.publish(1).release()
        await r.settle()
        gate = asyncio.Event()
        real = r.disk.put_many

        async def slow(items, **how):
            await gate.wait()
            return await real(items, **how)

        monkeypatch.setattr(r.disk, "put_many", slow)
        r.publish(2).release()
        wants = [want_of(1, SIZE), want_of(2, SIZE)]
        assert await r.stack.flush(wants, deadline=time.monotonic() + 0.02) == [True, False]
        gate.set()
        assert await r.stack.flush(wants) == [True, True]


async def test_bytes_by_tier_add_up(rig):
    async with rig() as r:
        r.publish(0).release()
        await r.on_disk(1, 2)
        r.in_origin(3, 4, 5)
        leases = await r.stack.get_many([want_of(n, SIZE) for n in range(6)])
        by_tier = Counter()
        for lease in leases:
            by_tier[lease.source] += lease.size
            lease.release()
        assert by_tier == {"dram": SIZE, "nvme": 2 * SIZE, "bucket": 3 * SIZE}
        stats = r.stack.stats
        assert (stats["dram"].hits, stats["dram"].misses[Miss.ABSENT]) == (1, 5)
        assert (stats["nvme"].bytes_out, stats["bucket"].bytes_out) == (2 * SIZE, 3 * SIZE)
        assert (stats["nvme"].reads.count, stats["bucket"].reads.count) == (2, 3)
        assert stats["bucket"].reads.total > 0


async def test_reading_into_memory_beside_raw_reads(rig, record_property):
    """Reports both in GB/s; asserts only that the bytes are right."""
    count, size = 48, MIB
    async with rig(dram=64 * MIB, disk=64 * MIB) as r:
        wants = [want_of(n, size) for n in range(count)]
        for start in range(0, count, 8):
            items = [(want_of(n, size), memoryview(value_of(n, size))) for n in range(start, start + 8)]
            assert await r.disk.put_many(items) == [True] * 8
        started = time.perf_counter()
        leases = await r.stack.get_many(wants)
        record_property("disk to memory, GB/s", count * size / (time.perf_counter() - started) / 1e9)
        assert [bytes(lease.view[-9:]) for lease in leases] == [value_of(n, size)[-9:] for n in range(count)]
        for lease in leases:
            lease.release()
        slots = [r.disk._catalog._entries[want.key].placed for want in wants]
        buffer = r.dram._arena.view[: size + 4096]
        started = time.perf_counter()
        for slot in slots:
            r.disk._slab._read_all(buffer[4096:], slot.offset + 4096)
        record_property("raw, one thread, GB/s", count * size / (time.perf_counter() - started) / 1e9)
