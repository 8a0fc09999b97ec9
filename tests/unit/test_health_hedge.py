"""Hedged reads: when a second GET is sent, which one wins, and whose memory is written to."""

import asyncio
from collections import Counter

import pytest
from fakes.clock import HandClock, turns

from kvstore.errors import Corrupt, Unavailable
from kvstore.objects import ABSENT, Got
from kvstore.objects.hedge import HedgeSettings, HedgingStore

SIZE = 1000


class SlowStore:
    """Each GET answers after the next of `delays` on the clock, with its own number in every byte."""

    def __init__(self, clock):
        self.clock, self.delays, self.begun, self.ended = clock, [], 0, []
        self.outcomes = {}
        self.stubborn = 0.0  # a cancelled GET goes on writing for so long before it ends

    async def get(self, key, *, range=None, into=None, if_none_match=None, arrived=None):  # noqa: A002  a store's signature
        self.begun += 1
        number = self.begun
        delay = self.delays.pop(0) if self.delays else 0.01
        try:
            await self.clock.sleep(delay)
        except asyncio.CancelledError:
            if self.stubborn:
                await self.clock.sleep(self.stubborn)
                into[:] = b"\xee" * len(into)
            self.ended.append((number, "cancelled"))
            raise
        self.ended.append((number, "ok"))
        outcome = self.outcomes.get(number)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            return outcome
        into[:] = bytes([number % 256]) * len(into)
        return Got(into, f"e{number}", len(into), 0.0)


class Rig:
    def __init__(self, **settings):
        self.clock, self.counts = HandClock(), Counter()
        self.inner = SlowStore(self.clock)
        self.store = HedgingStore(self.inner, self.clock, self.counts, HedgeSettings(**settings))

    async def begin(self, size=SIZE, **options):
        into = memoryview(bytearray(size))
        call = asyncio.create_task(self.store.get("k", into=into, **options))
        await turns()
        return call, into

    async def warm(self, n=100, seconds=0.1, size=SIZE):
        for _ in range(n):
            self.inner.delays = [seconds]
            call, _ = await self.begin(size)
            await self.clock.advance(seconds)
            await call
        self.inner.begun, self.inner.ended = 0, []


async def test_a_get_past_the_95th_percentile_is_asked_for_again_and_the_faster_one_wins():
    rig = Rig()
    await rig.warm()
    rig.inner.delays = [30.0, 0.01]
    call, into = await rig.begin()
    await rig.clock.advance(0.099)
    assert rig.inner.begun == 1
    await rig.clock.advance(0.002)
    assert rig.inner.begun == 2
    await rig.clock.advance(0.01)
    got = await call
    assert (bytes(got.data), bytes(into), got.etag, got.size) == (b"\x02" * SIZE, b"\x02" * SIZE, "e2", SIZE)
    assert rig.inner.ended == [(2, "ok"), (1, "cancelled")]
    assert (dict(rig.counts), rig.clock.sleepers) == ({"sent": 1, "won": 1}, 0)


async def test_the_first_one_may_still_win_and_its_bytes_stay():
    rig = Rig()
    await rig.warm()
    rig.inner.delays = [0.15, 30.0]
    call, into = await rig.begin()
    await rig.clock.advance(0.15)
    got = await call
    await turns()
    assert (bytes(into), got.etag) == (b"\x01" * SIZE, "e1")
    assert rig.inner.ended == [(1, "ok"), (2, "cancelled")]
    assert dict(rig.counts) == {"sent": 1}


async def test_b32_the_loser_has_really_ended_before_its_memory_holds_the_winners_bytes():
    rig = Rig()
    await rig.warm()
    rig.inner.delays, rig.inner.stubborn = [30.0, 0.01], 5.0
    call, into = await rig.begin()
    await rig.clock.advance(1.0)
    assert not call.done()  # the first GET is cancelled and still writes
    await rig.clock.advance(5.0)
    assert (await call).etag == "e2"
    assert bytes(into) == b"\x02" * SIZE


async def test_b32_a_cancelled_caller_finds_its_memory_free():
    rig = Rig()
    await rig.warm()
    rig.inner.delays, rig.inner.stubborn = [30.0, 30.0], 5.0
    call, _ = await rig.begin()
    await rig.clock.advance(1.0)
    assert rig.inner.begun == 2
    call.cancel()
    await turns()
    assert not call.done()
    await rig.clock.advance(5.0)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert rig.inner.ended == [(1, "cancelled")]
    await rig.clock.advance(5.0)  # the second one writes into memory of its own, and nobody waits for it
    assert rig.inner.ended == [(1, "cancelled"), (2, "cancelled")]


