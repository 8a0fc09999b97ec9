"""Sessions as users speak of them: names, lanes, versions, forks, rewinds, lives and pages."""

import asyncio

import pytest
from fakes.sealed import contents, either

from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import AlreadyExists, Conflict, Gone, Invalid, NotFound
from kvstore.lifecycle.collector import collect
from kvstore.objects import Fault, Faults
from kvstore.repo.testing import bodies, broken, commit, opened, tiny, until

NS = tiny()


@pytest.fixture
async def repo(memory, clock, masters):
    async with opened(memory, clock, masters=masters) as repo:
        yield repo


async def tokens_of(repo, session="s", lane="main", version=0):
    return (await repo.sessions.manifest("default", session, NS.id, lane, version)).tokens


# --- names and lanes ---


@either
async def test_an_empty_session_is_created_once_and_committed_into(repo, other, shelf):
    made = await repo.sessions.create("default", "s", NS, ttl=60, sliding=False, labels={"who": "me"})
    assert (made.version, made.tokens, made.ttl_s, made.sliding, made.labels, made.lane) == (0, 0, 60, False, {"who": "me"}, "main")
    with pytest.raises(AlreadyExists):
        await other.sessions.create("default", "s", NS)
    _, manifest = await other.sessions.resolve("default", "s", NS.id)
    assert (manifest.blocks, manifest.block_tokens) == ((), 4)
    receipt = await commit(other, shelf, "s", range(8), 0, NS)
    assert receipt.version == 1
    shown = await repo.sessions.get("default", "s")
    assert (shown.tokens, shown.blocks, shown.labels) == (8, 2, {"who": "me"})
    assert shown.bytes == sum(len(body) for body in shelf.held.values())


@either
async def test_b21_ids_that_look_alike_are_different_sessions(repo, shelf):
    pairs = [("a/b", "a_b"), ("12", "1"), ("a b", "a+b"), ("x?y", "x#y"), ("~", "世界"), ("...", "....")]
    ids = [session for pair in pairs for session in pair]
    for index, session in enumerate(ids):
        await commit(repo, shelf, session, range(4 * (index + 1)), 0, NS)
    await repo.sessions.delete("default", "a/b", NS.id, "main")
    for index, session in enumerate(ids[1:], 2):
        assert await tokens_of(repo, session) == 4 * index
    page = await repo.sessions.list("default")
    assert {each.id for each in page.sessions} == set(ids[1:])


async def test_b22_ids_that_would_leave_their_place_are_refused(repo, shelf, memory):
    for session in ("../../x", "%2e%2e/x", "\x00", "", "a/../b", "."):
        with pytest.raises(Invalid):
            await commit(repo, shelf, session, range(4), 0, NS)
        with pytest.raises(Invalid):
            await repo.sessions.get("default", session, NS.id, "main")
    for lane in ("../x", "a/b", "x" * 64, "ü"):
        with pytest.raises(Invalid):
            await repo.sessions.get("default", "s", NS.id, lane)
    assert not [key for key in bodies(memory) if key.startswith(("r/names/", "r/heads/"))]


@either
async def test_b20_two_tenants_with_the_same_ids_and_tokens_see_nothing_of_each_other(repo, memory, clock, shelf):
    mine, theirs = tiny("ann"), tiny("bob")
    assert mine.id != theirs.id
    await commit(repo, shelf, "s", range(16), 0, mine)
    with pytest.raises(NotFound):
        await repo.sessions.get("bob", "s")
    with pytest.raises(NotFound):
        await repo.sessions.get("bob", "s", mine.id, "main")  # although bob knows the namespace's id
    assert (await repo.sessions.list("bob")).sessions == []
    await commit(repo, shelf, "s", range(16), 0, theirs)
    await repo.sessions.rewind("bob", "s", tokens=4)
    await repo.sessions.delete("bob", "s")
    assert (await repo.sessions.get("ann", "s")).tokens == 16
    assert (await repo.sessions.namespaces_of("ann", "s")) == [mine.id]


@either
async def test_one_id_may_serve_several_models(repo, shelf):
    larger = tiny(layers=2)
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(repo, shelf, "s", range(12), 0, larger)
    with pytest.raises(Invalid, match="say which"):
        await repo.sessions.get("default", "s")
    assert (await repo.sessions.get("default", "s", larger.id)).tokens == 12
    assert set(await repo.sessions.namespaces_of("default", "s")) == {NS.id, larger.id}
    await repo.sessions.delete("default", "s", larger.id)
    assert (await repo.sessions.get("default", "s")).tokens == 8  # the only one left
    with pytest.raises(Gone):
        await repo.sessions.get("default", "s", larger.id, "main")


