"""Registers: typed values that change by compare-and-swap."""

import asyncio

import msgspec
import pytest

from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import Corrupt, Invalid, Unavailable
from kvstore.objects import ABSENT, OVERWRITE, REFUSED, Fault, Faults, MemoryStore, Register, Stored
from kvstore.objects.register import MAX_BYTES


class Value(msgspec.Struct, frozen=True):
    n: int
    text: str = ""


@pytest.fixture
def store():
    return Faults(MemoryStore())


@pytest.fixture
def register(store):
    return Register(store, "heads/a", Value)


async def test_read_create_swap(register):
    assert await register.read() == ABSENT
    first = await register.create(Value(1))
    assert isinstance(first, Stored)
    assert await register.create(Value(2)) == REFUSED
    reading = await register.read()
    assert (reading.value, reading.etag) == (Value(1), first.etag)
    assert isinstance(await register.swap(reading.etag, Value(2)), Stored)
    assert await register.swap(reading.etag, Value(3)) == REFUSED
    assert (await register.read()).value == Value(2)


async def test_an_unchanged_value_comes_without_its_body(register, store):
    await register.create(Value(1))
    known = await register.read()
    assert await register.read(known) is known
    assert store.requests[-1].outcome == "Unchanged"
    await register.swap(known.etag, Value(2))
    assert (await register.read(known)).value == Value(2)


async def test_b41_a_value_that_grew_is_read_whole(register, store):
    await store.put("heads/a", msgspec.json.encode(Value(1)), OVERWRITE)
    known = await register.read()
    longer = Value(2, "x" * 100_000)
    await store.put("heads/a", msgspec.json.encode(longer), OVERWRITE)
    assert (await register.read(known)).value == longer
    assert (await register.read()).value == longer


@pytest.mark.parametrize("body", [b"", b"{", b'{"n":"x"}', b"[1]", b'{"n":1,"text":"\xff"}', b" " * (MAX_BYTES + 1)])
async def test_what_is_no_such_value_is_corrupt(register, store, body):
    await store.put("heads/a", body, OVERWRITE)
    with pytest.raises(Corrupt):
        await register.read()


async def test_a_value_beyond_the_bound_is_not_written(register, store):
    with pytest.raises(Invalid):
        await register.create(Value(1, "x" * MAX_BYTES))
    assert store.counts["put"] == 0


async def test_update_loops_until_it_wins(store):
    clock = VirtualClock()

    async def add(seed):
        register = Register(store, "heads/a", Value)
        for _ in range(5):
            await register.update(lambda value: Value(value.n + 1 if value else 1), clock, SeededIds(seed))

    await asyncio.gather(*map(add, range(8)))
    assert (await Register(store, "heads/a", Value).read()).value == Value(40)
    assert store.counts["put"] > 40  # some were refused, and came again


async def test_update_may_leave_it_as_it_is(register, store):
    assert await register.update(lambda _: None, VirtualClock(), SeededIds(1)) == ABSENT
    await register.create(Value(1))
    assert (await register.update(lambda _: None, VirtualClock(), SeededIds(1))).value == Value(1)
    assert store.counts["put"] == 1


async def test_update_does_not_hide_a_lost_answer(register, store):
    store.script.append(Fault(action="lost", verb="put"))
    with pytest.raises(Unavailable):
        await register.update(lambda value: Value(value.n + 1 if value else 1), VirtualClock(), SeededIds(1))
    assert (await register.read()).value == Value(1)


async def test_update_gives_up_at_its_deadline():
    class Busy(MemoryStore):
        async def put(self, key, body, mode):
            return REFUSED

    clock = VirtualClock()
    with pytest.raises(Unavailable) as error:
        await Register(Busy(), "k", Value).update(lambda _: Value(1), clock, SeededIds(1), deadline_s=5.0)
    assert error.value.kind == "store_conflict"
    assert clock.monotonic() <= 5.0
