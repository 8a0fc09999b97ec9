"""What makes a bucket a root, and what makes everybody stop (R9, I10)."""

from unittest.mock import AsyncMock

import pytest

from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import Corrupt, NotFound, Unavailable, Unsupported
from kvstore.model import Epoch, Format, Head, dump, sealed
from kvstore.objects import CREATE, OVERWRITE, Fault, Faults, MemoryStore
from kvstore.repo.testing import Shelf, bodies, commit, opened, tiny


async def test_an_empty_root_is_made_once_and_opened_ever_after():
    store = MemoryStore()
    async with opened(store) as repo:
        assert (await repo.epochs.read()).epoch == 1
    made = bodies(store)
    assert set(made) == {"r/format.json", "r/epoch"}
    async with opened(store, ids=SeededIds(2)):
        assert bodies(store) == made


async def test_two_nodes_that_make_one_root_agree_on_it():
    store = MemoryStore()
    async with opened(store, ids=SeededIds(1)) as one, opened(store, ids=SeededIds(2)) as two:
        assert (await one.epochs.read()).epoch == (await two.epochs.read()).epoch == 1


@pytest.mark.parametrize("key", ["r/format.json", "r/epoch"])
async def test_a_root_that_lost_a_register_stops_everybody(key):
    store, clock = MemoryStore(), VirtualClock()
    namespace, shelf = tiny(), Shelf()
    async with opened(store, clock) as repo:
        await commit(repo, shelf, "s", range(8), 0, namespace)
        await store.delete([key])
        if key == "r/format.json":
            with pytest.raises(Unavailable) as gone:
                await repo.check()
        else:
            with pytest.raises(Unavailable) as gone:
                await commit(repo, shelf, "another", range(8), 0, namespace)
        assert gone.value.kind == "store_not_initialised"
    with pytest.raises(Unavailable) as reopened:
        async with opened(store, clock):
            pass
    assert reopened.value.kind == "store_not_initialised"


async def test_i10_a_newer_format_is_refused_and_never_guessed():
    store = MemoryStore()
    await store.put("r/format.json", sealed(b'{"v":3,"store_id":"x","created":0}', Format, "format.json"), CREATE)
    await store.put("r/epoch", dump(Epoch(epoch=1), "epoch"), CREATE)
    with pytest.raises(Unsupported) as refused:
        async with opened(store):
            pass
    assert refused.value.kind == "unknown_format"


async def test_i10_a_newer_head_is_refused():
    store, namespace, shelf = MemoryStore(), tiny(), Shelf()
    async with opened(store) as repo:
        await commit(repo, shelf, "s", range(8), 0, namespace)
        key = next(key for key in bodies(store) if key.startswith("r/heads/"))
        await store.put(key, sealed(b'{"v":2,"branches":[]}', Head, key), OVERWRITE)
        with pytest.raises(Unsupported) as refused:
            await repo.sessions.get("default", "s", namespace.id)
        assert refused.value.kind == "unknown_format"


async def test_a_prefix_that_holds_something_else_is_not_taken_over():
    store = MemoryStore()
    await store.put("r/holiday.jpg", b"beach", CREATE)
    with pytest.raises(Unavailable) as refused:
        async with opened(store):
            pass
    assert refused.value.kind == "store_not_initialised"
    assert set(bodies(store)) == {"r/holiday.jpg"}


async def test_init_stopped_halfway_is_finished_by_the_next():
    store = MemoryStore()
    await store.put("r/epoch", dump(Epoch(epoch=1), "epoch"), CREATE)
    async with opened(store) as repo:
        assert (await repo.epochs.read()).epoch == 1
    assert "r/format.json" in bodies(store)


async def test_without_init_an_empty_root_is_left_alone():
    store = MemoryStore()
    with pytest.raises(Unavailable):
        async with opened(store, init=False):
            pass
    assert bodies(store) == {}


