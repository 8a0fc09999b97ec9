"""Room in the write window: first fit, first come first served, never twice."""

import asyncio
import random  # noqa: TID251  seeded below

import pytest

from kvstore.client.window import MAX_WAITING, PAGE, Extents, Space


def test_first_fit_uses_low_addresses_again():
    extents = Extents(10 * PAGE)
    first, second = extents.take(PAGE), extents.take(3 * PAGE - 5)
    assert (first, second, extents.take(6 * PAGE), extents.take(1)) == (0, PAGE, 4 * PAGE, None)
    extents.give(first, PAGE)
    assert extents.take(2 * PAGE) is None
    extents.give(second, 3 * PAGE - 5)
    assert extents.take(4 * PAGE) == 0


def test_no_two_extents_overlap_and_all_comes_back():
    chosen = random.Random(7)
    extents, out = Extents(64 * PAGE), {}
    for _ in range(3000):
        if out and chosen.random() < 0.5:
            offset = chosen.choice(list(out))
            extents.give(offset, out.pop(offset))
            continue
        size = chosen.randint(1, 9 * PAGE)
        offset = extents.take(size)
        if offset is None:
            continue
        assert offset % PAGE == 0
        assert offset + size <= 64 * PAGE
        assert all(offset + size <= other or other + used <= offset for other, used in out.items())
        out[offset] = size
    for offset, size in out.items():
        extents.give(offset, size)
    assert extents.take(64 * PAGE) == 0


async def test_who_waits_first_is_served_first():
    space = Space(4 * PAGE)
    assert space.take_now(4 * PAGE) == 0
    order = []

    async def want(name, size):
        offset = await space.take(size, 5)
        order.append((name, offset))

    tasks = [asyncio.create_task(want("large", 3 * PAGE)), asyncio.create_task(want("small", PAGE))]
    await asyncio.sleep(0)
    assert space.take_now(PAGE) is None  # nobody overtakes
    space.give(0, 4 * PAGE)
    await asyncio.gather(*tasks)
    assert order == [("large", 0), ("small", 3 * PAGE)]


async def test_waiting_is_bounded_in_time_and_number():
    space = Space(PAGE)
    assert space.take_now(PAGE) == 0
    assert await space.take(PAGE, 0.01) is None
    waiting = [asyncio.create_task(space.take(PAGE, 5)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    assert await space.take(PAGE, 5) is None
    space.close()
    assert await asyncio.gather(*waiting) == [None] * MAX_WAITING


@pytest.mark.parametrize("served", [False, True])
async def test_a_cancelled_wait_gives_its_room_to_the_next(served):
    space = Space(PAGE)
    assert space.take_now(PAGE) == 0
    first, second = asyncio.create_task(space.take(PAGE, 5)), asyncio.create_task(space.take(PAGE, 5))
    await asyncio.sleep(0)
    if served:
        space.give(0, PAGE)  # served, and cancelled before it knows
        first.cancel()
    else:
        first.cancel()
        await asyncio.sleep(0)
        space.give(0, PAGE)
    assert await second == 0
    with pytest.raises(asyncio.CancelledError):
        await first
    space.give(0, PAGE)
    assert space.take_now(PAGE) == 0
