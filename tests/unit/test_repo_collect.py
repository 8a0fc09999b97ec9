"""Collection: what it seals, what it may take, and what it must never take (R4, R5)."""

import asyncio

import pytest
from fakes.sealed import contents, either

from kvstore.clock import SeededIds
from kvstore.errors import Corrupt, Unavailable, Unsupported
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle.collector import collect
from kvstore.model import Head, Manifest, dump, parse, sealed
from kvstore.objects import CREATE, OVERWRITE, Fault, Faults
from kvstore.repo import want
from kvstore.repo.heads import swapped
from kvstore.repo.testing import bodies, broken, commit, opened, tiny, until

NS = tiny()


def heads_of(memory) -> list[Head]:
    return [parse(body, Head, key) for key, body in bodies(memory).items() if "/heads/" in key]


def count(memory, kind) -> int:
    return len([key for key in bodies(memory) if f"/{kind}/" in key])


async def test_r4_every_open_head_is_sealed_and_remembers_it(repo, memory, shelf):
    for session in "abc":
        await commit(repo, shelf, session, range(8), 0, NS)
    done = await collect(repo)
    assert (done.heads, done.sealed) == (3, 3)
    assert all(not head.open and head.sealed_at == 1 for head in heads_of(memory))
    before = [head.swaps for head in heads_of(memory)]
    assert (await collect(repo)).sealed == 0
    assert [head.swaps for head in heads_of(memory)] == before


async def test_b52_of_2501_blocks_the_live_one_remains(repo, memory, store, shelf):
    await commit(repo, shelf, "s", range(4), 0, NS)
    live = next(key for key in bodies(memory) if "/blocks/" in key)
    for number in range(2500):
        await memory.put(f"r/blocks/{NS.id}/t0of1.p0of1.g0/{number:064x}/0000000001", b"garbage", CREATE)
    store.requests.clear()
    done = await collect(repo, now=True)
    assert (done.blocks_kept, done.blocks_deleted, done.bytes_deleted) == (1, 2500, 2500 * 7)
    assert [key for key in bodies(memory) if "/blocks/" in key] == [live]
    log = [entry for entry in store.requests if entry.key.startswith("r/blocks/")]
    assert [entry.verb for entry in log].count("list") == 3
    assert [entry.verb for entry in log].count("delete") == 3


async def test_b52_one_delete_in_ten_that_fails_is_tried_again(repo, memory, shelf):
    keys = [f"r/blocks/{NS.id}/t0of1.p0of1.g0/{number:064x}/0000000001" for number in range(10)]
    for key in keys:
        await memory.put(key, b"x", CREATE)
    asked = []

    class Stubborn:
        failures = 1

        def __getattr__(self, name):
            return getattr(memory, name)

        async def delete(self, batch):
            asked.append(list(batch))
            left = [key for key in batch if key == keys[3] and self.failures]
            self.failures -= bool(left)
            await memory.delete([key for key in batch if key not in left])
            return left

    repo.root.store = Stubborn()
    assert (await collect(repo, now=True)).blocks_deleted == 10
    assert asked == [keys, [keys[3]]]
    assert count(memory, "blocks") == 0

    for key in keys:
        await memory.put(key, b"x", CREATE)
    Stubborn.failures = 9
    repo.root.store = Stubborn()
    done = await collect(repo, now=True)
    assert (done.blocks_deleted, done.blocks_kept, done.failed) == (9, 1, 1)
    assert (await collect(repo)).blocks_deleted == 0  # it was not left to time: the next run tries again
    assert (await collect(repo)).failed == 1


@either
async def test_nothing_younger_than_two_epochs_is_taken(repo, memory, clock, shelf):
    await commit(repo, shelf, "s", range(16), 0, NS, ttl=0)
    await repo.sessions.delete("default", "s")
    period = repo.settings.period
    for blocks in (4, 4, 0):
        await collect(repo)
        assert count(memory, "blocks") == count(memory, "manifests") * 4 == blocks
        clock.advance(period + 1)
    assert (await repo.epochs.read()).epoch == 3


