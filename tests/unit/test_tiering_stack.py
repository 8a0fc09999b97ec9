"""The hierarchy: what a reader gets when tiers and origins fail, and what happens behind a writer."""

import asyncio
import os
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tiering import DiskTier, DramTier, Lease, Miss, Movers, Reach, Stack, StackSettings
from tiering.testing import ScriptedOrigin, key_of, value_of, want_of

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


@pytest.fixture
def rig(tmp_path):
    @asynccontextmanager
    async def build(dram=4 * MIB, disk=4 * MIB, origins=1, **settings):
        async with AsyncExitStack() as parts:
            movers = await parts.enter_async_context(Movers.open())
            memory = await parts.enter_async_context(DramTier.open("dram", dram, movers))
            slab = await parts.enter_async_context(DiskTier.open(tmp_path / "tier", disk, movers)) if disk else None
            scripted = [ScriptedOrigin(f"origin{i}" if i else "bucket") for i in range(origins)]
            stack = await parts.enter_async_context(Stack.open(memory, slab, scripted, StackSettings(**settings)))
            rig = Rig(stack, scripted)
            rig.folder = tmp_path / "tier"
            yield rig
        assert memory.leases == 0

    return build


# Reading


async def test_values_come_from_the_nearest_place_and_are_promoted(rig):
    async with rig() as r:
        r.publish(0).release()
        await r.on_disk(1)
        r.in_origin(2)
        await r.settle()
        assert r.stack.locate([key_of(n) for n in range(4)]) == ["dram", "nvme", None, None]
        assert await r.sources(0, 1, 2) == ["dram", "nvme", "bucket"]
        assert await r.sources(0, 1, 2) == ["dram", "dram", "dram"]
        await r.settle()
        r.forget_memory(0, 1, 2)
        assert await r.sources(0, 1, 2) == ["nvme", "nvme", "nvme"]  # what came from the bucket is on disk now
        assert r.origin.fetched == [key_of(2)]


async def test_b26_the_answer_ends_with_the_first_hole_and_nothing_behind_it_stays_leased(rig):
    async with rig() as r:
        r.in_origin(0, 2, 3)
        assert await r.get(0, 1, 2, 3) == [0, Miss.ABSENT]
        assert await r.get(1, 2, 3) == [Miss.ABSENT]
        await r.settle()
        assert r.dram.leases == 0
        assert await r.get(0, 1, 2, 3, stop_at_miss=False) == [0, Miss.ABSENT, 2, 3]
        r.in_origin(1)
        assert await r.get(0, 1, 2, 3) == [0, 1, 2, 3]
        assert await r.get() == []


async def test_fetches_start_in_prefix_order_and_stop_behind_a_hole(rig):
    async with rig(fetches=4) as r:
        r.in_origin(*(n for n in range(40) if n != 2))

        async def slow(_):
            await asyncio.sleep(0.002)

        r.origin.before = slow
        assert await r.get(*range(40)) == [0, 1, Miss.ABSENT]
        assert r.origin.fetched[:4] == [key_of(n) for n in range(4)]
        assert len(r.origin.fetched) <= 8
        assert len(set(r.origin.fetched)) == len(r.origin.fetched)


async def test_no_more_than_the_allowed_number_is_fetched_at_once(rig):
    async with rig(fetches=5) as r:
        r.in_origin(*range(30))
        now = most = 0

        async def count(_):
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.001)
            now -= 1

        r.origin.before = count
        assert await r.get(*range(30)) == list(range(30))
        assert most == 5


async def test_twenty_readers_of_one_value_fetch_it_once(rig):
    async with rig() as r:
        r.in_origin(1)
        r.origin.before = lambda _: asyncio.sleep(0.005)
        assert await asyncio.gather(*(r.get(1) for _ in range(20))) == [[1]] * 20
        assert r.origin.fetched == [key_of(1)]
        assert r.stack.stats["bucket"].hits == 1


async def test_reach_bounds_how_far_a_look_up_goes(rig):
    async with rig() as r:
        await r.on_disk(1)
        r.in_origin(2)
        assert await r.get(1, reach=Reach.DRAM) == [Miss.ABSENT]
        assert await r.get(1, 2, reach=Reach.DISK) == [1, Miss.ABSENT]
        assert r.origin.fetched == []
        assert await r.get(1, 2, reach=Reach.ORIGIN) == [1, 2]