async def test_extra_requests_are_at_most_one_in_twenty():
    rig = Rig()
    await rig.warm(400)
    rig.inner.begun = 0
    for _ in range(400):  # the store turned slow for everybody: hedging must not double its load
        rig.inner.delays = [0.3, 0.3]
        call, _ = await rig.begin()
        await rig.clock.advance(1.0)
        await call
    assert rig.inner.begun == 400 + rig.counts["sent"]
    assert 0 < rig.counts["sent"] <= 4 + 400 * 0.05


async def test_no_get_is_hedged_before_its_size_class_is_known():
    rig = Rig()
    await rig.warm(19)
    await rig.warm(100, size=64 * SIZE)
    rig.inner.delays = [3.0]
    call, _ = await rig.begin()
    await rig.clock.advance(3.0)
    await call
    assert (rig.inner.begun, rig.counts["sent"]) == (1, 0)


async def test_reads_without_memory_of_the_callers_are_passed_on():
    rig = Rig()
    await rig.warm()
    rig.inner.outcomes = {1: ABSENT}
    rig.inner.delays = [30.0]
    call = asyncio.create_task(rig.store.get("k"))
    await turns()
    await rig.clock.advance(30.0)
    assert await call == ABSENT
    assert rig.inner.begun == 1


async def test_memory_for_second_gets_is_bounded():
    rig = Rig(bytes=2 * SIZE)
    await rig.warm()
    rig.inner.delays = [30.0] * 3
    calls = [(await rig.begin())[0] for _ in range(3)]
    rig.inner.delays = [30.0] * 3
    await rig.clock.advance(1.0)
    assert rig.inner.begun == 5
    await rig.clock.advance(30.0)
    await asyncio.gather(*calls)


@pytest.mark.parametrize("failing", [1, 2])
async def test_an_outage_of_one_leaves_the_others_answer(failing):
    rig = Rig()
    await rig.warm()
    rig.inner.delays = [0.2, 0.2]
    rig.inner.outcomes = {failing: Unavailable("reset")}
    call, into = await rig.begin()
    await rig.clock.advance(1.0)
    assert (await call).etag == f"e{3 - failing}"
    assert bytes(into) == bytes([3 - failing]) * SIZE


async def test_both_failing_is_a_failure_and_a_refusal_is_not_waited_over():
    rig = Rig()
    await rig.warm()
    rig.inner.delays, rig.inner.outcomes = [0.2, 0.2], {1: Unavailable("first"), 2: Unavailable("second")}
    call, _ = await rig.begin()
    await rig.clock.advance(1.0)
    with pytest.raises(Unavailable, match="first"):
        await call
    rig.inner.begun, rig.inner.delays, rig.inner.outcomes = 0, [0.2, 30.0], {1: Corrupt("too long")}
    call, _ = await rig.begin()
    await rig.clock.advance(0.2)
    with pytest.raises(Corrupt):
        await call


async def test_closing_ends_losers():
    clock, counts = HandClock(), Counter()
    inner = SlowStore(clock)
    async with HedgingStore.open(inner, clock, counts) as store:
        rig = Rig()
        rig.clock, rig.counts, rig.inner, rig.store = clock, counts, inner, store
        await rig.warm()
        inner.delays, inner.stubborn = [0.15, 30.0], 0.0
        call, _ = await rig.begin()
        await clock.advance(0.15)
        await call
    assert inner.ended == [(1, "ok"), (2, "cancelled")]


async def test_a_caller_cancelled_in_the_moment_the_second_get_wins_is_cancelled():
    rig = Rig()
    await rig.warm()
    rig.inner.delays, rig.inner.stubborn = [30.0, 0.01], 5.0
    call, _ = await rig.begin()
    await rig.clock.advance(1.0)  # the second one has answered, and the first one is being cut off
    call.cancel()
    await rig.clock.advance(10.0)
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_caller_whose_second_get_won_is_not_left_cancelled():
    rig = Rig()
    await rig.warm()
    rig.inner.delays = [30.0, 0.01]

    async def read():
        await rig.store.get("k", into=memoryview(bytearray(SIZE)))
        return asyncio.current_task().cancelling()

    call = asyncio.create_task(read())
    await rig.clock.advance(1.0)
    assert (await call, rig.counts["won"]) == (0, 1)


async def test_a_read_that_is_slow_sooner_is_not_kept_waiting_by_an_earlier_one():
    rig = Rig()
    await rig.warm(seconds=1.0, size=64 * SIZE)
    await rig.warm(seconds=0.1)
    rig.inner.delays = [30.0, 30.0, 0.01]
    large, _ = await rig.begin(64 * SIZE)
    small, _ = await rig.begin()
    await rig.clock.advance(0.2)
    assert (await small).etag == "e3"
    large.cancel()
    await asyncio.wait((large,))