async def test_the_epoch_advances_once_a_period_whoever_collects(repo, other, clock):
    clock.advance(repo.settings.period + 1)
    epochs = [(await collect(node)).epoch for node in (repo, other, repo, other)]
    assert epochs == [2, 2, 2, 2]
    clock.advance(repo.settings.period + 1)
    assert [done.epoch for done in await asyncio.gather(collect(repo), collect(other))] == [3, 3]


@either
async def test_now_frees_at_once_what_was_deleted(repo, memory, shelf):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await commit(repo, shelf, "t", range(100, 108), 0, NS)
    await repo.sessions.delete("default", "s")
    done = await collect(repo, now=True)
    assert (done.epoch, done.blocks_deleted, done.manifests_deleted, done.blocks_kept) == (3, 4, 1, 2)
    assert (await repo.sessions.get("default", "t")).tokens == 8


@either
async def test_a_dry_run_changes_nothing_and_counts_the_same(repo, memory, clock, shelf):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await commit(repo, shelf, "t", range(100, 108), 0, NS, ttl=10)
    await repo.sessions.delete("default", "s")
    clock.advance(11)
    before = bodies(memory)
    planned = await collect(repo, dry_run=True, now=True)
    assert bodies(memory) == before
    done = await collect(repo, now=True)
    assert planned.dry_run
    assert (planned.epoch, planned.expired, planned.sealed, planned.blocks_deleted, planned.bytes_deleted) == (
        done.epoch,
        done.expired,
        done.sealed,
        done.blocks_deleted,
        done.bytes_deleted,
    )
    assert done.blocks_deleted == 6


@either
async def test_r10_blocks_beyond_a_rewound_length_go_once_history_lets_them(memory, clock, shelf, masters):
    async with opened(memory, clock, history=1, masters=masters) as repo:
        await commit(repo, shelf, "s", range(16), 0, NS)
        await repo.sessions.rewind("default", "s", tokens=4)
        assert (await collect(repo, now=True)).blocks_kept == 4  # version 1 is still restorable
        await repo.sessions.rewind("default", "s", tokens=0)
        assert (await collect(repo, now=True)).blocks_kept == 1
        assert broken(await contents(repo, memory), repo.root.keys) == []


@either
async def test_r5_a_manifest_that_is_absent_and_still_named_stops_the_collection(repo, memory, shelf):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await commit(repo, shelf, "t", range(8), 0, NS)
    await repo.sessions.delete("default", "t")
    await memory.delete([next(key for key in bodies(memory) if "/manifests/" in key)])
    repo.manifests._cache.clear()
    with pytest.raises(Corrupt, match="nothing was collected"):
        await collect(repo, now=True)
    assert count(memory, "blocks") == 4


async def test_r5_a_manifest_that_went_because_the_head_moved_on_is_looked_for_there(memory, clock, shelf):
    """Between our seal and our marks a commit replaced the manifest, and another collection took the old one."""
    store = Faults(memory, clock=clock)
    async with opened(store, clock, history=0) as slow, opened(memory, clock, SeededIds(2), history=0) as node:
        await commit(node, shelf, "s", range(16), 0, NS)
        held = Fault(action="stall", verb="get", key="*/manifests/*")
        store.script.append(held)
        collecting = asyncio.create_task(collect(slow))
        await until(lambda: not held.times)
        await commit(node, shelf, "s", range(20), 1, NS)
        await collect(node, now=True)
        assert count(memory, "manifests") == 1
        store.release.set()
        await collecting
        assert broken(bodies(memory), node.root.keys) == []
        assert (await node.sessions.get("default", "s")).tokens == 20