async def test_r9_an_epoch_that_went_back_stops_this_node():
    store = MemoryStore()
    async with opened(store) as repo:
        await repo.epochs.advance(await repo.epochs.read())
        await store.put("r/epoch", dump(Epoch(epoch=1), "epoch"), OVERWRITE)
        with pytest.raises(Corrupt, match="went back from 2 to 1"):
            await repo.epochs.read()


@pytest.mark.parametrize("action", ["lost", "before"])
async def test_r9_the_epoch_is_advanced_once_when_an_answer_is_lost(action):
    store = MemoryStore()
    async with opened(store) as repo:
        faults = Faults(store, [Fault(action=action, verb="put", key="*/epoch")])
        repo.root.store = faults
        assert (await repo.epochs.advance(await repo.epochs.read())).epoch == 2


async def test_the_stores_clock_is_asked_once_in_ten_minutes():
    clock, shop = VirtualClock(1000.0), VirtualClock(5000.0)
    store = Faults(MemoryStore(shop), clock=clock)
    async with opened(store, clock) as repo:
        asked = store.counts["now"]
        clock.advance(60)
        clock.set(0)  # an operator's jump of this host's clock is not noticed
        assert await repo.root.now() == 5060.0
        assert store.counts["now"] == asked
        clock.advance(600)
        shop.advance(661)
        assert await repo.root.now() == 5661.0
        assert store.counts["now"] == asked + 1


async def test_namespaces_are_kept_readable_and_per_tenant():
    store = MemoryStore()
    async with opened(store) as repo, opened(store, ids=SeededIds(2)) as other:
        mine, theirs = tiny("a"), tiny("b")
        for namespace in (mine, theirs):
            await repo.put_namespace(namespace)
        await store.put(f"r/namespaces/{'0' * 64}.json", mine.canonical_json(), CREATE)  # not the fields of that id
        await store.put("r/namespaces/readme.txt", b"hello", CREATE)
        assert await other.namespaces("a") == [mine]
        assert await other.namespace(theirs.id) == theirs
        assert await other.namespace(tiny("c").id) is None
        with pytest.raises(Corrupt):
            await other.namespace("0" * 64)


async def test_a_namespace_that_cannot_be_read_keeps_no_other_from_being_found():
    mine, theirs, made = tiny("a"), tiny("b"), MemoryStore()
    async with opened(made) as repo:
        for namespace in (mine, theirs):
            await repo.put_namespace(namespace)
    store = Faults(made)
    async with opened(store, ids=SeededIds(2)) as repo:
        store.script.append(Fault(action="before", verb="get", key=f"*/namespaces/{theirs.id}*", times=-1))
        assert await repo.namespaces("a") == [mine]
        assert await repo.namespaces("b") == []
    async with opened(store, ids=SeededIds(3)) as repo:
        store.script.append(Fault(action="before", verb="get", key="*/namespaces/*", times=-1))
        with pytest.raises(Unavailable):  # that is the store: it is not that there are none
            await repo.namespaces("a")


async def test_while_nothing_is_sent_to_the_store_it_is_not_said_that_there_are_none(monkeypatch):
    mine, theirs, made = tiny("a"), tiny("b"), MemoryStore()
    async with opened(made) as repo:
        for namespace in (mine, theirs):
            await repo.put_namespace(namespace)
    async with opened(made, ids=SeededIds(2)) as repo:
        assert await repo.namespace(theirs.id) == theirs
        refused = AsyncMock(side_effect=Unavailable("the breaker is open", kind="circuit_open"))
        monkeypatch.setattr(repo.root.store, "get", refused)
        with pytest.raises(Unavailable):
            await repo.namespaces("a")


async def test_a_session_that_never_was_is_not_found():
    async with opened(MemoryStore()) as repo:
        with pytest.raises(NotFound):
            await repo.sessions.get("default", "nobody", tiny().id, "main")
        with pytest.raises(NotFound):
            await repo.sessions.get("default", "nobody")
