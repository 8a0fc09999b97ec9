"""How long things live: sessions by their time to live, old versions and partial blocks by history, anonymous blocks by use."""

import asyncio

import pytest
from fakes.sealed import contents, either

from kvstore.clock import SeededIds
from kvstore.errors import Gone
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle.collector import collect
from kvstore.objects import Fault, Faults
from kvstore.repo import want
from kvstore.repo.testing import bodies, broken, commit, opened, tiny, until

NS = tiny()


def keys_of(repo, shelf, tokens, gen=1):
    """Keys of the blocks of these tokens."""
    links = shelf.fill(NS, tokens)
    return {repo.uploads.key(BlockName(NS.id, Shard(), link.prefix_id, link.tokens), gen) for link in links}


def stored(memory, kind):
    return {key for key in bodies(memory) if key.startswith(f"r/{kind}/")}


async def twice_collected(repo, memory):
    """What two collections delete."""
    before = set(bodies(memory))
    for _ in range(2):
        await collect(repo, now=True)
    return before - set(bodies(memory))


# --- versions and partial blocks ---


@either
async def test_versions_beyond_the_history_are_freed_and_nothing_else(memory, clock, shelf, masters):
    """Each version edits the one before, so that each has blocks of its own."""
    async with opened(memory, clock, history=2, masters=masters) as repo:
        versions = [[*range(4), *range(100 * turn, 100 * turn + 8)] for turn in range(1, 6)]
        written = []
        for turn, tokens in enumerate(versions):
            before = stored(memory, "manifests")
            assert (await commit(repo, shelf, "s", tokens, turn, NS)).version == turn + 1
            (made,) = stored(memory, "manifests") - before
            written.append(made)
        blocks = [keys_of(repo, shelf, tokens) for tokens in versions]
        over = blocks[0] | blocks[1]
        kept = blocks[2] | blocks[3] | blocks[4]
        deleted = await twice_collected(repo, memory)
        assert deleted == (over - kept) | {written[0], written[1]}
        assert stored(memory, "blocks") == kept
        assert broken(await contents(repo, memory), repo.root.keys) == []
        assert [each.version for each in (await repo.sessions.versions("default", "s")).versions] == [5, 4, 3]
        with pytest.raises(Gone, match="no longer kept"):
            await repo.sessions.resolve("default", "s", version=2)


@either
@pytest.mark.parametrize("history", [0, 1, 2])
async def test_partial_blocks_that_longer_turns_replaced_go_once_no_version_needs_them(memory, clock, shelf, history, masters):
    async with opened(memory, clock, history=history, masters=masters) as repo:
        lengths = [6, 11, 14, 18]  # each ends within a block
        for turn, length in enumerate(lengths):
            await commit(repo, shelf, "s", range(length), turn, NS)
        partial = {length: keys_of(repo, shelf, range(length)) - keys_of(repo, shelf, range(20)) for length in lengths}
        assert [len(keys) for keys in partial.values()] == [1, 1, 1, 1]
        over = lengths[: len(lengths) - 1 - history]
        deleted = {key for key in await twice_collected(repo, memory) if "/blocks/" in key}
        assert deleted == set().union(*(partial[length] for length in over))
        for version, length in enumerate(lengths[len(over) :], len(over) + 1):
            assert (await repo.sessions.manifest("default", "s", version=version)).tokens == length


@either
async def test_what_was_superseded_goes_after_two_periods_without_anybodys_haste(memory, clock, shelf, masters):
    async with opened(memory, clock, history=0, masters=masters) as repo:
        await commit(repo, shelf, "s", range(6), 0, NS, ttl=0)
        await commit(repo, shelf, "s", range(8), 1, NS)
        partial = keys_of(repo, shelf, range(6)) - keys_of(repo, shelf, range(8))
        seen = []
        for _ in range(4):
            await collect(repo)
            seen.append(partial <= stored(memory, "blocks"))
            clock.advance(repo.settings.period + 1)
        assert seen == [True, True, False, False]


# --- sessions ---


async def test_a_sliding_life_is_written_only_when_under_half_is_left(memory, clock, shelf):
    store = Faults(memory, clock=clock)
    async with opened(store, clock) as repo:
        await commit(repo, shelf, "s", range(8), 0, NS, ttl=100)
        swaps = []
        for _ in range(10):
            clock.advance(10)
            store.requests.clear()
            await repo.sessions.resolve("default", "s")
            swaps.append(store.counts["put"])
        # renewed 60 s after it began and 60 s after that: the tenth look is 40 s after the renewal
        assert swaps == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


async def test_i5_a_renewal_before_the_judged_swap_wins(memory, clock, shelf):
    """The collector judged it expired and stalls in its sealing swap; a restore renews it meanwhile."""
    store = Faults(memory, clock=clock)
    async with opened(store, clock) as collector, opened(memory, clock, SeededIds(2)) as node:
        await commit(node, shelf, "s", range(8), 0, NS, ttl=100)
        clock.advance(101)
        held = Fault(action="stall", verb="put", key="*/heads/*")
        store.script.append(held)
        collecting = asyncio.create_task(collect(collector, now=True))
        await until(lambda: not held.times)
        session, _ = await node.sessions.resolve("default", "s")
        assert session.expires == clock.now() + 100
        store.release.set()
        done = await collecting
        assert (done.expired, done.blocks_deleted) == (0, 0)
        assert (await node.sessions.get("default", "s")).expires == session.expires
        assert broken(bodies(memory), node.root.keys) == []


