"""Reading through the hierarchy: the nearest place answers, once for all who ask, and a hole ends the run."""

import asyncio

from tiering import Miss, Reach
from tiering.testing import key_of


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
