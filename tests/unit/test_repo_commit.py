"""Steps 3 to 6 of a commit: what is kept, what is added, when it conflicts, and where it is cut."""

import asyncio

import msgspec
import pytest
from fakes.sealed import contents, either

from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import Conflict, Gone, Invalid, NotFound, TooManyBranches
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle.collector import collect
from kvstore.model import Head, parse
from kvstore.objects import Fault
from kvstore.repo import Proposal
from kvstore.repo.heads import HISTORY_UNTIL
from kvstore.repo.testing import ONE_SHARD, Shelf, bodies, broken, commit, opened, tiny, until

NS = tiny()
TWO = ("t0of2.p0of1.g0", "t1of2.p0of1.g0")


@pytest.fixture
async def other(store, clock, masters):
    async with opened(store, clock, SeededIds(2), masters=masters) as other:
        yield other


@pytest.fixture
def shelf():
    shelf = Shelf()
    yield shelf
    assert shelf.leases == 0


def head_of(memory) -> Head:
    (key,) = [key for key in bodies(memory) if key.startswith("r/heads/")]
    return parse(bodies(memory)[key], Head, key)


async def blocks_of(repo, session="s", version=0, lane="main"):
    return (await repo.sessions.manifest("default", session, NS.id, lane, version)).blocks


async def epochs_pass(repo, count):
    for _ in range(count):
        await repo.epochs.advance(await repo.epochs.read())


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


@either
async def test_a_commit_is_cut_where_its_bytes_are_gone(repo, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    links = shelf.fill(NS, range(24))
    del shelf.held[_name(links[3])]
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


@either
async def test_r1_bytes_no_longer_local_are_copied_from_an_older_generation(repo, shelf, memory, store, masters):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await epochs_pass(repo, 3)
    links = shelf.fill(NS, range(16))
    empty = Shelf()
    async with opened(store, VirtualClock(), SeededIds(5), masters=masters) as fresh:
        receipt = await commit_links(fresh, empty, links, 0, session="t")
    assert (receipt.tokens, receipt.cut) == (16, False)
    assert store.counts["copy"] == 4
    _, manifest = await repo.sessions.resolve("default", "t", NS.id, "main")
    assert [copy.gen for block in manifest.blocks for copy in block.copies] == [4] * 4
    assert broken(await contents(repo, memory), repo.root.keys) == []


async def test_r1_what_the_head_names_already_is_kept_at_any_age(repo, shelf, store):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await epochs_pass(repo, 5)
    await collect(repo)
    store.requests.clear()
    await commit(repo, shelf, "s", range(20), 1, NS)
    assert [entry.verb for entry in store.requests if "/blocks/" in entry.key] == ["head", "head", "put"]
    _, manifest = await repo.sessions.resolve("default", "s", NS.id, "main")
    assert [copy.gen for block in manifest.blocks for copy in block.copies] == [1, 1, 1, 1, 6]


async def test_r1_blocks_of_an_older_version_are_named_again_without_a_copy(repo, shelf, store):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await repo.sessions.rewind("default", "s", NS.id, "main", tokens=4)
    await epochs_pass(repo, 4)
    await collect(repo)
    store.requests.clear()
    await commit(repo, shelf, "s", range(16), 2, NS)
    assert not [entry for entry in store.requests if "/blocks/" in entry.key]


@either
async def test_r2_a_failed_swap_reads_head_and_epoch_again(repo, other, shelf, store, memory):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await epochs_pass(other, 3)
    await collect(other)  # seals the head under the writer's unbroken chain of epoch 1
    store.requests.clear()
    receipt = await commit(repo, shelf, "s", range(12), 1, NS)
    assert receipt.version == 2
    assert [entry.key for entry in store.requests if entry.verb == "get"][-1] == "r/epoch"
    _, manifest = await repo.sessions.resolve("default", "s", NS.id, "main")
    assert manifest.blocks[-1].copies[0].gen == 4  # put at 1 first, then brought to 4 inside the store
    assert store.counts["copy"] == 1
    manifests = sorted(key for key in bodies(memory) if "/manifests/" in key)
    assert [key.split("/")[-1][:10] for key in manifests] == ["0000000001", "0000000001", "0000000004"]


@either
async def test_b51_lite_a_writer_stopped_past_its_epochs_is_refused_and_its_redo_lands(repo, shelf, store, memory, masters):
    await commit(repo, shelf, "s", range(8), 0, NS)
    stalled = Fault(action="stall", verb="put", key="*/heads/*")
    store.script.append(stalled)
    late = asyncio.create_task(commit(repo, shelf, "s", range(16), 1, NS))
    await until(lambda: not stalled.times)
    async with opened(memory, VirtualClock(), SeededIds(9), masters=masters) as collector:
        await collect(collector, now=True)
        await collect(collector, now=True)  # its blocks were unnamed, and are gone
    store.release.set()
    receipt = await late
    assert (receipt.version, receipt.tokens) == (2, 16)
    assert [entry.outcome for entry in store.requests if entry.verb == "put" and "/heads/" in entry.key].count("Refused") == 1
    assert broken(await contents(repo, memory), repo.root.keys) == []


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


async def commit_links(repo, shelf, links, base, session="s"):
    return await repo.commit("default", session, "", Proposal(namespace=NS, base=base, links=tuple(links), shards=ONE_SHARD), shelf)


def _name(link) -> BlockName:
    return BlockName(NS.id, Shard(), link.prefix_id, link.tokens)


async def test_what_could_not_be_read_again_is_not_written(repo, shelf, memory):
    links = shelf.fill(NS, range(6))
    with pytest.raises(Invalid, match="not full"):
        await commit_links(repo, shelf, [links[1], links[0]], 0)
    assert not [key for key in bodies(memory) if "/manifests/" in key]
    assert (await commit_links(repo, shelf, links, 0)).version == 1
