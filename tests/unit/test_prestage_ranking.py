"""What makes way for what: values brought in ahead of their use, holds on them, and values that were used lately."""

import asyncio
import random  # noqa: TID251  seeded
from contextlib import asynccontextmanager

from fakes.clock import HandClock

from tiering import DramTier, Lease, Miss, Movers, Reach, Stack
from tiering.testing import ScriptedOrigin, key_of, value_of, want_of

SIZE = 4096
ROOM = 8


@asynccontextmanager
async def rig(room=ROOM, origin=None, **options):
    clock = HandClock()
    opening = {"held": 0.5, "recent_s": 60.0, "monotonic": clock.monotonic} | options
    origins = [origin] if origin else []
    async with (
        Movers.open() as movers,
        DramTier.open("dram", room * SIZE, movers, **opening) as dram,
        Stack.open(dram, None, origins, monotonic=clock.monotonic) as stack,
    ):
        yield clock, dram, stack


def put(dram, n, *, ahead=False):
    slot = dram.reserve(want_of(n, SIZE), ahead=ahead)
    if isinstance(slot, Miss):
        return slot
    slot.view[:] = value_of(n, SIZE)
    slot.commit().release()
    return True


def use(dram, *numbers):
    for lease in dram.lease_many([want_of(n, SIZE) for n in numbers]):
        lease.release()


def here(dram, *numbers):
    return [n for n, there in zip(numbers, dram.contains_many([key_of(n) for n in numbers]), strict=True) if there]


def hold(dram, owner, numbers, *, seconds=5.0, yielding=True):
    return dram.hold(owner, [key_of(n) for n in numbers], seconds=seconds, yielding=yielding)


async def test_what_is_ahead_of_its_use_evicts_nothing_that_was_used_lately():
    async with rig(held=1.0) as (clock, dram, _):
        for n in range(ROOM):
            assert put(dram, n)
        clock._monotonic += 59
        use(dram, 0, 1)
        assert put(dram, 10, ahead=True) is Miss.FULL
        clock._monotonic += 2  # 2 to 7 were used 61 s ago, 0 and 1 two seconds ago
        leases = dram.lease_many([want_of(7, SIZE)])
        for n in range(10, 15):
            assert put(dram, n, ahead=True) is True
            assert hold(dram, "a", [n], yielding=False) == 1
        assert here(dram, *range(ROOM)) == [0, 1, 7]
        assert put(dram, 15, ahead=True) is Miss.FULL  # nor what others hold
        leases[0].release()


async def test_a_request_takes_back_all_the_room_that_was_filled_ahead():
    async with rig() as (_, dram, _):
        assert put(dram, 0)
        for n in range(10, 10 + ROOM - 1):
            assert put(dram, n, ahead=True)
        for n in range(1, ROOM):
            assert put(dram, n)
        assert here(dram, *range(ROOM)) == list(range(ROOM))


async def test_held_values_outlast_what_was_not_used_lately_and_go_before_what_was():
    async with rig() as (clock, dram, _):
        for n in range(4):
            assert put(dram, n)
        clock._monotonic += 61
        for n in (10, 11):
            assert put(dram, n, ahead=True)
        assert hold(dram, "a", [10, 11], seconds=100) == 2
        for n in (20, 21):
            assert put(dram, n)
        for n in (22, 23, 24, 25):  # in the place of 0 to 3
            assert put(dram, n)
        assert here(dram, 0, 1, 2, 3, 10, 11) == [10, 11]
        assert put(dram, 26)
        assert here(dram, 10, 11, *range(20, 27)) == [10, *range(20, 27)]  # the end of a prefix goes before its beginning
        assert put(dram, 27)
        assert here(dram, 10, 11, *range(20, 28)) == list(range(20, 28))
        assert dram.held == 0
        assert put(dram, 28)  # nothing is held any more: the least recently used goes
        assert here(dram, *range(20, 29)) == list(range(21, 29))


async def test_what_yields_goes_before_other_holds_and_fills_half_of_what_may_be_held():
    async with rig() as (_, dram, _):
        for n in range(4):
            assert put(dram, n, ahead=True)
        assert hold(dram, "speculative", [0, 1, 2]) == 2  # 4 of 8 may be held
        assert hold(dram, "tool", [2, 3], yielding=False) == 2
        assert dram.held == 4 * SIZE
        for n in range(10, 16):
            assert put(dram, n)
        assert here(dram, 0, 1, 2, 3) == [2, 3]
        assert put(dram, 16)
        assert here(dram, 2, 3) == [2]


async def test_a_use_ends_a_hold_and_a_read_ahead_is_no_use():
    async with rig() as (_, dram, stack):
        for n in (0, 1):
            assert put(dram, n, ahead=True)
        assert hold(dram, "a", [0, 1]) == 2
        for ahead, held in ((True, 2), (False, 1)):
            (lease,) = await stack.get_many([want_of(0, SIZE)], reach=Reach.DRAM, ahead=ahead)
            assert dram.held == held * SIZE
            lease.release()
        for n in range(10, 10 + ROOM - 2):
            assert put(dram, n)
        assert put(dram, 30)  # 0 was used, as lately as the others: what is held goes first
        assert here(dram, 0, 1) == [0]


