"""A disk tier that several share: a flood of one takes what the others leave, and no more."""

from contextlib import asynccontextmanager
from functools import partial

import pytest

from kvstore.sealing import DiskSeals, MasterKey, MasterKeys
from tiering import DiskTier, Lru, Movers, SecondSight
from tiering.owners import Owners
from tiering.testing import key_of, value_of, want_of

SIZE, ROOM = 10_000, 10
SMALL, LARGE, GONE = 7, 8, 9  # owners


@asynccontextmanager
async def shared(folder, *owners, room=ROOM, **options):
    async with Movers.open() as movers, DiskTier.open(folder, room * SIZE, movers, owners=owners, **options) as tier:
        yield tier


async def put(tier, who, numbers):
    """At once: none of them may go before all are there."""
    return await tier.put_many([(want_of(n, SIZE), memoryview(value_of(n, SIZE))) for n in numbers], who=who)


async def one_by_one(tier, who, numbers):
    for n in numbers:
        assert await put(tier, who, [n]) == [True]


def here(tier):
    return [n for n in range(300) if tier.contains_many([key_of(n)])[0]]


async def test_a_flood_pushes_out_its_own_and_not_those_of_who_has_less(tmp_path):
    async with shared(tmp_path, SMALL, LARGE) as tier:
        await put(tier, SMALL, [1, 2, 3])
        for start in (100, 107):
            assert all(await put(tier, LARGE, range(start, start + 7)))
        assert here(tier) == [1, 2, 3, *range(107, 114)]  # room that the other has no use for is not left empty
        for start in (10, 15):  # who has less takes its even part from who has more, and no more than that
            assert all(await put(tier, SMALL, range(start, start + 5)))
        assert (here(tier)[:5], len(here(tier))) == ([15, 16, 17, 18, 19], ROOM)


async def test_what_one_has_under_way_or_in_use_pushes_out_nothing_of_who_has_less(tmp_path):
    async with shared(tmp_path, SMALL, LARGE) as tier:
        await put(tier, SMALL, range(4))
        assert sum(await put(tier, LARGE, range(100, 150))) == 6
        assert here(tier)[:4] == [0, 1, 2, 3]
        tier.hold(tier.keys()[4:])
        assert await put(tier, LARGE, [200]) == [False]
        assert await put(tier, SMALL, [4]) == [True]
        assert (len(here(tier)), tier.used) == (ROOM, ROOM * SIZE)


async def test_whose_a_value_is_outlives_a_restart(tmp_path):
    async with shared(tmp_path, SMALL, LARGE) as tier:
        await put(tier, SMALL, [1, 2, 3])
        await put(tier, LARGE, range(100, 107))
    async with shared(tmp_path, SMALL, LARGE) as tier:
        await put(tier, LARGE, range(107, 114))
        assert here(tier) == [1, 2, 3, *range(107, 114)]
        assert tier.discard_many([key_of(1)]) == 1
    async with shared(tmp_path, SMALL, LARGE) as tier:
        assert here(tier)[:2] == [2, 3]


@pytest.mark.parametrize("before", [GONE, 0])
async def test_what_is_left_of_somebody_who_is_gone_goes_first(tmp_path, before):
    async with shared(tmp_path, before) as tier:
        await put(tier, before, range(ROOM))
    async with shared(tmp_path, SMALL, LARGE) as tier:
        await put(tier, SMALL, [100, 101])
        await put(tier, LARGE, range(200, 206))
        assert here(tier)[2:] == [100, 101, *range(200, 206)]


async def test_who_has_a_tier_alone_has_all_that_is_found_there_and_the_oldest_goes_first(tmp_path):
    async with shared(tmp_path, SMALL, LARGE) as tier:
        await put(tier, LARGE, [1])
        await put(tier, SMALL, [2])
        await put(tier, LARGE, range(100, 108))
    async with shared(tmp_path, SMALL) as tier:
        await put(tier, SMALL, [3])
        tier.asked([key_of(2)], who=SMALL)
        await put(tier, SMALL, [4])
        assert (here(tier)[:3], len(here(tier))) == ([2, 3, 4], ROOM)


async def test_what_one_was_refused_does_not_make_the_policy_forget_another_s(tmp_path):
    async with shared(tmp_path, SMALL, LARGE, policy=partial(SecondSight, 4)) as tier:
        assert await put(tier, SMALL, [1]) == [False]
        assert await put(tier, LARGE, range(100, 110)) == [False] * 10
        assert await put(tier, SMALL, [1]) == [True]


async def test_what_cannot_come_in_though_all_that_may_go_went_pushes_out_nothing(tmp_path):
    async with shared(tmp_path, SMALL, LARGE) as tier:
        await put(tier, SMALL, range(5))
        await one_by_one(tier, LARGE, range(100, 105))
        tier.hold([key_of(n) for n in (102, 103, 104)])
        large = (want_of(200, 4 * SIZE), memoryview(value_of(200, 4 * SIZE)))
        assert await tier.put_many([large], who=LARGE) == [False]  # two of its own may go; the other has less than it would
        assert (here(tier), tier.used) == ([*range(5), *range(100, 105)], ROOM * SIZE)
        await put(tier, LARGE, [105])
        assert 100 not in here(tier)  # the oldest is the next to go, as before
        assert 101 in here(tier)


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_disk_that_shrank_keeps_what_evictions_would_have_left(tmp_path, sealed):
    seals = DiskSeals(MasterKeys([MasterKey("k", b"k" * 32)])) if sealed else None
    async with shared(tmp_path, SMALL, LARGE, GONE, seals=seals) as tier:
        await put(tier, SMALL, [1, 2])
        await one_by_one(tier, LARGE, range(100, 106))
        await put(tier, GONE, [200, 201])
    async with shared(tmp_path, SMALL, LARGE, room=5, seals=seals) as tier:
        assert here(tier) == [1, 2, 103, 104, 105]


def test_who_has_most_is_found_without_putting_all_in_order():
    compared = []

    class Held(int):
        def __lt__(self, other):
            compared.append(other)
            return int(self) < int(other)

        def __gt__(self, other):
            compared.append(other)
            return int(self) > int(other)

    numbers = range(64)
    owners = Owners(numbers, Lru)
    for number in numbers:
        owners.of(number).held = Held(number * 37 % 64)  # each another, in no order
        owners.of(number).policy.add(bytes([number * 37 % 64]))
    assert owners.victim(None) == bytes([63])
    assert len(compared) < 2 * 64
