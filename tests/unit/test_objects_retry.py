"""Retries: what is repeated, how often, and how long."""

import pytest

from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import Denied, Unavailable
from kvstore.objects import (
    ABSENT,
    CREATE,
    OVERWRITE,
    Fault,
    Faults,
    MemoryStore,
    RetryingStore,
    RetrySettings,
    Stored,
    Update,
)


def wrapped(*script, clock=None, **settings):
    faults = Faults(MemoryStore(), list(script))
    return faults, RetryingStore(faults, clock or VirtualClock(), SeededIds(1), RetrySettings(**settings))


@pytest.mark.parametrize("verb", ["get", "head", "copy", "list", "delete", "now"])
async def test_what_is_safe_to_repeat_is_repeated(verb):
    faults, store = wrapped(Fault(action="busy", verb=verb))
    await faults._store.put("k", b"x", CREATE)
    calls = {
        "get": lambda: store.get("k"),
        "head": lambda: store.head("k"),
        "copy": lambda: store.copy("k", "l"),
        "list": lambda: anext(store.list("k")),
        "delete": lambda: store.delete(["k"]),
        "now": store.now,
    }
    assert await calls[verb]() is not None
    assert faults.counts == {verb: 2}


@pytest.mark.parametrize("mode", [CREATE, Update('"e"')], ids=["create", "update"])
@pytest.mark.parametrize("action", ["before", "lost", "busy"])
async def test_a_conditional_put_is_sent_once(mode, action):
    faults, store = wrapped(Fault(action=action, times=9))
    with pytest.raises(Unavailable):
        await store.put("k", b"x", mode)
    assert faults.counts == {"put": 1}


async def test_an_overwrite_is_repeated():
    faults, store = wrapped(Fault(action="lost"))
    assert isinstance(await store.put("k", b"x", OVERWRITE), Stored)
    assert faults.counts == {"put": 2}


async def test_a_listing_goes_on_from_the_last_key():
    faults, store = wrapped(Fault(action="before", verb="list", skip=1))
    for n in range(2100):
        await faults._store.put(f"k{n:04d}", b"", CREATE)
    keys = [meta.key async for page in store.list("k") for meta in page]
    assert keys == [f"k{n:04d}" for n in range(2100)]
    assert faults.counts == {"list": 4}


async def test_b46_requests_never_exceed_twice_the_calls():
    faults, store = wrapped(Fault(action="busy", times=10_000), deadline_s=1e6)
    for _ in range(100):
        with pytest.raises(Unavailable):
            await store.get("k")
    assert len(faults.requests) == 200


async def test_calls_without_trouble_save_up_a_few_retries():
    faults, store = wrapped(saved=3, deadline_s=1e6)
    for _ in range(50):
        await store.get("k")
    faults.script.append(Fault(action="busy", times=10_000))
    with pytest.raises(Unavailable):
        await store.get("k")
    assert len(faults.requests) == 50 + 1 + 3


async def test_all_attempts_together_keep_the_deadline():
    clock = VirtualClock()
    faults, store = wrapped(Fault(action="busy", times=10_000), clock=clock, deadline_s=10.0, saved=1000)
    store._budget._left = 999
    with pytest.raises(Unavailable):
        await store.get("k")
    assert 1.0 < clock.monotonic() <= 10.0
    assert len(faults.requests) > 4


async def test_back_off_grows_and_is_jittered():
    waits = []

    class Recording(VirtualClock):
        async def sleep(self, seconds):
            waits.append(seconds)
            self.advance(seconds)

    _, store = wrapped(Fault(action="busy", times=6), clock=Recording(), first_s=1.0, longest_s=8.0, deadline_s=100.0)
    store._budget._left = 9
    assert await store.get("k") == ABSENT
    assert all(wait < longest for wait, longest in zip(waits, [1, 2, 4, 8, 8, 8], strict=True))
    assert len(set(waits)) == 6


async def test_refusals_are_not_repeated():
    class Denying(MemoryStore):
        asked = 0

        async def head(self, key):
            self.asked += 1
            raise Denied("no") if self.asked == 1 else Unavailable("skewed", kind="clock_skew")

    inner = Denying()
    store = RetryingStore(inner, VirtualClock(), SeededIds(1))
    with pytest.raises(Denied):
        await store.head("k")
    with pytest.raises(Unavailable):
        await store.head("k")
    assert inner.asked == 2
