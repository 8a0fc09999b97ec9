"""I4: versions are numbers, and ids come again. Whoever says which session a commit was built on never touches a later one."""

import asyncio

import pytest

from kvstore.clock import SeededIds
from kvstore.errors import AlreadyExists, Conflict, Gone, Unavailable
from kvstore.ids import chain
from kvstore.objects import Fault
from kvstore.repo.branches import promised
from kvstore.repo.testing import commit, opened, tiny, until

NS = tiny()


async def replaced(node, shelf, versions=1):
    """Another session gets the id, and as many versions. Returns what names it."""
    await node.sessions.delete("default", "s", NS.id, "main")
    for base in range(versions):
        made = await commit(node, shelf, "s", range(100, 108 + 4 * base), base, NS, lane="main")
    return made.branch


async def tokens_of(node):
    return (await node.sessions.get("default", "s", NS.id, "main")).tokens


async def test_every_answer_about_a_session_names_it(repo, shelf):
    made = await repo.sessions.create("default", "s", NS, "main")
    receipt = await commit(repo, shelf, "s", range(8), 0, NS)
    assert receipt.branch == made.branch != ""
    assert (await repo.sessions.manifest("default", "s", NS.id)).branch == made.branch
    fork = await repo.sessions.fork("default", "s", NS.id, "main", "f")
    assert fork.branch not in {"", made.branch}
    assert (await commit(repo, shelf, "f", range(12), 1, NS, branch=fork.branch)).branch == fork.branch


@pytest.mark.parametrize("lane", ["", "main"])
async def test_i4_a_node_that_knows_only_the_later_session_refuses_what_was_built_on_an_earlier_one(
    repo, memory, clock, shelf, lane
):
    mine = await commit(repo, shelf, "s", range(8), 0, NS)
    await replaced(repo, shelf)
    async with opened(memory, clock, SeededIds(3)) as fresh:
        assert await tokens_of(fresh) == 8
        with pytest.raises(Gone) as gone:
            await commit(fresh, shelf, "s", range(100, 112), 1, NS, lane=lane, branch=mine.branch)
        assert "restore" in gone.value.remedy
        assert await tokens_of(fresh) == 8


async def test_a_node_that_knows_only_the_earlier_session_takes_what_was_built_on_the_later_one(repo, other, shelf):
    """It is told which one is meant, so that it need not refuse both."""
    await commit(repo, shelf, "s", range(8), 0, NS)
    later = await replaced(other, shelf)
    receipt = await commit(repo, shelf, "s", range(100, 112), 1, NS, lane="main", branch=later)
    assert (receipt.version, receipt.tokens, receipt.branch) == (2, 12, later)


async def test_i4_a_commit_that_says_its_session_makes_no_other(repo, other, shelf):
    made = await repo.sessions.create("default", "s", NS, "main")
    await other.sessions.delete("default", "s", NS.id, "main")
    with pytest.raises(Gone):
        await commit(repo, shelf, "s", range(8), 0, NS, branch=made.branch)
    with pytest.raises(Gone):
        await commit(repo, shelf, "t", range(8), 0, NS, branch=made.branch)
    assert (await other.sessions.list("default")).sessions == []


async def test_i4_a_writer_that_was_stopped_for_a_whole_life_of_the_id(repo, store, memory, clock, shelf):
    mine = await commit(repo, shelf, "s", range(8), 0, NS)
    stalled = Fault(action="stall", verb="put", key="*/heads/*")
    store.script.append(stalled)
    late = asyncio.create_task(commit(repo, shelf, "s", range(12), 1, NS, lane="main", branch=mine.branch))
    await until(lambda: not stalled.times)
    async with opened(memory, clock, SeededIds(9)) as another:
        await replaced(another, shelf)
        store.release.set()
        with pytest.raises(Gone):
            await late
        assert await tokens_of(another) == 8


async def test_who_does_not_say_it_is_judged_by_the_number_alone(repo, memory, clock, shelf):
    """What `branch` is for: without it this cannot be told from somebody who continues the later session."""
    await commit(repo, shelf, "s", range(8), 0, NS)
    later = await replaced(repo, shelf)
    async with opened(memory, clock, SeededIds(3)) as fresh:
        assert (await commit(fresh, shelf, "s", range(12), 1, NS, lane="main")).branch == later


async def test_another_version_of_the_same_session_is_still_a_conflict(repo, shelf):
    mine = await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(repo, shelf, "s", range(100, 108), 1, NS, branch=mine.branch)
    with pytest.raises(Conflict):
        await commit(repo, shelf, "s", range(12), 1, NS, branch=mine.branch)


# --- what was promised before it was made ---


async def test_a_session_is_what_the_commit_that_made_it_was_promised(repo, memory, clock, shelf):
    """On a node that never heard of the promise."""
    write = "7" * 32
    said = promised("default", "s", NS.id, write)
    mine = await commit(repo, shelf, "s", range(8), 0, NS, write_id=write)
    assert mine.branch.startswith(said)
    async with opened(memory, clock, SeededIds(3)) as fresh:
        receipt = await commit(fresh, shelf, "s", range(12), 1, NS, branch=said)
        assert (receipt.version, receipt.branch) == (2, mine.branch)
        for less in (said[:15], mine.branch[:17]):
            with pytest.raises(Gone):
                await commit(fresh, shelf, "s", range(16), 2, NS, branch=less)


