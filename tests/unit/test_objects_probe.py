"""The probe refuses every store that breaks one of its promises, and says which."""

import asyncio

import pytest

from kvstore.clock import SeededIds, SystemClock, VirtualClock
from kvstore.errors import Denied, Unavailable, Unsupported
from kvstore.objects import (
    ABSENT,
    OVERWRITE,
    REFUSED,
    Create,
    Faults,
    Got,
    MemoryStore,
    Stored,
    Unchanged,
    Update,
    probe,
)


class IgnoresCreate(MemoryStore):
    async def put(self, key, body, mode):
        return await super().put(key, body, OVERWRITE if isinstance(mode, Create) else mode)


class IgnoresUpdate(MemoryStore):
    async def put(self, key, body, mode):
        return await super().put(key, body, OVERWRITE if isinstance(mode, Update) else mode)


class UpdatesWhatIsAbsent(MemoryStore):
    async def put(self, key, body, mode):
        there = await self.head(key)
        return await super().put(key, body, OVERWRITE if isinstance(mode, Update) and there == ABSENT else mode)


class AnyEtagButForeign(MemoryStore):
    """Takes a swap that names any ETag the key ever had."""

    def __init__(self):
        super().__init__()
        self.old = set()

    async def put(self, key, body, mode):
        done = await super().put(key, body, OVERWRITE if isinstance(mode, Update) and mode.etag in self.old else mode)
        if isinstance(done, Stored):
            self.old.add(done.etag)
        return done


class ChecksThenWrites(MemoryStore):
    """Two winners: the check and the write are two steps."""

    async def put(self, key, body, mode):
        there = await self.head(key)
        await asyncio.sleep(0.01)
        if isinstance(mode, Create) and there != ABSENT:
            return REFUSED
        if isinstance(mode, Update) and (there == ABSENT or there.etag != mode.etag):
            return REFUSED
        return await super().put(key, body, OVERWRITE)


class TwoSwapWinners(ChecksThenWrites):
    async def put(self, key, body, mode):
        if isinstance(mode, Update):
            return await super().put(key, body, mode)
        return await MemoryStore.put(self, key, body, mode)


class StaleReads(MemoryStore):
    def __init__(self):
        super().__init__()
        self.first = {}

    async def get(self, key, **options):
        return self.first.setdefault(key, await super().get(key, **options))


class StaleLists(MemoryStore):
    async def list(self, prefix, *, start_after=""):
        return
        yield


class OtherEtags(MemoryStore):
    async def put(self, key, body, mode):
        done = await super().put(key, body, mode)
        return Stored('"other"') if isinstance(done, Stored) else done


class OneEtagForAll(MemoryStore):
    def _store(self, key, body):
        meta = super()._store(key, body)
        same = type(meta)(meta.key, meta.size, '"0000"', meta.modified)
        self._objects[key] = (body, same)
        return same


class KeepsDeleted(MemoryStore):
    async def delete(self, keys):
        return []


class RefusesDeletes(MemoryStore):
    async def delete(self, keys):
        return list(keys)


class LacksIfMatch(MemoryStore):
    async def put(self, key, body, mode):
        if isinstance(mode, Update):
            raise Unsupported("501")
        return await super().put(key, body, mode)


class RefusesEverything(MemoryStore):
    async def put(self, key, body, mode):
        return REFUSED


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (IgnoresCreate, "If-None-Match where something is was accepted"),
        (IgnoresUpdate, "If-Match with an ETag that never was was accepted"),
        (UpdatesWhatIsAbsent, "If-Match where nothing is was accepted"),
        (AnyEtagButForeign, "If-Match with an older ETag was accepted"),
        (ChecksThenWrites, "3 of 3 simultaneous create writes won"),
        (TwoSwapWinners, "2 of 2 simultaneous update writes won"),
        (StaleReads, "a read right after a write does not show it"),
        (StaleLists, "a listing right after a write does not show it"),
        (OtherEtags, "no swap could name the right one"),
        (OneEtagForAll, "two contents have one ETag"),
        (KeepsDeleted, "a deleted object can still be read"),
        (RefusesDeletes, "it does not delete"),
        (LacksIfMatch, "is not implemented"),
        (RefusesEverything, "If-None-Match where nothing is was refused"),
    ],
)
async def test_b53_an_unsafe_store_is_refused_with_the_reason(broken, said):
    with pytest.raises(Unsupported) as error:
        await probe(broken(), "root/probe/1", SystemClock(), SeededIds(1))
    assert said in error.value.message
    assert error.value.kind == "unsafe_store"
    assert "two writers" in error.value.remedy


async def test_a_safe_store_is_accepted_cheaply_and_left_clean():
    clock = VirtualClock()
    store = Faults(MemoryStore(clock))
    guarantees = await probe(store, "root/probe/1", clock, SeededIds(1))
    assert (guarantees.conditional_get, guarantees.etag_is_digest, guarantees.clock_skew_s) == (True, True, 0.0)
    assert len(store.requests) <= 22
    assert store._store._objects == {}


async def test_it_measures_what_safety_does_not_need():
    class Plain(MemoryStore):
        async def get(self, key, *, if_none_match=None, **options):
            return await super().get(key, **options)

    ahead = VirtualClock()
    ahead.advance(400)
    guarantees = await probe(Plain(ahead), "root/probe/1", VirtualClock(), SeededIds(1))
    assert not guarantees.conditional_get
    assert guarantees.clock_skew_s == 400.0


class Conflicting(MemoryStore):
    """Answers 409 to a write that meets another one; `all_lose` also to that other one, for so many rounds."""

    def __init__(self, all_lose=0):
        super().__init__()
        self.all_lose, self.busy, self.met = all_lose, False, False

    async def put(self, key, body, mode):
        if self.busy:
            self.met = True
            raise Unavailable("409", kind="store_conflict")
        self.busy, self.met = True, False
        await asyncio.sleep(0.005)
        self.busy = False
        if self.met and self.all_lose:
            self.all_lose -= 1
            raise Unavailable("409", kind="store_conflict")
        return await super().put(key, body, mode)


@pytest.mark.parametrize("all_lose", [0, 2])
async def test_a_409_is_a_loser_of_the_race_and_no_broken_promise(all_lose):
    assert (await probe(Conflicting(all_lose), "root/probe/1", SystemClock(), SeededIds(1))).conditional_get


async def test_a_race_that_nobody_ever_wins_is_undecided():
    with pytest.raises(Unavailable) as error:
        await probe(Conflicting(99), "root/probe/1", SystemClock(), SeededIds(1))
    assert error.value.kind == "store_conflict"


async def test_a_store_out_of_reach_is_no_unsafe_store():
    class Forbidden(MemoryStore):
        async def put(self, key, body, mode):
            raise Denied("no rights", kind="access_denied")

    with pytest.raises(Denied):
        await probe(Forbidden(), "root/probe/1", SystemClock(), SeededIds(1))


def test_answers_are_values():
    assert isinstance(Got(memoryview(b""), "e", 0, 0.0), Got)
    assert Unchanged() == Unchanged()
