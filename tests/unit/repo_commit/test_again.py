"""Commits that are repeated, late or stale: once, and never into a later session of that name."""

import asyncio

import pytest
from fakes.commits import NS, blocks_of, head_of
from fakes.sealed import either

from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import Conflict, Gone
from kvstore.model import Head, parse
from kvstore.objects import Fault
from kvstore.repo.testing import bodies, commit, opened, until


@either
async def test_a_commit_with_its_write_id_repeated_takes_effect_once(repo, other, shelf, memory):
    await commit(repo, shelf, "s", range(8), 0, NS)
    first = await commit(repo, shelf, "s", range(16), 1, NS, write_id="a" * 32)
    await commit(other, shelf, "s", [*range(8), 9, 9, 9, 9], 2, NS)  # an edit: what was committed is only in the history now
    again = await commit(repo, shelf, "s", range(16), 1, NS, write_id="a" * 32)
    assert (again.version, again.tokens) == (first.version, 16) == (2, 16)
    assert head_of(memory).branches.popitem()[1].seq == 3


async def test_one_write_id_for_two_sessions_of_a_family_is_two_commits(repo, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await repo.sessions.fork("default", "s", NS.id, "main", "t")
    for session in ("s", "t"):
        assert (await commit(repo, shelf, session, range(12), 1, NS, write_id="b" * 32)).version == 2
        assert (await repo.sessions.get("default", session, NS.id)).tokens == 12


async def test_a_create_repeated_with_its_write_id_is_one_session(repo, other, shelf, memory):
    for node in (repo, other):
        receipt = await commit(node, shelf, "s", range(8), 0, NS, write_id="c" * 32)
        assert receipt.version == 1
    assert len([key for key in bodies(memory) if "/heads/" in key]) == 1


async def test_a_commit_that_landed_before_the_session_was_deleted_does_not_bring_it_back(repo, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS, write_id="d" * 32)
    await repo.sessions.delete("default", "s", NS.id, "main")
    with pytest.raises(Gone):
        await commit(repo, shelf, "s", range(8), 0, NS, write_id="d" * 32)
    with pytest.raises(Gone):
        await repo.sessions.get("default", "s", NS.id, "main")


async def test_i2_a_create_that_landed_is_not_made_again_when_a_later_session_of_that_name_is_gone_too(repo, other, shelf):
    """Found by the simulation."""
    await commit(repo, shelf, "s", range(8), 0, NS, lane="main", write_id="d" * 32)
    for _ in range(2):
        await other.sessions.delete("default", "s", NS.id, "main")
        await commit(other, shelf, "s", range(100, 108), 0, NS)
    await other.sessions.delete("default", "s", NS.id, "main")
    with pytest.raises(Gone):
        await commit(repo, shelf, "s", range(8), 0, NS, lane="main", write_id="d" * 32)
    with pytest.raises(Gone):
        await repo.sessions.get("default", "s", NS.id, "main")


async def test_i2_a_slow_try_does_not_make_again_what_a_quicker_one_made_and_somebody_deleted(repo, other, shelf, store, memory):
    """Found by the simulation: two nodes make the same commit, as its user repeats it while the first try is under way."""
    held = Fault(action="stall", verb="put", key="*/heads/*", skip=1)  # the branch, in a head that exists
    store.script.append(held)
    slow = asyncio.create_task(commit(repo, shelf, "s", range(8), 0, NS, lane="main", write_id="d" * 32))
    await until(lambda: not held.times)
    assert (await commit(other, shelf, "s", range(8), 0, NS, lane="main", write_id="d" * 32)).version == 1
    await other.sessions.delete("default", "s", NS.id, "main")
    store.release.set()
    with pytest.raises(Gone):
        await slow
    with pytest.raises(Gone):
        await other.sessions.get("default", "s", NS.id, "main")
    assert not any(head.branches for key, body in bodies(memory).items() if "/heads/" in key and (head := parse(body, Head, key)))


@either
async def test_i4_a_stale_writer_never_touches_a_later_session_of_that_name(repo, other, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(repo, shelf, "s", range(12), 1, NS)
    await other.sessions.delete("default", "s", NS.id, "main")
    with pytest.raises(Gone):
        await commit(repo, shelf, "s", range(16), 2, NS)
    await commit(other, shelf, "s", range(100, 108), 0, NS)
    with pytest.raises(Conflict):
        await commit(repo, shelf, "s", range(16), 2, NS)
    assert (await other.sessions.get("default", "s", NS.id, "main")).tokens == 8


async def test_i4_a_writer_that_was_stopped_meets_another_session_of_that_name_at_the_same_version(
    repo, other, shelf, store, memory
):
    await commit(repo, shelf, "s", range(8), 0, NS)
    stalled = Fault(action="stall", verb="put", key="*/heads/*")
    store.script.append(stalled)
    late = asyncio.create_task(commit(repo, shelf, "s", range(12), 1, NS, lane="main"))
    await until(lambda: not stalled.times)
    async with opened(memory, VirtualClock(), SeededIds(9)) as another:
        await another.sessions.delete("default", "s", NS.id, "main")
        await commit(another, shelf, "s", range(100, 108), 0, NS)
    store.release.set()
    with pytest.raises(Conflict) as moved:
        await late
    assert moved.value.facts == {"current": 1}
    assert await blocks_of(other) == shelf.fill(NS, range(100, 108))
    assert (await commit(repo, shelf, "s", range(100, 112), 1, NS)).version == 2  # and now it knows which session it means


async def test_i4_a_node_that_only_knew_the_name_refuses_what_was_built_on_an_earlier_session_of_it(repo, other, shelf):
    """Found by the simulation: it had read the earlier session, and never written to it."""
    await commit(other, shelf, "s", range(8), 0, NS)
    assert (await repo.sessions.get("default", "s", NS.id, "main")).version == 1
    await other.sessions.delete("default", "s", NS.id, "main")
    await commit(other, shelf, "s", range(100, 108), 0, NS)
    with pytest.raises(Conflict):
        await commit(repo, shelf, "s", range(12), 1, NS, lane="main")
    assert (await other.sessions.get("default", "s", NS.id, "main")).tokens == 8


@pytest.mark.parametrize("base", [0, 1])
async def test_a_retry_that_meets_its_own_commit_in_a_session_made_again_is_acknowledged(repo, other, shelf, base):
    """Found by the simulation: the first try went through another node, and this one still knew an earlier session of the name."""
    await commit(repo, shelf, "s", range(100, 108), 0, NS)
    await other.sessions.delete("default", "s", NS.id, "main")
    if base:
        await commit(other, shelf, "s", range(8), 0, NS, lane="main")
    first = await commit(other, shelf, "s", range(12), base, NS, lane="main", write_id="e" * 32)
    again = await commit(repo, shelf, "s", range(12), base, NS, lane="main", write_id="e" * 32)
    assert (again.version, again.tokens) == (first.version, 12)


async def test_creators_of_one_name_end_in_one_session(memory, clock, shelf):
    async def creator(number: int) -> int:
        async with opened(memory, clock, SeededIds(50 + number)) as node:
            return (await commit(node, shelf, "s", range(8), 0, NS)).version

    assert await asyncio.gather(*(creator(number) for number in range(6))) == [1] * 6
    async with opened(memory, clock, SeededIds(2)) as node:
        assert (await node.sessions.get("default", "s", NS.id, "main")).tokens == 8
        living = [h for k, body in bodies(memory).items() if "/heads/" in k and (h := parse(body, Head, k)).branches]
        assert len(living) == 1  # the others dropped the branch that lost its name