async def test_a_promise_that_nothing_tells_of_may_have_yet_to_be_kept_and_is_not_gone(repo, memory, clock, shelf):
    write = "7" * 32
    said = promised("default", "s", NS.id, write)
    async with opened(memory, clock, SeededIds(3)) as other:
        for others in (False, True):
            if others:  # it is kept by a session that was there first
                await repo.sessions.create("default", "s", NS, "main")
            with pytest.raises(Unavailable) as pending:
                await commit(other, shelf, "s", range(12), 1, NS, branch=said)
            assert pending.value.kind == "promise_pending"
        kept = await commit(repo, shelf, "s", range(8), 0, NS, write_id=write)
        assert (await commit(other, shelf, "s", range(12), 1, NS, branch=said)).branch == kept.branch


@pytest.mark.parametrize("first", [False, True])
async def test_a_promise_that_was_kept_by_a_session_that_is_gone_is_gone(repo, memory, clock, shelf, first):
    write = "7" * 32
    if first:
        await repo.sessions.create("default", "s", NS, "main")
    await commit(repo, shelf, "s", range(8), 0, NS, write_id=write)
    await repo.sessions.delete("default", "s", NS.id, "main")
    async with opened(memory, clock, SeededIds(3)) as fresh:
        with pytest.raises(Gone):
            await commit(fresh, shelf, "s", range(12), 1, NS, branch=promised("default", "s", NS.id, write))


async def test_i4_what_was_built_on_a_promise_lands_in_no_later_session(repo, memory, clock, shelf):
    write = "7" * 32
    await commit(repo, shelf, "s", range(8), 0, NS, write_id=write)
    await replaced(repo, shelf)
    async with opened(memory, clock, SeededIds(3)) as fresh:
        for session in ("s", "t"):
            with pytest.raises(Unavailable):
                await commit(fresh, shelf, session, range(12), 1, NS, branch=promised("default", session, NS.id, write))
        assert await tokens_of(fresh) == 8


async def test_r7_every_attempt_to_make_a_session_has_a_branch_id_of_its_own(repo, store, shelf):
    """They begin alike, and are never the same: the first one was made, and its name was another's by then."""
    write, made = "7" * 32, []
    claim = repo.finder.names.claim

    async def taken_once(key, session, family, branch, alive):
        made.append(branch)
        if len(made) == 1:
            raise AlreadyExists("somebody was faster")
        await claim(key, session, family, branch, alive)

    repo.finder.names.claim = taken_once
    receipt = await commit(repo, shelf, "s", range(8), 0, NS, write_id=write)
    assert receipt.branch == made[1] != made[0]
    assert {branch[:16] for branch in made} == {promised("default", "s", NS.id, write)}


async def test_a_session_that_was_there_already_remembers_the_promise_that_it_took_in(repo, memory, clock, shelf):
    """An empty one was made first: what was promised lands in that, and is found there by another node."""
    write = "7" * 32
    said = promised("default", "s", NS.id, write)
    empty = await repo.sessions.create("default", "s", NS, "main")
    assert (await commit(repo, shelf, "s", range(8), 0, NS, write_id=write)).branch == empty.branch
    async with opened(memory, clock, SeededIds(3)) as fresh:
        assert (await commit(fresh, shelf, "s", range(12), 1, NS, branch=said)).branch == empty.branch
        with pytest.raises(Unavailable):
            await commit(fresh, shelf, "s", range(16), 2, NS, branch=promised("default", "s", NS.id, "8" * 32))


# --- which version ---


@pytest.mark.parametrize("tokens", [range(4), range(20, 32)])
async def test_a_base_that_is_not_what_the_caller_takes_it_for_is_not_replaced(repo, shelf, tokens):
    """The caller was promised a version 1 that could not be made; this one is somebody else's."""
    theirs = await commit(repo, shelf, "s", range(100, 108), 0, NS, branch="")
    mine = chain(NS, range(8))
    with pytest.raises(Conflict, match="not what this commit was built on") as conflict:
        await commit(repo, shelf, "s", tokens, 1, NS, branch=theirs.branch, base_prefix=mine[-1].prefix_id)
    assert conflict.value.facts["current"] == 1
    assert await tokens_of(repo) == 8


async def test_a_base_that_is_continued_takes_nothing_away_whatever_the_caller_took_it_for(repo, shelf):
    """It was promised 12 tokens, of which 8 could be kept."""
    first = await commit(repo, shelf, "s", range(8), 0, NS)
    promise = chain(NS, range(12))
    longer = await commit(repo, shelf, "s", range(16), 1, NS, branch=first.branch, base_prefix=promise[-1].prefix_id)
    assert (longer.version, longer.tokens) == (2, 16)
    edited = chain(NS, range(16))[-1].prefix_id
    assert (await commit(repo, shelf, "s", range(4), 2, NS, branch=first.branch, base_prefix=edited)).version == 3


def test_no_two_commits_share_a_promise_because_of_how_they_are_called():
    calls = [("a:b", "c", NS.id, "1"), ("a", "b:c", NS.id, "1"), ("a", "b", f"c:{NS.id}", "1"), ("a", "b", NS.id, "c:1")]
    assert len({promised(*call) for call in calls}) == len(calls)
