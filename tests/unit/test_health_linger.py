"""A slow origin asked with short deadlines: the answer is on time, and the next one is a hit."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from tiering import DramTier, Flights, Lease, Miss, Movers, Stack, StackSettings
from tiering.testing import ScriptedOrigin, key_of, value_of, want_of

SIZE = 10_000


@asynccontextmanager
async def slow_stack(*numbers, dram=4 << 20, **settings):
    """A stack whose origin answers when `go` is set."""
    async with AsyncExitStack() as parts:
        movers = await parts.enter_async_context(Movers.open())
        memory = await parts.enter_async_context(DramTier.open("dram", dram, movers))
        origin = ScriptedOrigin("bucket")
        origin.values = {key_of(n): value_of(n, SIZE) for n in numbers}
        origin.go = asyncio.Event()
        origin.cancelled = []

        async def wait(want):
            try:
                await origin.go.wait()
            except asyncio.CancelledError:
                origin.cancelled.append(want.key)
                raise

        origin.before = wait
        yield await parts.enter_async_context(Stack.open(memory, None, [origin], StackSettings(**settings))), origin
    assert memory.leases == 0


async def get(stack, *numbers, seconds=0.2):
    got = await stack.get_many([want_of(n, SIZE) for n in numbers], deadline=time.monotonic() + seconds)
    for one in got:
        if isinstance(one, Lease):
            one.release()
    return [one if isinstance(one, Miss) else "hit" for one in got]


async def turns(n=20):
    for _ in range(n):
        await asyncio.sleep(0)


async def test_b46_a_slow_store_asked_with_short_deadlines_warms_all_the_same():
    async with slow_stack(*range(10)) as (stack, origin):
        assert await get(stack, *range(10)) == [Miss.TIMEOUT]
        assert stack._flights.lingering == 10  # those behind the first too: they are what the next request needs
        assert await get(stack, *range(10)) == [Miss.TIMEOUT]  # joins them
        origin.go.set()
        await turns()
        assert await get(stack, *range(10), seconds=0) == ["hit"] * 10
        assert sorted(origin.fetched) == sorted(key_of(n) for n in range(10))  # each once
        assert (stack._flights.lingering, stack.dram.leases) == (0, 0)


async def test_what_lingers_is_bounded_by_number_and_bytes_and_the_rest_is_cancelled():
    async with slow_stack(*range(10), linger=3) as (stack, origin):
        assert await get(stack, *range(10)) == [Miss.TIMEOUT]
        await turns()
        assert (stack._flights.lingering, len(origin.cancelled), stack.dram.used) == (3, 7, 3 * SIZE)
    async with slow_stack(*range(10), linger_bytes=2 * SIZE) as (stack, origin):
        assert await get(stack, *range(10)) == [Miss.TIMEOUT]
        await turns()
        assert (stack._flights.lingering, len(origin.cancelled)) == (2, 8)
    async with slow_stack(*range(10), dram=10 * SIZE) as (stack, origin):
        assert await get(stack, *range(10)) == [Miss.TIMEOUT]
        await turns()
        assert stack.dram.used == 2 * SIZE  # a quarter of the memory tier


async def test_a_cancelled_caller_leaves_nothing_behind():
    async with slow_stack(*range(4)) as (stack, origin):
        caller = asyncio.create_task(get(stack, *range(4), seconds=60))
        await turns()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        await turns()
        assert (stack._flights.lingering, len(origin.cancelled), stack.dram.used) == (0, 4, 0)


async def test_closing_cancels_what_lingers():
    async with slow_stack(0) as (stack, origin):
        assert await get(stack, 0) == [Miss.TIMEOUT]
    assert origin.cancelled == [key_of(0)]
    assert stack.dram.used == 0


async def test_a_caller_is_answered_at_its_deadline_though_the_work_cannot_be_interrupted():
    """Such as a read into a buffer on a thread: it is drained behind the caller's back, with its room kept until then."""
    go, ended = asyncio.Event(), []
    flights = Flights(ended.append)

    async def stubborn():
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()
        return "late"

    async with asyncio.timeout(20):
        with pytest.raises(TimeoutError):
            async with flights.join("k", stubborn, seconds=0.01):
                pass
        assert ended == []
        go.set()
        await flights.aclose()
    assert ended == ["late"]


async def test_who_joins_work_that_lingers_makes_room_for_other_work_to_linger():
    go = asyncio.Event()
    flights = Flights(lambda _: None, linger=1, linger_cost=10)

    async def work():
        await go.wait()
        return "done"

    async def join(key, seconds):
        async with flights.join(key, work, seconds=seconds, cost=10) as result:
            return result

    with pytest.raises(TimeoutError):
        await join("a", 0.01)
    patient = asyncio.create_task(join("a", None))
    await turns(2)
    assert flights.lingering == 0
    with pytest.raises(TimeoutError):
        await join("b", 0.01)
    assert flights.lingering == 1
    go.set()
    assert await patient == "done"
    await turns()
    assert flights.lingering == 0


async def test_an_origin_that_is_not_ready_is_not_asked_and_nothing_queues_for_it_or_makes_room():
    async with slow_stack(0, dram=2 * SIZE) as (stack, origin):
        origin.go.set()
        for n in (1, 2):
            slot = stack.reserve(want_of(n, SIZE))
            slot.view[:] = value_of(n, SIZE)
            stack.publish(slot).release()
        await turns()
        origin.up = False
        offered, dropped, overflows = list(origin.offered), stack.stats["bucket"].drops, stack.overflows
        assert await get(stack, 0) == [Miss.UNAVAILABLE]
        assert origin.fetched == []
        assert await get(stack, 1, 2) == ["hit", "hit"]  # no value was evicted for one that could not come
        assert stack.offer(want_of(1, SIZE)) is False
        assert stack.queued == {"bucket": 0}
        assert (origin.offered, stack.stats["bucket"].drops) == (offered, dropped + 1)
        assert stack.overflows == overflows  # dropped, and not for want of room
        origin.up = True
        assert await get(stack, 0, seconds=20) == ["hit"]
