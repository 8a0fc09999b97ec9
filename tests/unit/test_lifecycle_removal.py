"""Dropping all of a namespace or of a tenant: what goes, what stays, and that it may stop anywhere and be started again."""

import asyncio

import pytest

from kvstore.clock import SeededIds
from kvstore.errors import Gone, NotFound, Unavailable
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle.collector import collect
from kvstore.lifecycle.removal import drop_namespace, drop_tenant
from kvstore.model import Head, parse, sealed
from kvstore.objects import OVERWRITE, Fault, Faults
from kvstore.objects.faults import Crash
from kvstore.repo.testing import bodies, broken, commit, opened, tiny, until

OLD, NEW = tiny(), tiny(layers=2)


def blocks_of(memory, namespace):
    return {key for key in bodies(memory) if key.startswith(f"r/blocks/{namespace.id}/")}


def branches(memory, tenant="default"):
    heads = [parse(body, Head, key) for key, body in bodies(memory).items() if key.startswith(f"r/heads/{tenant}/")]
    return sum(len(head.branches) for head in heads)


async def test_all_sessions_of_a_namespace_go_and_collections_free_its_blocks(repo, other, memory, shelf):
    await commit(repo, shelf, "plain", range(8), 0, OLD)
    await commit(repo, shelf, "pinned", range(100, 108), 0, OLD)
    await repo.sessions.pin("default", "pinned")
    await repo.sessions.fork("default", "plain", OLD.id, "main", "fork")
    await repo.sessions.create("default", "empty", OLD)
    await commit(repo, shelf, "both", range(4), 0, OLD)
    await commit(repo, shelf, "both", range(4), 0, NEW)
    (anonymous,) = shelf.fill(OLD, range(200, 204))
    name = BlockName(OLD.id, Shard(), anonymous.prefix_id, 4)
    lease = shelf.lease(name, shelf.held[name])
    assert await repo.uploads.offer(name, OLD, 1, lease)
    lease.release()
    await other.sessions.get("default", "plain")  # another node knows its name and head
    assert len(blocks_of(memory, OLD)) == 5  # "both" begins as "plain" does

    dropped = await drop_namespace(repo, "default", OLD.id)
    assert (dropped.sessions, dropped.families, dropped.failed) == (5, 4, 0)
    for node in (repo, other):
        for session in ("plain", "pinned", "fork", "empty"):
            with pytest.raises(Gone):
                await node.sessions.get("default", session, OLD.id, "main")
        assert (await node.sessions.get("default", "both")).namespace == NEW.id
    assert (await drop_namespace(other, "default", OLD.id)).sessions == 0  # a second one finds nothing

    await collect(repo, now=True)
    assert blocks_of(memory, OLD) == set()
    assert len(blocks_of(memory, NEW)) == 1
    assert broken(bodies(memory), repo.root.keys) == []


async def test_a_dropped_namespace_is_used_again_by_nodes_that_knew_it_and_by_new_ones(repo, memory, clock, shelf):
    """Its fields stay readable: a node that wrote them once never does again."""
    await commit(repo, shelf, "s", range(8), 0, OLD)
    await drop_namespace(repo, "default", OLD.id)
    await collect(repo, now=True)
    assert (await commit(repo, shelf, "s", range(8), 0, OLD)).version == 1
    async with opened(memory, clock, SeededIds(3)) as fresh:
        assert await fresh.namespace(OLD.id) == OLD
        assert (await fresh.sessions.get("default", "s")).tokens == 8
    assert [namespace.id for namespace in await repo.namespaces("default")] == [OLD.id]


async def test_i4_names_dangle_and_a_writer_of_a_dropped_session_is_told(repo, other, memory, shelf):
    await commit(other, shelf, "s", range(8), 0, OLD)
    names = {key for key in bodies(memory) if "/names/" in key}
    await drop_namespace(repo, "default", OLD.id)
    assert {key for key in bodies(memory) if "/names/" in key} == names
    with pytest.raises(Gone):
        await commit(other, shelf, "s", range(12), 1, OLD)


async def test_i9_another_tenant_with_the_same_model_keeps_everything(repo, memory, shelf):
    ann, annabel = tiny("ann"), tiny("annabel")
    for namespace in (ann, annabel):
        for session in ("s", "t"):
            await commit(repo, shelf, session, range(8), 0, namespace)
    before = {key: body for key, body in bodies(memory).items() if "annabel" in key or annabel.id in key}
    assert (await drop_namespace(repo, "ann", annabel.id)).sessions == 0
    dropped = await drop_tenant(repo, "ann")
    assert (dropped.sessions, dropped.families) == (2, 2)
    assert (await repo.sessions.list("ann")).sessions == []
    assert {key: body for key, body in bodies(memory).items() if "annabel" in key or annabel.id in key} == before
    await collect(repo, now=True)
    assert blocks_of(memory, ann) == set()
    assert (await repo.sessions.get("annabel", "t")).tokens == 8