@pytest.mark.parametrize(
    ("kind", "body", "error"),
    [
        (Head, b"{not json", Corrupt),
        (Head, b'{"v":9}', Unsupported),
        (Manifest, b"{not json", Corrupt),
        (Manifest, b'{"v":9}', Unsupported),
    ],
)
async def test_what_cannot_be_read_stops_the_collection(repo, memory, shelf, kind, body, error):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await commit(repo, shelf, "t", range(8), 0, NS)
    await repo.sessions.delete("default", "t")
    key = next(key for key in bodies(memory) if f"/{kind.__name__.lower()}s/" in key)
    await memory.put(key, sealed(body, kind, key), OVERWRITE)
    repo.manifests._cache.clear()
    with pytest.raises(error):
        await collect(repo, now=True)
    assert count(memory, "blocks") == 4


async def test_an_empty_head_two_epochs_old_is_ended_and_stays(repo, memory, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await repo.sessions.delete("default", "s")
    await collect(repo)
    await repo.epochs.advance(await repo.epochs.read())
    await collect(repo)
    assert [head.dead for head in heads_of(memory)] == [False]
    await repo.epochs.advance(await repo.epochs.read())
    await collect(repo)
    assert [head.dead for head in heads_of(memory)] == [True]
    assert (await collect(repo)).heads == 0
    assert (await commit(repo, shelf, "s", range(8), 0, NS)).version == 1  # under a family of its own (R7)
    assert sorted(head.dead for head in heads_of(memory)) == [False, True]


async def test_keys_that_are_not_ours_are_left_alone(repo, memory, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    foreign = [
        "r/blocks/readme.txt",
        f"r/blocks/{NS.id}/t0of1.p0of1.g0/nonsense/0000000001",
        "r/manifests/x",
        "r/heads/x",
        "other/a",
    ]
    for key in foreign:
        await memory.put(key, b"x", CREATE)
    done = await collect(repo, now=True)
    assert (done.blocks_deleted, done.manifests_deleted) == (0, 0)
    assert set(foreign) <= set(bodies(memory))


@either
async def test_b51_lite_deleting_while_a_reader_is_at_it_gives_a_shorter_prefix(repo, other, memory, shelf):
    await commit(repo, shelf, "s", range(400), 0, NS)
    _, manifest = await other.sessions.resolve("default", "s")
    await repo.sessions.delete("default", "s")
    await collect(repo, now=True)
    asked = [want(NS, BlockName(NS.id, Shard(), block.prefix_id, block.tokens), block.copies[0]) for block in manifest.blocks]
    assert await other.origin.contains(asked) == 0
    assert await other.origin.fetch(asked[60], memoryview(bytearray(asked[60].size))) is not None


async def test_a_head_that_never_rests_is_given_up_and_nothing_is_deleted(repo, memory, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)

    class Busy:
        """Whenever somebody wants to seal, somebody else was faster."""

        def __getattr__(self, name):
            return getattr(memory, name)

        async def put(self, key, body, mode):
            if "/heads/" in key:
                head = parse(bodies(memory)[key], Head, key)
                await memory.put(key, dump(swapped(head, f"{head.swaps:032x}"), key), OVERWRITE)
            return await memory.put(key, body, mode)

    repo.root.store = Busy()
    with pytest.raises(Unavailable, match="all the time"):
        await collect(repo)


async def test_collections_and_commits_at_once_lose_nothing(memory, clock, shelf):
    """Liveness, a little: a writer that appends while two nodes collect without a pause."""
    stop = asyncio.Event()

    async def collector(number: int) -> int:
        runs = 0
        async with opened(memory, clock, SeededIds(number)) as node:
            while not stop.is_set():
                await collect(node, now=True)
                runs += 1
        return runs

    async def writer(number: int) -> None:
        async with opened(memory, clock, SeededIds(10 + number)) as node:
            for turn in range(25):
                receipt = await commit(node, shelf, f"s{number}", range(number * 1000, number * 1000 + 4 * turn + 4), turn, NS)
                assert receipt.version == turn + 1
                assert broken(bodies(memory), node.root.keys) == []

    collectors = [asyncio.create_task(collector(number)) for number in (1, 2)]
    await asyncio.gather(*(writer(number) for number in range(3)))
    stop.set()
    assert min(await asyncio.gather(*collectors)) > 3