async def test_a_disk_look_up_and_an_origin_look_up_do_not_share_an_answer(rig):
    async with rig() as r:
        r.in_origin(1)
        near, far = await asyncio.gather(r.get(1, reach=Reach.DISK), r.get(1))
        assert (near, far) == ([Miss.ABSENT], [1])


async def test_b29_torn_slot_is_served_from_the_origin(rig):
    async with rig() as r:
        await r.on_disk(1)
        r.in_origin(1)
        os.truncate(r.folder / "slab", r.disk._catalog._entries[key_of(1)].placed.offset + 4096 + SIZE // 2)
        assert await r.sources(1) == ["bucket"]
        await r.settle()
        r.forget_memory(1)
        assert await r.sources(1) == ["nvme"]  # written anew
        assert r.disk.stats.corruptions == 1


async def test_b30_bit_rot_is_refetched_and_a_bad_copy_in_the_bucket_too_is_a_miss(rig):
    async with rig() as r:
        await r.on_disk(1, 2)
        r.in_origin(1)
        r.spoil_disk(1)
        r.spoil_disk(2)
        r.origin.answer[key_of(2)] = Miss.CORRUPT
        assert await r.get(1) == [1]
        assert await r.get(2) == [Miss.CORRUPT]
        assert (r.disk.stats.corruptions, r.stack.stats["bucket"].corruptions) == (2, 1)
        assert r.stack.locate([key_of(2)]) == [None]


async def test_b34_an_origin_with_wrong_bytes_is_passed_over(rig):
    async with rig(origins=2) as r:
        peer, bucket = r.origins
        peer.answer[key_of(1)] = Miss.CORRUPT
        bucket.values[key_of(1)] = value_of(1, SIZE)
        assert await r.sources(1) == ["origin1"]
        assert (len(peer.fetched), len(bucket.fetched)) == (1, 1)


async def test_an_origin_that_raises_is_unavailable_and_the_next_is_asked(rig):
    async with rig(origins=2) as r:
        first, second = r.origins

        async def down(_):
            raise ConnectionError("no route")

        first.before = down
        second.values[key_of(1)] = value_of(1, SIZE)
        assert await r.get(1) == [1]
        assert await r.get(2) == [Miss.UNAVAILABLE]  # the second has it not, and the first did not say
        assert (r.stack.stats["bucket"].errors, r.stack.stats["bucket"].misses[Miss.UNAVAILABLE]) == (2, 2)
        assert r.dram.used == SIZE


async def test_b38_what_was_discarded_is_fetched_again_and_gone_is_gone(rig):
    async with rig() as r:
        r.in_origin(1)
        assert await r.get(1) == [1]
        await r.settle()
        r.origin.values.clear()  # deleted behind our back
        assert r.stack.discard_many([key_of(1)]) == 2
        assert r.stack.locate([key_of(1)]) == [None]
        assert await r.get(1) == [Miss.ABSENT]
        assert len(r.origin.fetched) == 2
        r.publish(1).release()  # the next put brings it everywhere again
        await r.settle()
        assert r.origin.values == {key_of(1): value_of(1, SIZE)}
        assert r.stack.locate([key_of(1)]) == ["dram"]


async def test_a_deadline_is_a_timeout_and_the_fetch_goes_on_for_who_still_waits(rig):
    async with rig() as r:
        r.in_origin(1)
        go = asyncio.Event()

        async def wait(_):
            await go.wait()

        r.origin.before = wait
        patient = asyncio.create_task(r.get(1))
        await asyncio.sleep(0)
        assert await r.get(1, deadline=time.monotonic() + 0.01) == [Miss.TIMEOUT]
        assert await r.get(1, 2, deadline=time.monotonic() - 1, stop_at_miss=False) == [Miss.TIMEOUT] * 2
        go.set()
        assert await patient == [1]
        assert r.origin.fetched == [key_of(1)]
        assert await r.get(1, deadline=time.monotonic() - 1) == [1]  # memory answers at any time


async def test_a_fetch_nobody_waits_for_is_cancelled_and_leaves_no_room_taken(rig):
    async with rig(linger=0) as r:
        r.in_origin(1)
        cancelled = []

        async def wait(want):
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                cancelled.append(want.key)
                raise

        r.origin.before = wait
        assert await r.get(1, deadline=time.monotonic() + 0.01) == [Miss.TIMEOUT]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (cancelled, r.dram.used) == ([key_of(1)], 0)


async def test_when_everything_is_leased_the_rest_is_full(rig):
    async with rig(dram=4 * SIZE) as r:
        r.in_origin(*range(8))
        held = await r.stack.get_many([want_of(n, SIZE) for n in range(4)])
        assert await r.get(4, 5) == [Miss.FULL]
        assert await r.get(0, 1) == [0, 1]
        held[0].release()
        await r.settle()
        assert await r.get(4) == [4]
        for lease in held:
            lease.release()


async def test_a_prefix_longer_than_memory_is_cut_where_memory_ends(rig):
    async with rig(dram=6 * SIZE, fetches=3) as r:
        r.in_origin(*range(20))
        assert await r.get(*range(20)) == [*range(6), Miss.FULL]


async def test_b44_a_thousand_cancelled_reads_leave_no_lease(rig):
    async with rig(dram=8 * SIZE, disk=40 * SIZE) as r:
        await r.on_disk(*range(5))
        r.in_origin(*range(5, 12))

        async def pause(want):
            await asyncio.sleep(0)

        r.origin.before = pause
        for n in range(1000):
            reading = asyncio.create_task(r.stack.get_many([want_of((n + i) % 12, SIZE) for i in range(5)]))
            for _ in range(n % 13):
                await asyncio.sleep(0)
            reading.cancel()
            if n % 3 == 0:
                await asyncio.sleep(0)
                reading.cancel()
            try:
                for lease in await reading:
                    if isinstance(lease, Lease):
                        lease.release()
            except asyncio.CancelledError:
                pass
        await r.settle()
        await asyncio.sleep(0.05)
        assert (r.dram.leases, r.dram._budget.reserved, r.disk._catalog._pinned) == (0, 0, 0)
        assert await r.get(*range(8)) == list(range(8))


async def test_b32_room_for_a_read_is_not_given_away_before_the_read_has_ended(rig, monkeypatch):
    async with rig(dram=2 * SIZE) as r:
        await r.on_disk(1)
        started, go, real = threading.Event(), threading.Event(), os.preadv

        def slow(*args):
            started.set()
            go.wait(10)
            return real(*args)

        monkeypatch.setattr("tiering.slab.os.preadv", slow)
        reading = asyncio.create_task(r.get(1))
        await asyncio.to_thread(started.wait)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading  # its caller is free at once
        assert r.dram.used == SIZE
        assert r.stack.reserve(want_of(2, 2 * SIZE)) is Miss.FULL
        go.set()
        await r.stack._flights.aclose()
        assert r.dram.used == 0


async def test_closing_answers_who_is_waiting(tmp_path):
    async with Movers.open() as movers, DramTier.open("dram", MIB, movers) as dram:
        origin = ScriptedOrigin()
        origin.before = lambda _: asyncio.sleep(10)
        async with Stack.open(dram, None, [origin]) as stack:
            waiting = asyncio.create_task(stack.get_many([want_of(1, SIZE), want_of(2, SIZE)], stop_at_miss=False))
            await asyncio.sleep(0.01)
        assert await waiting == [Miss.UNAVAILABLE] * 2
        assert await stack.get_many([want_of(1, SIZE)]) == [Miss.ABSENT]
        assert (dram.used, dram.leases) == (0, 0)


async def test_names_are_told_apart():
    async with Movers.open() as movers, DramTier.open("dram", MIB, movers) as dram:
        with pytest.raises(ValueError, match="names"):
            async with Stack.open(dram, None, [ScriptedOrigin("a"), ScriptedOrigin("a")]):
                pass


# Writing


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


async def test_without_a_disk_nothing_is_durable_and_origins_still_serve(rig):
    async with rig(disk=None) as r:
        r.in_origin(1)
        assert await r.sources(1) == ["bucket"]
        assert await r.stack.flush([want_of(1, SIZE)]) == [False]
        assert r.stack.locate([key_of(1), key_of(2)]) == ["dram", None]
        r.forget_memory(1)
        assert await r.sources(1) == ["bucket"]


async def test_b40_a_disk_that_refuses_leaves_reads_to_the_bucket(rig, monkeypatch):
    async with rig() as r:
        r.in_origin(1)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("tiering.slab.os.pwritev", full)
            assert await r.sources(1) == ["bucket"]
            await r.settle()
            r.forget_memory(1)
            assert await r.sources(1) == ["bucket"]
            await r.settle()
        assert r.disk.stats.errors >= 2
        r.forget_memory(1)
        assert await r.sources(1) == ["bucket"]
        await r.settle()
        r.forget_memory(1)
        assert await r.sources(1) == ["nvme"]


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