@either
async def test_a_chain_that_shares_no_block_with_main_gets_a_lane_of_its_own(repo, other, shelf):
    """Parallel sub-agents under one id."""
    await commit(repo, shelf, "s", range(8), 0, NS)
    agent = await commit(repo, shelf, "s", range(100, 108), 0, NS)
    first = shelf.fill(NS, range(100, 108))[0].prefix_id
    assert (agent.lane, agent.version) == (first[:16], 1)
    assert (await tokens_of(repo), await tokens_of(repo, lane=first[:16])) == (8, 8)
    for node, version in ((repo, 1), (other, 2)):
        more = await commit(node, shelf, "s", range(100, 108 + 4 * version), version, NS)
        assert (more.lane, more.version) == (first[:16], version + 1)
    main = await commit(other, shelf, "s", range(12), 1, NS)
    assert (main.lane, main.version) == ("main", 2)
    assert (await repo.sessions.get("default", "s", NS.id)).lane == "main"
    assert (await repo.sessions.get("default", "s", NS.id, first[:16])).tokens == 16


async def test_a_lane_goes_by_tokens_where_main_ends_in_a_partial_block(repo, shelf):
    await commit(repo, shelf, "s", range(2), 0, NS)
    more = await commit(repo, shelf, "s", range(4), 0, NS)  # its first block is another one, and the same tokens
    assert (more.lane, more.version) == ("main", 2)


@either
async def test_the_only_lane_is_found_without_being_named(repo, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS, lane="worker")
    assert (await repo.sessions.get("default", "s", NS.id)).lane == "worker"
    await commit(repo, shelf, "s", range(20, 28), 0, NS, lane="other")
    with pytest.raises(Invalid, match="say which"):
        await repo.sessions.get("default", "s", NS.id)


# --- versions ---


@either
async def test_rewind_floors_to_whole_blocks_and_is_a_new_version(repo, shelf):
    await commit(repo, shelf, "s", range(18), 0, NS)
    for tokens, expected in ((17, 16), (16, 16), (15, 12), (3, 0)):
        shown = await repo.sessions.rewind("default", "s", NS.id, tokens=tokens)
        assert shown.tokens == expected
    assert shown.version == 4  # 17 and 16 are one and the same
    again = await repo.sessions.rewind("default", "s", NS.id, tokens=100)
    assert (again.version, again.tokens) == (4, 0)  # nothing grows but by a commit (R10)
    back = await repo.sessions.rewind("default", "s", NS.id, version=1)
    assert (back.version, back.tokens) == (5, 18)
    empty = await repo.sessions.rewind("default", "s", NS.id, version=0)
    assert (empty.version, empty.tokens) == (6, 0)
    for wrong in ({}, {"version": 1, "tokens": 2}, {"tokens": -1}):
        with pytest.raises(Invalid):
            await repo.sessions.rewind("default", "s", NS.id, **wrong)


async def test_rewind_to_the_exact_token_is_a_commit_with_the_partial_block(repo, shelf):
    await commit(repo, shelf, "s", range(18), 0, NS)
    receipt = await commit(repo, shelf, "s", range(14), 1, NS)
    assert (receipt.version, receipt.tokens) == (2, 14)
    assert await tokens_of(repo, version=1) == 18


@either
async def test_restore_by_version(repo, shelf):
    for base, length in enumerate((8, 12, 20)):
        await commit(repo, shelf, "s", range(length), base, NS)
    for version, length in ((1, 8), (2, 12), (3, 20), (None, 20)):
        session, manifest = await repo.sessions.resolve("default", "s", NS.id, version=version)
        assert (session.version, session.tokens, manifest.tokens) == (version or 3, length, length)
        assert len(manifest.blocks) == session.blocks == length // 4
    with pytest.raises(NotFound):
        await repo.sessions.resolve("default", "s", NS.id, version=4)