async def test_a_hold_ends_in_time_and_its_values_are_the_next_to_go_unless_they_were_used_lately():
    async with rig() as (clock, dram, _):
        assert put(dram, 0)
        assert put(dram, 1, ahead=True)
        assert hold(dram, "a", [0, 1], seconds=5) == 2
        clock._monotonic += 4.9
        assert dram.held == 2 * SIZE
        clock._monotonic += 0.2
        assert dram.held == 0
        for n in range(10, 10 + ROOM - 1):
            assert put(dram, n)
        assert here(dram, 0, 1) == [0]


async def test_letting_go_and_demoting_make_values_the_next_to_go_the_last_of_a_prefix_first():
    async with rig() as (_, dram, _):
        for n in range(ROOM):
            assert put(dram, n)
        assert hold(dram, "a", [4, 5], yielding=False) == 2
        dram.let_go("a")
        dram.let_go("a")
        assert dram.held == 0
        leases = dram.lease_many([want_of(7, SIZE)])
        dram.demote([key_of(n) for n in (2, 3, 7, 99)])
        leases[0].release()
        assert put(dram, 10, ahead=True)  # demoted: as if it had never been used
        assert here(dram, 2, 3, 7) == [2, 7]
        assert put(dram, 11)
        assert here(dram, 2, 3, 7) == [2, 7]  # 10 was never used either, and came last
        assert put(dram, 12)
        assert here(dram, 2, 3, 7) == [7]


async def test_a_longer_hold_takes_over_and_what_is_leased_can_be_held():
    async with rig() as (clock, dram, _):
        assert put(dram, 0, ahead=True)
        assert hold(dram, "short", [0], seconds=5) == 1
        assert hold(dram, "long", [0], seconds=50) == 1
        assert hold(dram, "short", [0], seconds=5) == 1
        dram.let_go("short")
        clock._monotonic += 20
        assert dram.held == SIZE
        dram.let_go("long")
        assert dram.held == 0
        lease = dram.lease(want_of(0, SIZE))
        assert hold(dram, "a", [0, 1]) == 1
        lease.release()
        assert dram.held == SIZE
        dram.discard_many([key_of(0)])
        assert dram.held == 0


async def test_a_request_that_meets_a_fetch_ahead_shares_it_or_makes_room_itself():
    origin = ScriptedOrigin()
    for n in (50, 51):
        origin.values[key_of(n)] = value_of(n, SIZE)
    gate = asyncio.Event()

    async def wait(_):
        await gate.wait()

    origin.before = wait
    async with rig(origin=origin) as (_, dram, stack):
        ahead = asyncio.create_task(stack.get_many([want_of(50, SIZE)], ahead=True))
        await asyncio.sleep(0.01)
        now = asyncio.create_task(stack.get_many([want_of(50, SIZE)]))
        await asyncio.sleep(0.01)
        gate.set()
        for (lease,) in await asyncio.gather(ahead, now):
            assert bytes(lease.view) == value_of(50, SIZE)
            lease.release()
        assert len(origin.fetched) == 1
        for n in range(ROOM - 1):
            assert put(dram, n)
        (got,) = await stack.get_many([want_of(51, SIZE)], ahead=True)
        assert got is Miss.FULL  # 50 was used by the request
        (lease,) = await stack.get_many([want_of(51, SIZE)])
        lease.release()
        assert dram.leases == 0


async def test_random_holds_leases_and_evictions_keep_the_accounts():
    dice = random.Random(7)
    async with rig(room=16) as (clock, dram, _):
        leases: list[Lease] = []
        for _ in range(3000):
            n, owner = dice.randrange(30), f"owner {dice.randrange(4)}"
            match dice.randrange(8):
                case 0 | 1:
                    put(dram, n, ahead=dice.random() < 0.5)
                case 2:
                    got = dram.lease_many([want_of(n, SIZE)], use=dice.random() < 0.5)[0]
                    leases += [got] if isinstance(got, Lease) else []
                case 3 | 4:
                    if leases:
                        leases.pop(dice.randrange(len(leases))).release()
                case 5:
                    hold(
                        dram, owner, [dice.randrange(30) for _ in range(4)], seconds=dice.random() * 9, yielding=dice.random() < 0.5
                    )
                case 6:
                    dram.let_go(owner)
                    dram.demote([key_of(n)])
                case _:
                    clock._monotonic += dice.random() * 5
                    dram.discard_many([key_of(n)])
            assert dram.used == dram.count * SIZE + sum(_gone(dram, leases)) <= dram.limit
            assert 0 <= dram.held <= min(dram.limit // 2, dram.count * SIZE)
        for lease in leases:
            lease.release()
        for owner in range(4):
            dram.let_go(f"owner {owner}")
        assert (dram.held, dram.leases, dram.used) == (0, 0, dram.count * SIZE)
        await dram.evict(dram.limit)
        assert dram.used == 0


def _gone(dram, leases):
    """Bytes of values that were discarded while somebody read them."""
    return {id(one): one.size for one in {lease._release.args[0] for lease in leases if lease._release.args[0].gone}}.values()