@pytest.mark.parametrize("action", ["crash-before", "crash-after"])
async def test_a_removal_may_die_at_any_swap_and_is_simply_started_again(memory, clock, shelf, action):
    for die_at in range(6):
        async with opened(memory, clock, SeededIds(10 + die_at)) as node:
            for session in "abcdef":
                await commit(node, shelf, session, range(8), 0, OLD)
        dying = Faults(memory, [Fault(action=action, verb="put", key="*/heads/*", skip=die_at)], clock)
        with pytest.raises(Crash):
            async with opened(dying, clock, SeededIds(20 + die_at)) as node:
                await drop_namespace(node, "default", OLD.id)
        left = branches(memory)
        assert 0 <= left <= 6
        async with opened(memory, clock, SeededIds(30 + die_at)) as node:
            assert (await drop_namespace(node, "default", OLD.id)).sessions == left
            assert branches(memory) == 0
            assert (await node.sessions.list("default")).sessions == []


@pytest.mark.parametrize("action", ["lost", "busy"])
async def test_a_swap_whose_answer_is_lost_counts_once(repo, store, shelf, action):
    for session in "abc":
        await commit(repo, shelf, session, range(8), 0, OLD)
    store.script.append(Fault(action=action, verb="put", key="*/heads/*", times=2))
    assert (await drop_namespace(repo, "default", OLD.id)).sessions == 3


async def test_a_store_that_is_away_says_so_and_what_was_dropped_stays_so(repo, store, memory, shelf):
    for session in "abc":
        await commit(repo, shelf, session, range(8), 0, OLD)
    store.script.append(Fault(action="before", verb="list", key="*/heads/*", times=-1))
    with pytest.raises(Unavailable):
        await drop_namespace(repo, "default", OLD.id)
    store.script.clear()
    assert (await drop_namespace(repo, "default", OLD.id)).sessions == 3


async def test_any_number_may_run_and_each_session_is_counted_by_one_of_them(repo, other, shelf):
    for number in range(20):
        await commit(repo, shelf, f"s{number}", range(8), 0, OLD)
    found = await asyncio.gather(*(drop_namespace(node, "default", OLD.id) for node in (repo, other)))
    assert sum(dropped.sessions for dropped in found) == 20


async def test_a_fork_made_between_look_and_swap_is_dropped_too(repo, other, store, shelf, memory):
    await commit(other, shelf, "s", range(8), 0, OLD)
    held = Fault(action="stall", verb="put", key="*/heads/*")
    store.script.append(held)
    dropping = asyncio.create_task(drop_namespace(repo, "default", OLD.id))
    await until(lambda: not held.times)
    await other.sessions.fork("default", "s", OLD.id, "main", "fork")
    store.release.set()
    assert (await dropping).sessions == 2
    assert branches(memory) == 0


async def test_a_commit_between_look_and_manifest_changes_nothing(memory, clock, other, shelf):
    """The manifest that was looked at is gone when it is read: the head has moved on, and is looked at again."""
    store = Faults(memory, clock=clock)
    async with opened(store, clock, history=0) as slow, opened(memory, clock, SeededIds(3), history=0) as node:
        await commit(node, shelf, "s", range(8), 0, OLD)
        held = Fault(action="stall", verb="get", key="*/manifests/*")
        store.script.append(held)
        dropping = asyncio.create_task(drop_namespace(slow, "default", OLD.id))
        await until(lambda: not held.times)
        await commit(node, shelf, "s", range(12), 1, OLD)
        await collect(node, now=True)
        store.release.set()
        assert (await dropping).sessions == 1


async def test_a_head_that_cannot_be_read_keeps_no_other_alive_and_is_counted(repo, memory, shelf):
    for session in "abc":
        await commit(repo, shelf, session, range(8), 0, OLD)
    heads = sorted(key for key in bodies(memory) if "/heads/" in key)
    await memory.put(heads[0], sealed(b'{"v":9}', Head, heads[0]), OVERWRITE)
    lost = next(key for key in bodies(memory) if key.startswith(heads[1].replace("/heads/", "/manifests/")))
    await memory.delete([lost])
    repo.manifests._cache.clear()
    dropped = await drop_namespace(repo, "default", OLD.id)
    assert (dropped.sessions, dropped.failed) == (1, 2)
    assert (await drop_tenant(repo, "default")).sessions == 1  # for a whole tenant nobody has to read what it holds


async def test_a_thousand_and_one_heads_are_dropped_page_by_page(repo, store, shelf, memory):
    for number in range(1001):
        await repo.sessions.create("default", f"s{number}", OLD)
    store.requests.clear()
    assert (await drop_tenant(repo, "default")).sessions == 1001
    assert store.counts["list"] == 2
    assert branches(memory) == 0


async def test_nobody_has_such_a_tenant(repo):
    assert (await drop_tenant(repo, "nobody")).sessions == 0
    with pytest.raises(NotFound):
        await repo.sessions.get("nobody", "s")