@either
async def test_a_fork_begins_as_a_version_and_goes_its_own_way(repo, other, shelf, memory):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(repo, shelf, "s", range(16), 1, NS)
    fork = await repo.sessions.fork("default", "s", NS.id, "", "t", version=1, ttl=77)
    assert (fork.id, fork.version, fork.tokens, fork.ttl_s) == ("t", 1, 8, 77)
    assert fork.family == (await repo.sessions.get("default", "s")).family
    await commit(other, shelf, "t", [*range(8), 5, 5, 5, 5], 1, NS)
    assert (await tokens_of(repo), await tokens_of(repo, "t")) == (16, 12)
    await repo.sessions.delete("default", "s")
    for _ in range(2):
        await collect(repo, now=True)
    assert await tokens_of(repo, "t") == 12
    assert broken(await contents(repo, memory), repo.root.keys) == []
    with pytest.raises(AlreadyExists):
        await repo.sessions.fork("default", "t", NS.id, "", "t")
    with pytest.raises(NotFound):
        await repo.sessions.fork("default", "t", NS.id, "", "u", version=9)
    with pytest.raises(Invalid):
        await repo.sessions.fork("default", "t", NS.id, "", "../u")
    assert [each.id for each in (await repo.sessions.list("default")).sessions] == ["t"]


# --- lives ---


@either
async def test_a_session_expires_unless_it_is_renewed(repo, clock, shelf):
    for session in ("idle", "committed", "restored", "touched", "pinned", "fixed"):
        await commit(repo, shelf, session, range(8), 0, NS, ttl=100)
    await repo.sessions.create("default", "forever", NS, ttl=0)
    await repo.sessions.pin("default", "pinned")
    clock.advance(60)
    await commit(repo, shelf, "committed", range(12), 1, NS)
    await repo.sessions.resolve("default", "restored")
    await repo.sessions.touch("default", "touched")
    clock.advance(60)
    assert (await collect(repo)).expired == 2
    assert {each.id for each in (await repo.sessions.list("default")).sessions} == {
        "committed",
        "restored",
        "touched",
        "pinned",
        "forever",
    }
    with pytest.raises(Gone):
        await repo.sessions.get("default", "idle", NS.id, "main")
    await repo.sessions.pin("default", "pinned", pinned=False)
    clock.advance(90)
    assert (await collect(repo)).expired == 3
    assert {each.id for each in (await repo.sessions.list("default")).sessions} == {"pinned", "forever"}


async def test_sliding_is_what_renews(repo, clock, shelf):
    await repo.sessions.create("default", "s", NS, ttl=100, sliding=False)
    clock.advance(80)
    session, _ = await repo.sessions.resolve("default", "s")
    assert session.expires - clock.now() == 20
    await commit(repo, shelf, "s", range(8), 0, NS)
    assert (await repo.sessions.get("default", "s")).expires - clock.now() == 20
    assert (await repo.sessions.touch("default", "s", ttl=0)).expires == 0


async def test_b43_a_jump_of_this_hosts_clock_expires_nothing(memory, shelf):
    store_clock = memory._clock
    node_clock = VirtualClock(store_clock.now())
    async with opened(memory, node_clock) as node:
        await commit(node, shelf, "s", range(8), 0, NS, ttl=60)
        node_clock.set(node_clock.now() + 366 * 86400)
        await node.sessions.resolve("default", "s")
        assert (await collect(node, max_skew_s=None)).expired == 0
        node_clock.set(0)
        store_clock.advance(61)
        assert (await collect(node, max_skew_s=None)).expired == 1


async def test_i5_expiry_and_resume_are_decided_by_who_swaps_first(memory, clock, shelf):
    store = Faults(memory, clock=clock)
    async with opened(store, clock) as collector, opened(memory, clock, SeededIds(2)) as node:
        await commit(node, shelf, "s", range(8), 0, NS, ttl=100)
        clock.advance(150)
        store.script.append(Fault(action="stall", verb="put", key="*/heads/*"))
        judging = asyncio.create_task(collect(collector))
        await until(lambda: not store.script[0].times)
        session, _ = await node.sessions.resolve("default", "s", NS.id, "main")  # judged expired, and renewed before the swap
        assert session.expires == clock.now() + 100
        store.release.set()
        assert (await judging).expired == 0
        assert (await node.sessions.get("default", "s")).tokens == 8
        clock.advance(150)
        assert (await collect(collector)).expired == 1
        with pytest.raises(Gone):
            await node.sessions.resolve("default", "s", NS.id, "main")  # no revival


