"""The faults wrapper itself: a test instrument has to be exact."""

import asyncio

import pytest

from kvstore.clock import VirtualClock
from kvstore.errors import Unavailable
from kvstore.objects import ABSENT, CREATE, OVERWRITE, Crash, Fault, Faults, MemoryStore, RequestLog


async def test_before_is_not_sent_and_lost_is_carried_out():
    store = Faults(MemoryStore(), [Fault(action="before", verb="put"), Fault(action="lost", verb="put")])
    for _ in range(2):
        with pytest.raises(Unavailable):
            await store.put("k", b"x", CREATE)
        store.requests.append(RequestLog("-", "", type(await store._store.head("k")).__name__))
    assert [entry.outcome for entry in store.requests] == ["unavailable", "Absent", "unavailable", "ObjectMeta"]


async def test_a_script_counts_matching_calls_only():
    store = Faults(MemoryStore(), [Fault(action="busy", verb="get", key="heads/*", skip=1, times=2)])
    await store.get("blocks/1")
    await store.get("heads/1")
    for _ in range(2):
        with pytest.raises(Unavailable) as error:
            await store.get("heads/2")
        assert error.value.kind == "store_busy"
    await store.head("heads/2")
    assert await store.get("heads/2") == ABSENT
    assert store.counts == {"get": 5, "head": 1}
    assert store.requests[1] == RequestLog("get", "heads/1", "Absent")
    assert store.requests[2] == RequestLog("get", "heads/2", "store_busy")


@pytest.mark.parametrize(("action", "landed"), [("crash-before", False), ("crash-after", True)])
async def test_a_crash_ends_everything_and_a_restart_finds_what_landed(action, landed):
    inner = MemoryStore()
    store = Faults(inner, [Fault(action=action, verb="put", skip=1)])
    await store.put("first", b"1", CREATE)
    with pytest.raises(Crash):
        await store.put("second", b"2", CREATE)
    for call in (store.get("first"), store.put("third", b"3", CREATE), store.now()):
        with pytest.raises(Crash):
            await call
    again = Faults(inner)
    assert (await again.get("second") != ABSENT) == landed
    assert await again.get("third") == ABSENT
    assert not issubclass(Crash, Exception)


async def test_a_stalled_call_is_carried_out_when_released():
    store = Faults(MemoryStore(), [Fault(action="stall", verb="put")])
    stalled = asyncio.ensure_future(store.put("k", b"late", OVERWRITE))
    await asyncio.sleep(0)
    await store.put("k", b"early", OVERWRITE)
    assert not stalled.done()
    store.release.set()
    await stalled
    assert bytes((await store.get("k")).data) == b"late"


async def test_slow_takes_the_clocks_time():
    clock = VirtualClock()
    store = Faults(MemoryStore(clock), [Fault(action="slow", seconds=30.0)], clock)
    await store.head("k")
    assert clock.monotonic() == 30.0


async def test_corrupt_flips_a_byte_of_the_answer_only():
    inner = MemoryStore()
    store = Faults(inner, [Fault(action="corrupt", verb="get", times=2)])
    await store.put("k", b"abc", CREATE)
    assert bytes((await store.get("k")).data) == b"\x9ebc"
    buffer = bytearray(3)
    assert (await store.get("k", into=memoryview(buffer))).data == b"\x9ebc"
    assert buffer == b"\x9ebc"
    assert bytes((await store.get("k")).data) == b"abc"


async def test_a_listing_counts_its_pages():
    store = Faults(MemoryStore())
    assert [page async for page in store.list("none")] == []
    assert store.counts == {"list": 1}
    for n in range(1001):
        await store._store.put(f"k{n:04d}", b"", CREATE)
    assert [len(page) async for page in store.list("k")] == [1000, 1]
    assert store.counts == {"list": 3}
    store.script.append(Fault(action="before", verb="list", skip=1))
    pages = store.list("k")
    assert len(await anext(pages)) == 1000
    with pytest.raises(Unavailable):
        await anext(pages)


async def test_cancelled_calls_are_logged():
    store = Faults(MemoryStore(), [Fault(action="stall")])
    stalled = asyncio.ensure_future(store.head("k"))
    await asyncio.sleep(0)
    stalled.cancel()
    await asyncio.wait({stalled})
    assert store.requests == [RequestLog("head", "k", "cancelled")]
