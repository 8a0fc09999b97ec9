"""The device tier under attack: whatever fails, ends early or comes twice, no room and no lease is lost, and no byte is wrong."""

import asyncio
import threading

import pytest

from tiering import Miss
from tiering.device import DeviceTier
from tiering.early import Early
from tiering.testing import key_of, value_of, want_of
from tiering.upload import Source

pytest.importorskip("torch", reason="the `torch` extra is not installed")

from fakes.device import SIZE, bytes_of, leased, slow_device, tiers
from fakes.node import until


def cut(want):
    return 0, (want.size * 2 // 5, want.size * 7 // 10, want.size)


@pytest.fixture
def slow(monkeypatch):
    return slow_device(monkeypatch)


async def use(memory, tier, n, size=SIZE):
    """Bring a value up and look at it."""
    (got,) = await tier.promote_many(await leased(memory, n, size=size))
    assert bytes_of(got) == value_of(n, size)
    got.release()


async def test_what_is_leased_outlives_eviction_discarding_and_a_working_set_larger_than_the_tier(slow):
    async with tiers(3 * SIZE, cut=cut) as (memory, tier):
        (kept,) = await tier.promote_many(await leased(memory, 0))
        for turn in range(3):
            for n in range(1, 9):
                await use(memory, tier, n)
            assert await tier.evict(3 * SIZE) == 2 * SIZE
            assert tier.discard_many([key_of(0)]) == 0
            assert tier.used == tier.allocated == SIZE
            assert bytes_of(kept) == value_of(0, SIZE), turn
        kept.release()
        assert await tier.evict(SIZE) == SIZE
        assert (tier.used, tier.allocated) == (0, 0)


async def test_two_layouts_share_a_tier_and_neither_gets_the_others_room(slow):
    async with tiers(4 * SIZE, cut=cut) as (memory, tier):
        for turn in range(20):
            await use(memory, tier, turn % 3, SIZE)
            await use(memory, tier, 10 + turn % 5, SIZE - 1000 * (turn % 4))
            assert tier.used <= tier.allocated <= tier.limit


async def test_a_key_of_another_size_takes_the_place_of_the_old_value_but_not_of_one_that_comes(slow):
    async with tiers(1 << 20, cut=cut) as (memory, tier):
        (old,) = await tier.promote_many(await leased(memory, 1))
        memory.discard_many([key_of(1)])
        slow.gate = threading.Event()
        first = asyncio.create_task(tier.promote_many(await leased(memory, 1, size=500)))
        await asyncio.to_thread(slow.entered.wait, 20)
        with tier.bringing([want_of(1, 700)]) as found:
            assert found == [Miss.UNAVAILABLE]
        slow.gate.set()
        (new,) = await first
        assert (bytes_of(old), bytes_of(new)) == (value_of(1, SIZE), value_of(1, 500))
        old.release()
        assert tier.used == 500
        new.release()


async def test_a_cancelled_promotion_gives_its_room_back_when_its_copies_are_queued(slow):
    async with tiers(2 * SIZE, cut=cut) as (memory, tier):
        slow.gate = threading.Event()
        task = asyncio.create_task(tier.promote_many(await leased(memory, 1, 2)))
        await asyncio.to_thread(slow.entered.wait, 20)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()  # a thread is at it
        slow.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tier.used == 0
        for n in (3, 4, 1):
            await use(memory, tier, n)
        await until(lambda: not memory.leases)


async def test_one_of_two_that_bring_a_value_gives_up_and_the_other_gets_it(slow):
    async with tiers(1 << 20, cut=cut) as (memory, tier):
        slow.gate = threading.Event()
        first = asyncio.create_task(tier.promote_many(await leased(memory, 1)))
        await asyncio.to_thread(slow.entered.wait, 20)
        second = asyncio.create_task(tier.promote_many(await leased(memory, 1)))
        await asyncio.sleep(0)
        first.cancel()
        slow.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        (got,) = await second
        assert bytes_of(got) == value_of(1, SIZE)
        assert slow.diary.count(4000) == 1
        got.release()
        assert tier.used == SIZE


@pytest.mark.parametrize("breaks_at", range(1, 6))
async def test_a_copy_that_fails_in_the_middle_of_a_block_is_a_miss_and_the_room_is_used_again(slow, breaks_at):
    async with tiers(2 * SIZE, cut=cut) as (memory, tier):
        real, calls = slow.copy, []

        def copy(target, source):
            calls.append(1)
            if len(calls) == breaks_at:
                raise RuntimeError("the device was lost")
            real(target, source)

        slow.copy = copy
        assert await tier.promote_many(await leased(memory, 1, 2)) == [Miss.UNAVAILABLE] * 2
        assert (tier.used, tier.stats.errors, tier.stats.last_error) == (0, 1, "the device was lost")
        for n in (3, 4):
            await use(memory, tier, n)
        await until(lambda: not memory.leases)


@pytest.mark.parametrize("broken", ["copy", "mark", "in_use", "after", "wait", "passed"])
async def test_no_lease_stays_behind_whichever_call_of_the_device_fails(slow, broken):
    async with tiers(2 * SIZE, cut=cut) as (memory, tier):
        got = await tier.promote_many(await leased(memory, 1, 2))
        first = got[0]
        first.synchronize()
        first.release()
        slow.broken = {broken}
        more = await tier.promote_many(await leased(memory, 3))
        for lease in [*got, *more]:
            if not isinstance(lease, Miss):
                lease.release()
        await until(lambda: not memory.leases)
        slow.broken = set()
        left = tier.used // SIZE
        assert tier.discard_many(list(map(key_of, range(5)))) == left
        assert tier.used == 0
        for n in (5, 6, 7):
            await use(memory, tier, n)


async def test_closing_waits_for_the_thread_that_copies_and_what_comes_later_is_a_miss(slow):
    async with tiers(1 << 20, cut=cut) as (memory, tier):
        slow.gate = threading.Event()
        task = asyncio.create_task(tier.promote_many(await leased(memory, 1)))
        await asyncio.to_thread(slow.entered.wait, 20)
        closing = asyncio.create_task(tier.aclose())
        await asyncio.sleep(0.02)
        assert slow.registered
        assert not closing.done()
        slow.gate.set()
        await closing
        assert not slow.registered
        assert await task == [Miss.UNAVAILABLE]
        assert await tier.promote_many(await leased(memory, 2)) == [Miss.UNAVAILABLE]
        assert (tier.used, tier.allocated) == (0, 0)
        await until(lambda: not memory.leases)


async def test_leases_on_what_still_comes_end_when_the_tier_is_closed(slow):
    async with tiers(1 << 20, cut=cut) as (_, tier):
        with tier.bringing([want_of(1, SIZE)]) as (lease,):
            waiting = asyncio.create_task(lease.arrived(0))
            await asyncio.sleep(0)
            await tier.aclose()
            assert await asyncio.wait_for(waiting, 20) is False
        with pytest.raises(ValueError, match="not on its way"):
            lease.wait(0)
        lease.release()
        lease.release()
        assert (tier.used, tier.allocated) == (0, 0)
        with pytest.raises(ValueError, match="released"):
            await lease.arrived(0)


async def test_memory_is_never_left_registered_however_often_closing_is_cancelled(slow):
    async with tiers(1 << 20, cut=cut) as (memory, tier):
        (lease,) = await tier.promote_many(await leased(memory, 1))
        slow.gate = threading.Event()
        busy = asyncio.create_task(tier.promote_many(await leased(memory, 2)))
        await asyncio.to_thread(slow.entered.wait, 20)
        closing = asyncio.create_task(tier.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        slow.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not slow.registered
        await busy
        lease.release()


async def test_opening_that_is_cancelled_while_it_registers_unregisters(slow):
    registering, go = threading.Event(), threading.Event()

    def register(memory):
        registering.set()
        assert go.wait(20)
        slow.registered = True
        return True

    slow.register = register

    async def run(fn, *args):
        work = asyncio.get_running_loop().run_in_executor(None, fn, *args)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait((work,))
            raise

    async def opening():
        async with DeviceTier.open("device", SIZE, "cpu", run, arena=memoryview(bytearray(4096))):
            pytest.fail("it was cancelled")

    task = asyncio.create_task(opening())
    await asyncio.to_thread(registering.wait, 20)
    task.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not slow.registered


async def test_who_fails_while_it_brings_leaves_nothing(slow):
    async with tiers(2 * SIZE, cut=cut) as (_, tier):

        def fail():
            with tier.bringing([want_of(n, SIZE) for n in (1, 2, 3)]) as found:
                assert (tier.used, found[2]) == (2 * SIZE, Miss.FULL)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert (tier.used, tier._early.watching(key_of(1))) == (0, ())


async def test_a_part_told_after_the_value_was_given_up_never_reaches_its_room(slow):
    async with tiers(SIZE, cut=cut) as (memory, tier):
        with tier.bringing([want_of(1, SIZE)]) as (lease,):
            cargo = lease.value.cargo
            lease.release()
        await use(memory, tier, 2)
        assert not tier._uploads.advance(cargo, Source(memoryview(value_of(1, SIZE))), 4000)  # by a thread that slept on the way
        (again,) = await tier.get_many([want_of(2, SIZE)])
        slow.close()
        assert bytes_of(again) == value_of(2, SIZE)
        again.release()


async def test_a_device_that_fails_while_a_part_is_told_costs_the_device_the_block_and_nobody_else(slow):
    early = Early()
    async with tiers(2 * SIZE, cut=cut, early=early) as (memory, tier):
        with tier.bringing([want_of(1, SIZE)]) as (lease,):
            (watch,) = early.watching(key_of(1))
            slow.broken = {"copy"}
            watch.told(memoryview(value_of(1, SIZE)), -1, 4000)
            assert await asyncio.wait_for(lease.arrived(0), 20) is False
            slow.broken = set()
            assert (tier.stats.errors, early.watching(key_of(1))) == (1, ())
        lease.release()
        await use(memory, tier, 1)