async def test_a_restore_goes_on_where_its_renewal_cannot(memory, clock, shelf):
    store = Faults(memory, clock=clock)
    async with opened(store, clock) as node:
        await commit(node, shelf, "s", range(8), 0, NS, ttl=100)
        clock.advance(60)
        store.script.append(Fault(action="busy", verb="put", key="*/heads/*", times=-1))
        session, manifest = await node.sessions.resolve("default", "s", NS.id, "main")
        assert (session.tokens, len(manifest.blocks)) == (8, 2)


async def test_b45_lite_a_resume_during_an_upload_gives_the_version_before(memory, clock, shelf):
    store = Faults(memory, clock=clock)
    async with opened(store, clock) as node, opened(memory, clock, SeededIds(2)) as reader:
        await commit(node, shelf, "s", range(8), 0, NS)
        store.script.append(Fault(action="stall", verb="put", key="*/blocks/*"))
        writing = asyncio.create_task(commit(node, shelf, "s", range(16), 1, NS))
        await until(lambda: not store.script[0].times)
        session, manifest = await reader.sessions.resolve("default", "s")
        assert session.tokens == manifest.tokens == sum(block.tokens for block in manifest.blocks) == 8
        store.release.set()
        assert (await writing).version == 2
        session, manifest = await reader.sessions.resolve("default", "s")
        assert session.tokens == manifest.tokens == 16


async def test_b41_a_register_that_grew_elsewhere_is_read_whole(repo, other, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    small = await other.sessions.get("default", "s")
    for number in range(20):
        await repo.sessions.fork("default", "s", NS.id, "main", f"f{number}")
    await commit(repo, shelf, "s", range(400), 1, NS)
    large = await other.sessions.get("default", "s")
    assert (small.tokens, large.tokens, large.version) == (8, 400, 2)
    assert [block.tokens for block in (await other.sessions.resolve("default", "s"))[1].blocks] == [4] * 100


@either
async def test_deleting_is_done_once(repo, other, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await other.sessions.delete("default", "s")
    with pytest.raises(Gone):
        await repo.sessions.delete("default", "s", NS.id, "main")
    with pytest.raises(NotFound):
        await repo.sessions.delete("default", "t", NS.id, "main")
    with pytest.raises(Gone):
        await commit(repo, shelf, "s", range(12), 1, NS)
    receipt = await commit(repo, shelf, "s", range(12), 0, NS)
    assert receipt.version == 1


async def test_a_conflict_with_a_version_that_was_never_told_carries_the_current_one(repo, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(repo, shelf, "s", range(16), 1, NS)
    with pytest.raises(Conflict) as moved:
        await commit(repo, shelf, "s", [*range(8), 7, 7, 7, 7], 1, NS)
    assert moved.value.facts == {"current": 2}
    with pytest.raises(NotFound):
        await commit(repo, shelf, "unknown", range(8), 3, NS)


# --- pages ---


@either
async def test_sessions_are_listed_in_pages_by_prefix(repo, other, shelf):
    ids = [f"team/{n:03}" for n in range(25)] + ["team", "teams", "x" * 300, "x" * 299 + "y"]
    await asyncio.gather(*(repo.sessions.create("default", session, NS) for session in ids))
    await asyncio.gather(*(repo.sessions.delete("default", f"team/{n:03}", NS.id, "main") for n in range(0, 25, 5)))
    alive = {session for session in ids if not (session.startswith("team/") and int(session[5:]) % 5 == 0)}

    async def pages(prefix: str, limit: int) -> list[list[str]]:
        cursor, found = "", []
        while True:
            page = await other.sessions.list("default", prefix, cursor, limit)
            found.append([session.id for session in page.sessions])
            cursor = page.cursor
            if not cursor:
                return found

    for prefix in ("", "team", "team/", "team/01", "x", "x" * 299, "nobody"):
        expected = sorted(session for session in alive if session.startswith(prefix))
        for limit in (1, 7, 100):
            got = await pages(prefix, limit)
            assert all(len(page) <= limit for page in got)
            assert sorted(session for page in got for session in page) == expected
    for wrong in ("nonsense", "9.x", "0."):
        with pytest.raises(Invalid):
            await other.sessions.list("default", "", wrong)
    with pytest.raises(Invalid):
        await other.sessions.list("default", limit=0)
