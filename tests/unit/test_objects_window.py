"""The window of bytes under way: it grows by little while a store carries it, and shrinks by much when the store balks."""

import asyncio
from itertools import pairwise

import pytest

from kvstore.clock import VirtualClock
from kvstore.objects.window import Window, WindowSettings

MIB = 1 << 20
SETTINGS = WindowSettings(first=64 * MIB, least=16 * MIB, step=8 * MIB, pause_s=1.0)


def window(clock, most=256 * MIB):
    return Window(most, 30.0, clock, SETTINGS)


async def carry(bounded, clock, capacity, requests=400, size=8 * MIB, workers=40):
    """Many requests of one size to a store that carries `capacity` bytes a second, and says SlowDown where more than one second's
    worth is under way."""
    left = iter(range(requests))
    under_way, limits, refused = 0, [], 0

    async def worker():
        nonlocal under_way, refused
        for _ in left:
            async with bounded.hold(size, "get"):
                under_way += size
                if under_way > capacity:
                    refused += 1
                    bounded.busy()
                end = clock.monotonic() + size / capacity * 4
                while clock.monotonic() < end:  # noqa: ASYNC110  virtual time moves below
                    await asyncio.sleep(0)
                under_way -= size
            limits.append(bounded.limit)

    tasks = [asyncio.create_task(worker()) for _ in range(workers)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        clock.advance(size / capacity / 5)
    await asyncio.gather(*tasks)
    return limits, refused


async def test_it_grows_step_by_step_while_everything_is_carried_and_somebody_waits():
    clock = VirtualClock()
    bounded = window(clock)
    limits, refused = await carry(bounded, clock, capacity=10_000 * MIB)
    assert refused == 0
    assert limits == sorted(limits)
    assert {b - a for a, b in pairwise(limits)} <= {0, 8 * MIB}
    assert 64 * MIB < bounded.limit <= 256 * MIB


async def test_it_does_not_grow_while_nobody_waits():
    clock = VirtualClock()
    bounded = window(clock)
    await carry(bounded, clock, capacity=10_000 * MIB, workers=2)
    assert bounded.limit == 64 * MIB


async def test_it_settles_about_what_the_store_bears():
    clock = VirtualClock()
    bounded = window(clock)
    limits, refused = await carry(bounded, clock, capacity=100 * MIB, requests=3000)
    settled = limits[len(limits) // 2 :]
    assert refused > 0
    assert 40 * MIB <= min(settled) < max(settled) <= 120 * MIB
    assert bounded.shrunk["busy"] > 2
    assert bounded.shrunk["slow"] == 0


def test_slowdown_halves_it_once_in_a_while_and_never_to_nothing():
    clock = VirtualClock()
    bounded = window(clock)
    bounded.busy()
    bounded.busy()  # of a request sent before the first answer came
    assert bounded.limit == 32 * MIB
    for _ in range(10):
        clock.advance(1.0)
        bounded.busy()
    assert bounded.limit == 16 * MIB
    assert bounded.shrunk == {"busy": 2, "slow": 0}


def test_answers_that_become_slow_make_it_smaller_and_are_then_measured_afresh():
    clock = VirtualClock()
    bounded = window(clock)
    for _ in range(50):
        bounded.answered(2 * MIB, "get", 0.02, 32)
        bounded.answered(2 * MIB, "get", 0.01, 16)  # half as many, half as long
    assert bounded.limit == 64 * MIB
    clock.advance(5.0)
    for _ in range(50):
        bounded.answered(2 * MIB, "get", 5.0, 1)  # one alone says nothing about what many may do
    assert bounded.limit == 64 * MIB
    for _ in range(50):
        bounded.answered(2 * MIB, "get", 0.5, 32)
    assert bounded.limit == 48 * MIB
    assert bounded.shrunk == {"busy": 0, "slow": 1}


def test_a_store_that_is_as_slow_as_ever_is_not_slow():
    clock = VirtualClock()
    bounded = window(clock)
    for _ in range(200):
        clock.advance(1.0)
        bounded.answered(2 * MIB, "get", 3.0, 32)
        bounded.answered(64 * MIB, "get", 60.0)
        bounded.answered(2 * MIB, "put", 9.0, 16)
    for seconds in (0.001, 5.0) * 100:
        bounded.answered(1000, "put", seconds)  # a register, and its rivals
    assert bounded.shrunk == {"busy": 0, "slow": 0}


async def test_a_request_larger_than_a_window_that_shrank_passes_alone():
    clock = VirtualClock()
    bounded = Window(64 * MIB, 30.0, clock, SETTINGS)
    order = []

    async def send(name, size):
        async with bounded.hold(size, "put"):
            order.append(name)

    async with bounded.hold(10 * MIB, "put"):
        large = asyncio.create_task(send("large", 64 * MIB))
        await asyncio.sleep(0)
        bounded.busy()
        assert bounded.limit == 32 * MIB
        await asyncio.sleep(0)
        assert order == []
    await large
    assert order == ["large"]
    assert bounded.gate.held == 0


@pytest.mark.parametrize("most", [1, 8 * MIB])
def test_a_configured_bound_below_the_least_is_kept(most):
    bounded = window(VirtualClock(), most=most)
    assert bounded.limit == most
    bounded.busy()
    assert bounded.limit == most
