"""Parts of a value that are copied to a device while the rest is on its way to memory: never from bytes under change."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tiering import DramTier, Miss, Movers, Stack
from tiering.device import DeviceTier
from tiering.testing import ScriptedOrigin, key_of, value_of, want_of

pytest.importorskip("torch", reason="the `torch` extra is not installed")

from fakes.device import SIZE, bytes_of, slow_device
from fakes.node import until

HEAD, FIRST, SECOND = 64, 4000, 7000


class Telling(ScriptedOrigin):
    """Runs `script(into, tell)` on a thread for each fetch; its answer is the fetch's."""

    def __init__(self, script):
        super().__init__()
        self.script = script

    async def fetch(self, want, into, tell=None):
        return await self.script(self, want, into, tell)


@pytest.fixture
def slow(monkeypatch):
    return slow_device(monkeypatch)


@asynccontextmanager
async def opened(script, limit=1 << 20):
    origin = Telling(script)
    async with Movers.open() as movers, DramTier.open("dram", 1 << 20, movers) as dram, Stack.open(dram, None, [origin]) as stack:
        cut = (HEAD, (FIRST, SECOND, SIZE))
        opening = DeviceTier.open("device", limit, "cpu", movers.run, arena=dram.memory, cut=lambda _: cut, early=stack.early)
        async with opening as tier:
            yield stack, tier, origin
        assert dram.leases == 0


async def put(into, start, end, data, tell, told):
    def work():
        into[start:end] = data[start:end]
        tell(told)

    await asyncio.to_thread(work)


async def bring(stack, tier, n=1):
    """As an engine would: what a promotion gave, and the lease that was there before, released; whether that one came whole."""
    with tier.bringing([want_of(n, SIZE)]) as (lease,):
        reading = asyncio.create_task(stack.get_many([want_of(n, SIZE)]))
        assert await asyncio.wait_for(lease.arrived(0), 20)
        [got] = await reading
        if isinstance(got, Miss):
            lease.release()
            return got, lease, False
        [more] = await tier.promote_many([(want_of(n, SIZE), got)])
        whole = lease.here
    lease.release()
    return more, lease, whole


async def test_another_attempt_waits_until_what_was_told_has_left(slow):
    data = value_of(1, SIZE)

    async def script(origin, want, into, tell):
        await put(into, 0, FIRST, data, tell, FIRST)
        assert slow.done == 0  # the copy is queued, and was not made
        await asyncio.to_thread(tell, 0)
        assert slow.done == 1
        into[:] = b"!" * SIZE
        await put(into, 0, SECOND, data, tell, SECOND)
        await put(into, SECOND, SIZE, data, tell, SIZE)

    async with opened(script) as (stack, tier, _):
        got, _, whole = await bring(stack, tier)
        assert whole
        assert bytes_of(got) == data
        assert [entry for entry in slow.diary if entry != "mark"] == [FIRST, SECOND - FIRST, SIZE - SECOND]
        got.release()


@pytest.mark.parametrize("end", ["miss", "error"])
async def test_a_fetch_that_fails_gives_its_room_back_when_what_was_told_has_left(slow, end):
    data = value_of(1, SIZE)

    async def script(origin, want, into, tell):
        await put(into, 0, FIRST, data, tell, FIRST)
        if end == "error":
            raise OSError("the wire was cut")
        return Miss.CORRUPT

    async with opened(script) as (stack, tier, _):
        got, lease, _ = await bring(stack, tier)
        assert got is (Miss.CORRUPT if end == "miss" else Miss.UNAVAILABLE)
        assert slow.done == 1
        assert lease.tensor[:FIRST].numpy().tobytes() == data[:FIRST]
        assert (tier.used, stack.dram.used, tier.contains_many([key_of(1)])) == (0, 0, [False])


@pytest.mark.parametrize("twice", [False, True])
async def test_a_fetch_that_is_cancelled_does_too_also_when_it_is_cancelled_again(slow, twice):
    data, told = value_of(1, SIZE), asyncio.Event()

    async def script(origin, want, into, tell):
        await put(into, 0, FIRST, data, tell, FIRST)
        told.set()
        await asyncio.Event().wait()

    async with opened(script) as (stack, tier, _):
        with tier.bringing([want_of(1, SIZE)]) as (lease,):
            reading = asyncio.create_task(stack.get_many([want_of(1, SIZE)]))
            await told.wait()
            reading.cancel()
            if twice:
                await asyncio.sleep(0)
                await stack.aclose()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await until(lambda: not stack.dram.used)
            assert slow.done == 1
        lease.release()
        assert tier.used == 0


async def test_another_value_under_the_key_is_found_out_by_its_head(slow):
    data, other = value_of(1, SIZE), value_of(2, SIZE)

    async def script(origin, want, into, tell):
        await put(into, 0, FIRST, data, tell, FIRST)
        await asyncio.to_thread(tell, 0)
        await put(into, 0, SIZE, other, tell, SIZE)

    async with opened(script) as (stack, tier, _):
        got, _, whole = await bring(stack, tier)
        assert not whole
        assert bytes_of(got) == other  # from memory, which has it whole, into a room of its own
        assert (tier.used, tier.stats.errors) == (SIZE, 1)
        got.release()


async def test_what_comes_to_memory_untold_is_compared_with_what_was_told(slow):
    data, other = value_of(1, SIZE), value_of(2, SIZE)

    async def script(origin, want, into, tell):
        await put(into, 0, FIRST, data, tell, FIRST)
        await asyncio.to_thread(tell, 0)
        into[:] = other

    async with opened(script) as (stack, tier, _):
        got, _, whole = await bring(stack, tier)
        assert (got, whole, tier.used) == (Miss.UNAVAILABLE, False, 0)


async def test_parts_of_a_value_that_nobody_watches_cost_nothing_and_a_late_watch_catches_up(slow):
    data, first, go = value_of(1, SIZE), asyncio.Event(), asyncio.Event()

    async def script(origin, want, into, tell):
        await put(into, 0, FIRST, data, tell, FIRST)
        first.set()
        await go.wait()
        await put(into, FIRST, SECOND, data, tell, SECOND)
        await put(into, SECOND, SIZE, data, tell, SIZE)

    async with opened(script) as (stack, tier, _):
        reading = asyncio.create_task(stack.get_many([want_of(1, SIZE)]))
        await first.wait()
        assert not slow.queue
        with tier.bringing([want_of(1, SIZE)]) as (lease,):
            go.set()
            assert await asyncio.wait_for(lease.arrived(0), 20)
            [got] = await reading
            [more] = await tier.promote_many([(want_of(1, SIZE), got)])
        assert bytes_of(more) == data
        lease.release()
        more.release()