@pytest.mark.parametrize("what", ["restore", "touch", "commit"])
async def test_i5_an_expiry_before_the_renewals_swap_wins(memory, clock, shelf, what):
    """The node has read it alive and stalls in the swap that would renew it; a collection expires it meanwhile."""
    store = Faults(memory, clock=clock)
    async with opened(store, clock) as node, opened(memory, clock, SeededIds(2)) as collector:
        await commit(node, shelf, "s", range(8), 0, NS, ttl=100)
        clock.advance(101)
        held = Fault(action="stall", verb="put", key="*/heads/*")
        store.script.append(held)
        work = {
            "restore": lambda: node.sessions.resolve("default", "s"),
            "touch": lambda: node.sessions.touch("default", "s"),
            "commit": lambda: commit(node, shelf, "s", range(12), 1, NS),
        }
        renewing = asyncio.create_task(work[what]())
        await until(lambda: not held.times)
        assert (await collect(collector, now=True)).expired == 1
        store.release.set()
        with pytest.raises(Gone):
            await renewing
        for each in (node, collector):
            with pytest.raises(Gone):
                await each.sessions.get("default", "s")  # no revival
        assert broken(bodies(memory), node.root.keys) == []
        assert (await commit(node, shelf, "s", range(12), 0, NS)).version == 1  # its name is free: a new session (R7)


@pytest.mark.parametrize("action", ["lost", "busy"])
async def test_i5_a_renewal_whose_answer_is_lost_landed_or_is_tried_again(memory, clock, shelf, action):
    store = Faults(memory, clock=clock)
    async with opened(store, clock) as node, opened(memory, clock, SeededIds(2)) as collector:
        await commit(node, shelf, "s", range(8), 0, NS, ttl=100)
        clock.advance(90)
        store.script.append(Fault(action=action, verb="put", key="*/heads/*"))
        session, _ = await node.sessions.resolve("default", "s")
        clock.advance(50)
        assert (await collect(collector)).expired == 0
        assert (await collector.sessions.get("default", "s")).expires == session.expires


@either
async def test_many_restores_and_collections_at_the_last_second_agree(memory, clock, shelf, masters):
    """Whatever the order: either the restore was answered and the session lives, or it is gone for everybody."""
    seen = set()
    for seed in range(12):
        async with (
            opened(memory, clock, SeededIds(100 + seed), masters=masters) as node,
            opened(memory, clock, SeededIds(200 + seed), masters=masters) as collector,
        ):
            name = f"s{seed}"
            await commit(node, shelf, name, range(8), 0, NS, ttl=100)
            clock.advance(101)
            collecting = asyncio.create_task(collect(collector, now=True))
            for _ in range(seed):
                await asyncio.sleep(0)
            try:
                await node.sessions.resolve("default", name)
                restored = True
            except Gone:
                restored = False
            await collecting
            alive = [each.id for each in (await collector.sessions.list("default", name)).sessions] == [name]
            assert alive == restored
            assert broken(await contents(node, memory), node.root.keys) == []
            seen.add(restored)
    assert seen == {True, False}


# --- anonymous blocks ---


async def test_an_anonymous_block_lives_by_its_hits(memory, clock, shelf):
    """Offered together; one is read once a period by whichever node, the other never."""
    async with opened(memory, clock) as repo, opened(memory, clock, SeededIds(2)) as other:
        names = [BlockName(NS.id, Shard(), shelf.fill(NS, tokens)[0].prefix_id, 4) for tokens in (range(4), range(10, 14))]
        for name in names:
            lease = shelf.lease(name, shelf.held[name])
            assert await repo.uploads.offer(name, NS, (await repo.epochs.read()).epoch, lease)
            lease.release()
        useful, idle = names
        alive = []
        for period in range(5):
            node = (repo, other)[period % 2]
            room = memoryview(bytearray(want(NS, useful).size))
            assert await node.origin.fetch(want(NS, useful), room) is None, period
            assert bytes(room) == shelf.held[useful]
            await node.origin.aclose()  # what is copied in the background has landed
            alive.append({name for name in names if any(f"/{name.prefix_id}/" in key for key in stored(memory, "blocks"))})
            clock.advance(repo.settings.period + 1)
            await collect(repo)
        assert alive == [{useful, idle}, {useful, idle}, {useful}, {useful}, {useful}]
        await collect(repo, now=True)
        assert stored(memory, "blocks") == set()  # nobody asked any more


@pytest.mark.parametrize(("after", "lived"), [(0.0, 2.0), (0.5, 1.5), (0.99, 1.01)])
async def test_an_anonymous_block_lives_one_to_two_periods(memory, clock, shelf, after, lived):
    """By when within a period it was written; somebody collects every hundredth of one."""
    async with opened(memory, clock) as repo:
        period = repo.settings.period
        clock.advance(after * period)
        name = BlockName(NS.id, Shard(), shelf.fill(NS, range(4))[0].prefix_id, 4)
        lease = shelf.lease(name, shelf.held[name])
        assert await repo.uploads.offer(name, NS, (await repo.epochs.read()).epoch, lease)
        lease.release()
        steps = 0
        while stored(memory, "blocks"):
            clock.advance(period / 100)
            await collect(repo)
            steps += 1
            assert steps < 300
        assert steps / 100 == pytest.approx(lived, abs=0.03)
