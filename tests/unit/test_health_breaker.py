"""The breaker: when it opens, what passes then, and how it closes by itself."""

import asyncio

import pytest
from fakes.clock import HandClock, turns

from kvstore.clock import SeededIds
from kvstore.errors import Denied, Overloaded, Unavailable
from kvstore.objects import ABSENT, CREATE, OVERWRITE, Fault, Faults, MemoryStore, RetryingStore
from kvstore.objects.breaker import Breaker, BreakerSettings, BreakingStore


class Rig:
    def __init__(self, clock, breaker, faults, store, told):
        self.clock, self.breaker, self.faults, self.store, self.told = clock, breaker, faults, store, told

    async def fail(self, times, action="before", **fault):
        self.faults.script.append(Fault(action=action, times=times, **fault))
        for _ in range(times):
            with pytest.raises(Unavailable) as caught:
                await self.store.get("k")
            assert caught.value.kind != "circuit_open"
        self.faults.script.clear()


@pytest.fixture
async def rig():
    clock, told = HandClock(), []
    breaker = Breaker(clock, SeededIds(1), BreakerSettings())
    faults = Faults(MemoryStore(), clock=clock)
    async with BreakingStore.open(faults, breaker, clock, "probe", told.append) as store:
        yield Rig(clock, breaker, faults, store, told)
    assert clock.sleepers == 0


@pytest.mark.parametrize("action", ["before", "busy"])
async def test_five_failures_in_a_row_open_it_and_then_nothing_is_sent(rig, action):
    await rig.fail(4, action)
    assert await rig.store.get("k") == ABSENT  # an answer in between: the count starts again
    await rig.fail(4, action)
    assert rig.breaker.state == "closed"
    await rig.fail(1, action)
    sent = len(rig.faults.requests)
    calls = [
        lambda: rig.store.get("k"),
        lambda: rig.store.head("k"),
        lambda: rig.store.put("k", b"x", CREATE),
        lambda: rig.store.put("k", b"x", OVERWRITE),
        lambda: rig.store.copy("k", "l"),
        lambda: anext(rig.store.list("k")),
        lambda: rig.store.delete(["k"]),
        rig.store.now,
    ]
    for call in calls:
        with pytest.raises(Unavailable, match="left alone") as caught:
            await call()
        assert caught.value.kind == "circuit_open"
    assert len(rig.faults.requests) == sent
    assert (rig.breaker.state, rig.breaker.opened, rig.breaker.refused) == ("open", 1, len(calls))
    assert "injected" in rig.breaker.reason()  # the reason is the store's own


async def test_half_of_a_full_window_opens_it_too(rig):
    for _ in range(9):
        await rig.fail(1)
        assert await rig.store.get("k") == ABSENT
    assert rig.breaker.state == "closed"  # 18 outcomes: the window is not full
    await rig.store.get("k")
    await rig.fail(1)
    assert rig.breaker.state == "open"


class Answering(MemoryStore):
    error = None

    async def get(self, key, **_):
        raise self.error

    async def head(self, key):
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        Denied("no", kind="access_denied"),
        Denied("no", kind="bad_credentials"),
        Unavailable("clock", kind="clock_skew"),
        Unavailable("bucket", kind="no_bucket"),
        Unavailable("409", kind="store_conflict"),
    ],
    ids=lambda error: error.kind,
)
async def test_a_store_that_answers_is_not_given_up_whatever_it_says(error):
    clock, told, inner = HandClock(), [], Answering()
    breaker, inner.error = Breaker(clock, SeededIds(1)), error
    async with BreakingStore.open(inner, breaker, clock, "probe", told.append) as store:
        for _ in range(50):
            with pytest.raises(type(error)):
                await store.get("k")
    assert breaker.state == "closed"
    assert told == [error] * 50  # but somebody is told


async def test_absent_and_overloaded_are_no_failures():
    clock, inner = HandClock(), Answering()
    breaker, inner.error = Breaker(clock, SeededIds(1)), Overloaded("no room in time")
    async with BreakingStore.open(inner, breaker, clock, "probe") as store:
        for _ in range(50):
            with pytest.raises(Overloaded):
                await store.get("k")
            assert await store.put("k", b"x", OVERWRITE)
    assert breaker.state == "closed"


