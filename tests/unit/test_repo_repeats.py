"""R8: a commit that is repeated by its caller in a later life of the node is found, also where it landed in a group with others."""

import asyncio

import pytest

from kvstore.errors import Conflict
from kvstore.model import RECENT
from kvstore.objects import Fault
from kvstore.repo.testing import commit, tiny, until

NS = tiny()
IDS = ["a" * 32, "b" * 32]


@pytest.fixture
async def landed(repo, shelf, store):
    """Version 2 of two sessions of a family, made by one swap."""
    await commit(repo, shelf, "s", range(8), 0, NS)
    await repo.sessions.fork("default", "s", NS.id, "main", "f")
    swaps = await swaps_of(repo)
    stalled = Fault(action="stall", verb="put", key="*/heads/*")
    store.script.append(stalled)
    first = asyncio.create_task(repo.sessions.touch("default", "s", NS.id, "main", ttl=7))
    await until(lambda: not stalled.times)
    group = [asyncio.create_task(commit(repo, shelf, *each, NS, lane="main", write_id=w)) for each, w in both()]
    for _ in range(200):
        await asyncio.sleep(0)
    store.release.set()
    await first
    assert [receipt.version for receipt in await asyncio.gather(*group)] == [2, 2]
    assert await swaps_of(repo) == swaps + 2  # the touch, and one for both


def both():
    return zip((("s", range(12), 1), ("f", range(16), 1)), IDS, strict=True)


async def swaps_of(repo):
    found = await repo.finder.find("default", "s", NS.id, "main")
    return found.position.head.swaps


async def repeated(node, shelf):
    return [await commit(node, shelf, *each, NS, lane="main", write_id=write) for each, write in both()]


async def test_members_of_a_group_are_found_after_a_rewind(landed, other, shelf):
    """By content alone they would be taken for a base that moved."""
    for session in ("s", "f"):
        await other.sessions.rewind("default", session, NS.id, "main", version=1)
    with pytest.raises(Conflict):
        await commit(other, shelf, "s", range(12), 1, NS, lane="main", write_id="c" * 32)
    assert [(again.version, again.tokens, again.cut) for again in await repeated(other, shelf)] == [(2, 12, False), (2, 16, False)]
    assert (await other.sessions.get("default", "s", NS.id, "main")).version == 3  # and nothing was written


async def test_members_of_a_group_are_found_after_more_swaps_than_a_head_remembers(landed, other, shelf):
    for n in range(RECENT + 8):
        await other.sessions.touch("default", "s", NS.id, "main", ttl=100 + n)
    await commit(other, shelf, "s", range(50, 58), 2, NS, lane="main")
    assert [again.version for again in await repeated(other, shelf)] == [2, 2]


async def test_a_fork_does_not_take_the_write_id_along(landed, other, shelf):
    """It names the same manifest. The same write id stands for another commit there."""
    await other.sessions.fork("default", "s", NS.id, "main", "g")
    receipt = await commit(other, shelf, "g", range(20), 2, NS, lane="main", write_id=IDS[0])
    assert (receipt.version, receipt.tokens) == (3, 20)


async def test_one_commit_on_two_nodes_has_the_version_that_landed(repo, other, store, shelf):
    """A node's own attempt is replaced by another node's at the same commit, which landed on a later version of equal content."""
    await commit(repo, shelf, "s", range(8), 0, NS, lane="main")
    stalled = Fault(action="stall", verb="put", key="*/heads/*")
    store.script.append(stalled)
    late = asyncio.create_task(commit(repo, shelf, "s", range(12), 1, NS, lane="main", write_id=IDS[0]))
    await until(lambda: not stalled.times)
    await commit(other, shelf, "s", range(8), 1, NS, lane="main", labels={"a": "b"})  # version 2, of the same tokens
    assert (await commit(other, shelf, "s", range(12), 1, NS, lane="main", write_id=IDS[0])).version == 3
    store.release.set()
    assert (await late).version == 3
