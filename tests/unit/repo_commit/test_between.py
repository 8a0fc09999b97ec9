"""Step 6: what others committed in between is kept, built upon, or a conflict."""

import pytest
from fakes.commits import NS
from fakes.sealed import contents, either

from kvstore.errors import Conflict
from kvstore.repo import Proposal
from kvstore.repo.testing import ONE_SHARD, Shelf, bodies, broken, commit, tiny

TWO = ("t0of2.p0of1.g0", "t1of2.p0of1.g0")


@either
async def test_step_6_mine_already_contained_is_acknowledged(repo, other, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(other, shelf, "s", range(20), 1, NS)
    receipt = await commit(repo, shelf, "s", range(16), 1, NS)
    assert (receipt.version, receipt.tokens) == (1, 16)  # version 2 holds more than this caller ever saw
    assert (await repo.sessions.get("default", "s", NS.id)).tokens == 20  # nothing was undone


@either
async def test_step_6_nobody_takes_away_blocks_it_never_saw(repo, other, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(repo, shelf, "s", range(16), 1, NS)
    receipt = await commit(other, shelf, "s", range(8), 0, NS)  # it was contained; version 1 holds exactly this
    assert receipt.version == 1
    with pytest.raises(Conflict):
        await commit(other, shelf, "s", [*range(8), 77, 78, 79, 80], receipt.version, NS)
    assert (await repo.sessions.get("default", "s", NS.id)).tokens == 16


@either
async def test_step_6_stored_that_grew_towards_mine_is_built_upon(repo, other, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(other, shelf, "s", range(16), 1, NS)
    receipt = await commit(repo, shelf, "s", range(24), 1, NS)
    assert (receipt.version, receipt.tokens) == (3, 24)


@either
async def test_step_6_anything_else_conflicts_with_the_current_version(repo, other, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(other, shelf, "s", [*range(8), 77, 78, 79, 80], 1, NS)
    with pytest.raises(Conflict) as moved:
        await commit(repo, shelf, "s", range(24), 1, NS)
    assert moved.value.facts == {"current": 2}
    assert (await repo.sessions.get("default", "s", NS.id)).version == 2
    with pytest.raises(Conflict):
        await commit(repo, shelf, "s", range(24), 7, NS)  # a base nobody ever made


@either
async def test_step_6_a_rewind_in_between_conflicts(repo, other, shelf):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await other.sessions.rewind("default", "s", NS.id, "main", tokens=8)
    with pytest.raises(Conflict) as moved:
        await commit(repo, shelf, "s", range(24), 1, NS)  # what is stored is a prefix of mine, and it is not what I was told
    assert moved.value.facts == {"current": 2}
    receipt = await commit(repo, shelf, "s", range(24), 2, NS)
    assert (receipt.version, receipt.tokens) == (3, 24)


async def test_step_6_a_rewind_and_a_regrowth_in_between_conflict(repo, other, shelf):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await other.sessions.rewind("default", "s", NS.id, "main", tokens=8)
    await commit(other, shelf, "s", range(20), 2, NS)
    with pytest.raises(Conflict):
        await commit(repo, shelf, "s", range(24), 1, NS)


@either
async def test_b24_a_partial_block_is_superseded_and_never_kept(repo, memory, shelf):
    namespace = tiny(block_tokens=256)
    full = await commit(repo, shelf, "s", range(2048), 0, namespace)
    assert full.blocks == 8
    exact = await commit(repo, shelf, "s", range(2049), 1, namespace)
    assert (exact.blocks, exact.tokens) == (9, 2049)
    longer = await commit(repo, shelf, "s", range(2060), 2, namespace)
    manifest = await repo.sessions.manifest("default", "s", namespace.id, "main")
    assert [block.tokens for block in manifest.blocks] == [256] * 8 + [12]
    assert longer.blocks == 9
    stored = [key for key in bodies(memory) if "/blocks/" in key]
    await commit(repo, shelf, "s", range(2060), 3, namespace)  # 2048 + 12 again: nothing is written
    assert [key for key in bodies(memory) if "/blocks/" in key] == stored


@either
async def test_b24_a_partial_block_is_compared_by_its_tokens(repo, other, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(other, shelf, "s", range(10), 1, NS)  # ends in a block of 2
    receipt = await commit(repo, shelf, "s", range(15), 1, NS)  # goes on where the other one stopped
    assert (receipt.version, receipt.tokens) == (3, 15)
    contained = await commit(other, shelf, "s", range(9), 1, NS)  # a block of 1 that a block of 4 begins with
    assert (contained.version, contained.tokens) == (1, 9)  # no version holds just these: its own base
    with pytest.raises(Conflict):
        await commit(other, shelf, "s", [*range(8), 99], 1, NS)


@either
async def test_b24_what_cannot_be_cut_is_a_conflict_and_never_a_guess(repo, other, shelf):
    """Blocks whose names depend on more than tokens, or whose bytes are elsewhere, do not tell how they would be named if cut."""
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(other, shelf, "s", range(10), 1, NS)
    absent = Shelf()
    absent.held = {name: body for name, body in shelf.held.items() if name.tokens != 3}
    links = shelf.fill(NS, range(11))
    with pytest.raises(Conflict):
        await repo.commit("default", "s", "", Proposal(namespace=NS, base=1, links=tuple(links), shards=ONE_SHARD), absent)


@either
async def test_fewer_shards_are_merged_and_not_acknowledged(repo, other, shelf, memory):
    """Two ranks of one engine commit the same turn, each its own shard."""
    first = await commit(repo, shelf, "s", range(8), 0, NS, shards=TWO[:1])
    second = await commit(other, shelf, "s", range(8), 0, NS, shards=TWO[1:])
    assert (first.version, second.version, second.tokens) == (1, 2, 8)
    _, manifest = await repo.sessions.resolve("default", "s", NS.id, "main")
    assert manifest.shards == TWO
    assert all({copy.shard for copy in block.copies} == {0, 1} for block in manifest.blocks)
    again = await commit(other, shelf, "s", range(8), 1, NS, shards=TWO[1:])
    assert again.version == 2  # contained now
    assert broken(await contents(repo, memory), repo.root.keys) == []


async def test_a_merge_keeps_what_the_other_rank_has_more(repo, other, shelf):
    await commit(repo, shelf, "s", range(16), 0, NS, shards=TWO[:1])
    merged = await commit(other, shelf, "s", range(8), 0, NS, shards=TWO[1:])
    assert (merged.version, merged.tokens) == (0, 8)  # version 2 holds more than this rank knows of: its own base
    _, manifest = await repo.sessions.resolve("default", "s", NS.id, "main")
    assert [len(block.copies) for block in manifest.blocks] == [2, 2, 1, 1]