async def test_it_half_opens_by_itself_with_one_probe_at_a_time_and_closes_on_an_answer(rig):
    await rig.fail(5)
    rig.faults.script += [Fault(action="before", verb="head", times=2), Fault(action="stall", verb="head")]
    waits = []
    for _ in range(3):
        await turns()
        assert rig.breaker.state == "open"
        waits.append(rig.clock.next())
        await rig.clock.advance(rig.clock.next())
    assert all(longest / 2 <= wait <= longest for wait, longest in zip(waits, [1, 2, 4], strict=True))  # jittered, doubling
    assert rig.breaker.state == "half_open"
    with pytest.raises(Unavailable, match="left alone"):
        await rig.store.get("k")  # while a probe is under way nothing else passes
    assert rig.clock.sleepers == 0
    rig.faults.release.set()
    await turns()
    assert rig.breaker.state == "closed"
    assert rig.breaker.reason() == ""
    assert await rig.store.get("k") == ABSENT
    assert rig.faults.counts == {"get": 6, "head": 3}
    assert [entry.key for entry in rig.faults.requests if entry.verb == "head"] == ["probe"] * 3


async def test_the_pause_starts_short_again_after_it_closed(rig):
    for _ in range(2):
        await rig.fail(5)
        await turns()
        assert rig.clock.next() <= 1
        await rig.clock.advance(1)
        assert rig.breaker.state == "closed"


async def test_b46_a_store_that_stays_silent_opens_it_though_every_caller_leaves_early(rig):
    """Look-ups with a deadline of 250 ms never see the store's own timeout."""
    rig.faults.script.append(Fault(action="stall", times=10_000))

    async def look(seconds):
        call = asyncio.create_task(rig.store.head("k"))
        await turns(3)
        await rig.clock.advance(seconds)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    for _ in range(19):
        await look(0.25)
    assert rig.breaker.state == "closed"  # 4.75 s: it may be slow, and nothing worse
    for _ in range(5):
        await look(0.25)
    assert rig.breaker.state == "open"
    assert "nothing was answered" in rig.breaker.reason()


async def test_callers_who_leave_early_say_nothing_while_others_are_answered(rig):
    for _ in range(100):
        rig.faults.script[:] = [Fault(action="stall")]
        call = asyncio.create_task(rig.store.head("k"))
        await turns(3)
        await rig.clock.advance(0.25)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await rig.store.get("k")
    assert rig.breaker.state == "closed"


async def test_answers_to_what_was_sent_before_it_opened_change_nothing(rig):
    rig.faults.script.append(Fault(action="stall"))
    late = asyncio.create_task(rig.store.put("k", b"x", CREATE))
    await turns(3)
    await rig.fail(5)
    rig.faults.release.set()
    assert await late
    assert rig.breaker.state == "open"


async def test_a_retry_ends_at_an_open_breaker(rig):
    """The breaker stands below the retries, so that each attempt asks it."""
    rig.faults.script.append(Fault(action="busy", times=1000))
    store = RetryingStore(rig.store, rig.clock, SeededIds(2))
    store._budget._left = 9
    call = asyncio.create_task(store.get("k"))
    for _ in range(40):
        await turns(5)
        if call.done():
            break
        await rig.clock.advance(rig.clock.next())
    with pytest.raises(Unavailable) as caught:
        await call
    assert caught.value.kind == "circuit_open"
    assert rig.faults.counts["get"] == 5


async def test_a_new_connection_finds_the_breaker_as_it_was_left():
    clock, faults = HandClock(), Faults(MemoryStore())
    breaker = Breaker(clock, SeededIds(1))
    faults.script.append(Fault(action="before", times=5))
    async with BreakingStore.open(faults, breaker, clock, "probe") as store:
        for _ in range(5):
            with pytest.raises(Unavailable):
                await store.get("k")
    async with BreakingStore.open(faults, breaker, clock, "probe") as store:
        with pytest.raises(Unavailable, match="left alone"):
            await store.get("k")
        await turns()
        await clock.advance(1)
        assert await store.get("k") == ABSENT


async def test_reads_under_way_end_when_it_opens_and_have_really_ended(rig):
    rig.faults.script.append(Fault(action="stall", verb="get", times=3))
    waiting = [asyncio.create_task(rig.store.get("k")) for _ in range(3)]
    writing = asyncio.create_task(rig.store.put("w", b"x", OVERWRITE))
    rig.faults.script.append(Fault(action="stall", verb="put"))
    await turns(5)
    await rig.fail(5)
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert outcome.kind == "circuit_open"
    assert [entry.outcome for entry in rig.faults.requests if entry.verb == "get"].count("cancelled") == 3
    assert not writing.done()
    rig.faults.release.set()
    assert await writing


async def test_who_waits_for_a_retry_wakes_when_it_opens(rig):
    store = RetryingStore(rig.store, rig.clock, SeededIds(2), rest=rig.breaker.rest)
    rig.faults.script.append(Fault(action="before", verb="head"))
    call = asyncio.create_task(store.head("k"))
    await turns()
    assert rig.clock.sleepers == 1
    await rig.fail(4)
    with pytest.raises(Unavailable, match="left alone"):
        await call
    assert rig.faults.counts["head"] == 1
