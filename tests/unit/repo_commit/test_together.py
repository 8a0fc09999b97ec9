"""Many commits at once: groups, appenders that rebase, and callers who leave."""

import asyncio

import pytest
from fakes.commits import NS, blocks_of
from fakes.sealed import either

from kvstore.clock import SeededIds
from kvstore.errors import Conflict
from kvstore.objects import Fault
from kvstore.repo.testing import Shelf, bodies, broken, commit, opened, until


@either
async def test_commits_of_one_family_become_one_swap(repo, shelf, store):
    await commit(repo, shelf, "s", range(8), 0, NS)
    for index in range(30):
        await repo.sessions.fork("default", "s", NS.id, "main", f"f{index}")
    store.requests.clear()
    receipts = await asyncio.gather(
        *(commit(repo, shelf, f"f{index}", [*range(8), index, 1, 1, 1], 1, NS, write_id=f"{index:032x}") for index in range(30))
    )
    assert [receipt.version for receipt in receipts] == [2] * 30
    heads = [entry for entry in store.requests if "/heads/" in entry.key and entry.verb == "put"]
    manifests = [entry for entry in store.requests if "/manifests/" in entry.key and entry.verb == "put"]
    assert (len(heads), len(manifests)) == (1, 30)
    for index in range(30):
        assert (await repo.sessions.get("default", f"f{index}", NS.id)).tokens == 12


async def test_each_branch_is_in_a_group_at_most_once(repo, shelf, store):
    await commit(repo, shelf, "s", range(8), 0, NS)
    for name in ("t", "u"):
        await repo.sessions.fork("default", "s", NS.id, "main", name)
    for names, swaps in ((("s", "t", "u"), 1), (("s", "s", "s"), 3), (("s", "t", "s"), 2)):
        store.requests.clear()
        await asyncio.gather(
            *(repo.sessions.touch("default", name, NS.id, "main", ttl=100 * swaps + n) for n, name in enumerate(names))
        )
        assert len([entry for entry in store.requests if "/heads/" in entry.key and entry.verb == "put"]) == swaps
    assert (await repo.sessions.get("default", "s", NS.id)).ttl_s == 202  # in the order they came


@either
async def test_one_members_conflict_does_not_touch_the_others(repo, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await repo.sessions.fork("default", "s", NS.id, "main", "t")
    wrong, right = await asyncio.gather(
        commit(repo, shelf, "s", range(12), 9, NS), commit(repo, shelf, "t", range(12), 1, NS), return_exceptions=True
    )
    assert isinstance(wrong, Conflict)
    assert right.version == 2


async def test_b53_twenty_appenders_that_rebase_lose_nothing(memory, clock):
    shelf, turns = Shelf(), {}
    async with opened(memory, clock) as first:
        await commit(first, shelf, "s", range(4), 0, NS)

    async def appender(number: int) -> None:
        async with opened(memory, clock, SeededIds(100 + number)) as node:
            while True:
                session = await node.sessions.get("default", "s", NS.id, "main")
                await until(lambda at=session.version: at in turns)  # its writer has not heard yet that it landed
                mine = [*turns[session.version], number, number, number, number]
                try:
                    receipt = await commit(node, shelf, "s", mine, session.version, NS)
                except Conflict:
                    continue
                turns[receipt.version] = mine
                return

    turns[1] = list(range(4))
    await asyncio.gather(*(appender(number) for number in range(20)))
    async with opened(memory, clock, SeededIds(3)) as reader:
        session = await reader.sessions.get("default", "s", NS.id, "main")
        assert (session.version, session.tokens) == (21, 84)
        assert await blocks_of(reader) == shelf.fill(NS, turns[21])
    assert sorted(turns[21][4::4]) == list(range(20))
    assert broken(bodies(memory), first.root.keys) == []


@either
async def test_two_writers_append_twenty_times_each_and_nothing_is_lost(repo, other, shelf):
    await commit(repo, shelf, "s", range(4), 0, NS)
    tokens = {1: list(range(4))}

    async def writer(node, mark: int) -> None:
        for turn in range(20):
            while True:
                at = (await node.sessions.get("default", "s", NS.id, "main")).version
                await until(lambda at=at: at in tokens)  # its writer has not heard yet that it landed
                mine = [*tokens[at], mark, turn, 0, 0]
                try:
                    receipt = await commit(node, shelf, "s", mine, at, NS)
                except Conflict:
                    continue
                tokens[receipt.version] = mine
                break

    await asyncio.gather(writer(repo, 1000), writer(other, 2000))
    session = await repo.sessions.get("default", "s", NS.id, "main")
    assert (session.version, session.tokens) == (41, 164)
    for mark in (1000, 2000):
        assert [turn for who, turn in zip(tokens[41][4::4], tokens[41][5::4], strict=True) if who == mark] == list(range(20))


@either
async def test_a_caller_who_leaves_does_not_undo_the_commit(repo, shelf, store):
    await commit(repo, shelf, "s", range(8), 0, NS)
    stalled = Fault(action="stall", verb="put", key="*/heads/*")
    store.script.append(stalled)
    task = asyncio.create_task(commit(repo, shelf, "s", range(12), 1, NS))
    await until(lambda: not stalled.times)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store.release.set()
    again = await commit(repo, shelf, "s", range(12), 1, NS)  # a lost answer: asked again, it is contained
    assert again.version == 2
