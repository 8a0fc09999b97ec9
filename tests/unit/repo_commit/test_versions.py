"""What a commit makes: a version more, of a session, its lanes, forks and labels; cut where its bytes are gone."""

import asyncio

import msgspec
import pytest
from fakes.commits import NS, blocks_of, commit_links, epochs_pass, head_of, name_of
from fakes.sealed import contents, either

from kvstore.errors import Gone, Invalid, NotFound, TooManyBranches
from kvstore.lifecycle.collector import collect
from kvstore.repo import Proposal
from kvstore.repo.heads import HISTORY_UNTIL
from kvstore.repo.testing import ONE_SHARD, bodies, broken, commit


@either
async def test_each_commit_is_one_version_and_the_older_ones_stay(repo, shelf):
    for base in range(12):
        receipt = await commit(repo, shelf, "s", range(4 * base + 4), base, NS)
        assert (receipt.version, receipt.tokens, receipt.cut) == (base + 1, 4 * base + 4, False)
    versions = (await repo.sessions.versions("default", "s", NS.id)).versions
    assert [(each.version, each.tokens) for each in versions] == [(v, 4 * v) for v in range(12, 3, -1)]  # itself and 8 older ones
    for each in versions:
        blocks = await blocks_of(repo, version=each.version)
        assert (each.blocks, each.prefix_id) == (len(blocks), blocks[-1].prefix_id)
    with pytest.raises(Gone):
        await blocks_of(repo, version=3)
    with pytest.raises(NotFound):
        await blocks_of(repo, version=13)


@either
async def test_an_edited_continuation_is_a_new_version_and_the_old_one_is_restorable(repo, shelf):
    first = list(range(20))
    await commit(repo, shelf, "s", first, 0, NS)
    compacted = [*range(8), *range(500, 507)]  # history compacted, last answer regenerated
    receipt = await commit(repo, shelf, "s", compacted, 1, NS)
    assert (receipt.version, receipt.tokens) == (2, 15)
    assert await blocks_of(repo) == shelf.fill(NS, compacted)
    assert await blocks_of(repo, version=1) == shelf.fill(NS, first)
    shorter = await commit(repo, shelf, "s", range(8), 2, NS)
    assert (shorter.version, shorter.tokens) == (3, 8)
    back = await repo.sessions.rewind("default", "s", NS.id, "main", version=1)
    assert (back.version, back.tokens) == (4, 20)
    assert await blocks_of(repo) == shelf.fill(NS, first)


async def test_an_edit_from_the_first_token_on_stays_in_its_lane(repo, shelf):
    await commit(repo, shelf, "s", range(20), 0, NS)
    receipt = await commit(repo, shelf, "s", range(100, 120), 1, NS)
    assert (receipt.lane, receipt.version) == ("main", 2)


@either
async def test_a_commit_is_cut_where_its_bytes_are_gone(repo, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    links = shelf.fill(NS, range(24))
    del shelf.held[name_of(links[3])]
    receipt = await commit_links(repo, shelf, links, 1)
    assert (receipt.version, receipt.tokens, receipt.blocks, receipt.cut) == (2, 12, 3, True)
    assert await blocks_of(repo) == links[:3]
    for name in list(shelf.held):
        del shelf.held[name]
    again = await commit_links(repo, shelf, links, 2)
    assert (again.version, again.tokens, again.cut) == (2, 12, True)  # nothing to add: no version


async def test_a_session_is_not_made_of_nothing(repo, shelf, memory):
    links = shelf.fill(NS, range(8))
    shelf.held.clear()
    with pytest.raises(NotFound, match="first block"):
        await commit_links(repo, shelf, links, 0)
    assert not [key for key in bodies(memory) if key.startswith(("r/heads/", "r/names/"))]


async def test_i9_a_namespace_of_another_tenant_is_refused(repo, shelf):
    links = shelf.fill(NS, range(8))
    with pytest.raises(Invalid, match="tenant"):
        await repo.commit("eve", "s", "", Proposal(namespace=NS, base=0, links=tuple(links), shards=ONE_SHARD), shelf)


async def test_a_large_family_keeps_no_history_and_then_refuses_more(repo, shelf, memory):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(repo, shelf, "s", range(12), 1, NS)
    assert len(head_of(memory).branches.popitem()[1].history) == 1
    await asyncio.gather(*(repo.sessions.fork("default", "s", NS.id, "main", f"f{n}") for n in range(HISTORY_UNTIL)))
    assert all(not branch.history for branch in head_of(memory).branches.values())
    await commit(repo, shelf, "s", range(16), 2, NS)
    assert len((await repo.sessions.versions("default", "s", NS.id)).versions) == 1


async def test_too_many_branches_names_the_way_out(repo, shelf, memory, monkeypatch):
    monkeypatch.setattr("kvstore.repo.heads.MAX_HEAD_BYTES", 8000)
    await commit(repo, shelf, "s", range(8), 0, NS)
    made = 0

    async def fork_for_ever():
        nonlocal made
        while True:
            await repo.sessions.fork("default", "s", NS.id, "main", f"f{made}")
            made += 1

    with pytest.raises(TooManyBranches) as full:
        await fork_for_ever()
    assert made > 5
    assert "detach" in full.value.remedy
    assert len(msgspec.json.encode(head_of(memory))) <= 8000
    await commit(repo, shelf, "s", range(12), 1, NS)  # those who are in may go on
    free = await repo.sessions.fork("default", "s", NS.id, "main", "free", detach=True)
    assert (free.tokens, free.family != (await repo.sessions.get("default", "s", NS.id)).family) == (12, True)
    assert broken(bodies(memory), repo.root.keys) == []


@either
async def test_a_detached_fork_brings_its_blocks_to_its_own_epoch(repo, shelf, store, memory):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await epochs_pass(repo, 4)
    repo.uploads._known.clear()
    await repo.sessions.fork("default", "s", NS.id, "main", "t", detach=True)
    assert store.counts["copy"] == 4  # R6: families share nothing
    await repo.sessions.delete("default", "s", NS.id, "main")
    await collect(repo, now=True)
    await collect(repo, now=True)
    assert len(await blocks_of(repo, "t")) == 4
    assert broken(await contents(repo, memory), repo.root.keys) == []


async def test_labels_are_kept_until_they_are_replaced(repo, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS, labels={"model": "a"})
    await commit(repo, shelf, "s", range(12), 1, NS)
    assert (await repo.sessions.get("default", "s", NS.id)).labels == {"model": "a"}
    relabelled = await commit(repo, shelf, "s", range(12), 2, NS, labels={"model": "b"})
    assert relabelled.version == 3
    assert (await repo.sessions.get("default", "s", NS.id)).labels == {"model": "b"}


async def test_what_could_not_be_read_again_is_not_written(repo, shelf, memory):
    links = shelf.fill(NS, range(6))
    with pytest.raises(Invalid, match="not full"):
        await commit_links(repo, shelf, [links[1], links[0]], 0)
    assert not [key for key in bodies(memory) if "/manifests/" in key]
    assert (await commit_links(repo, shelf, links, 0)).version == 1
