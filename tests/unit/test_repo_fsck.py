"""fsck: what it finds, what it leaves alone, and what it may repair."""

import asyncio

import msgspec
import pytest

from kvstore import codec
from kvstore.clock import SeededIds
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle.collector import collect
from kvstore.model import Head, dump, parse
from kvstore.objects import CREATE, OVERWRITE, Crash, Fault, Faults
from kvstore.repo.fsck import fsck
from kvstore.repo.heads import swapped
from kvstore.repo.testing import bodies, broken, commit, opened, tiny, until

NS = tiny()


@pytest.fixture
async def repo(memory, clock):
    async with opened(memory, clock) as repo:
        yield repo


def keys_of(memory, kind) -> list[str]:
    return sorted(key for key in bodies(memory) if key.startswith(f"r/{kind}/"))


def block_key(repo, shelf, tokens, index, gen=1) -> str:
    link = shelf.fill(NS, tokens)[index]
    return repo.uploads.key(BlockName(NS.id, Shard(), link.prefix_id, link.tokens), gen)


def kinds(report) -> list[str]:
    return sorted(finding.kind for finding in report.findings)


async def test_a_healthy_root_is_counted_and_clean(repo, other, memory, shelf):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await repo.sessions.fork("default", "s", NS.id, "", "t")
    await commit(repo, shelf, "u", range(100, 108), 0, NS)
    await repo.sessions.delete("default", "u")
    before = bodies(memory)
    report = await fsck(other, deep=True, repair=True)
    assert report.clean
    assert report.findings == report.repaired == []
    assert (report.heads, report.branches, report.names, report.dangling_names) == (2, 2, 3, 1)
    assert (report.manifests, report.garbage_manifests, report.blocks, report.garbage_blocks) == (2, 1, 6, 2)
    assert report.garbage_bytes == 2 * len(shelf.held.popitem()[1])
    assert bodies(memory) == before


async def test_missing_and_altered_things_are_named(repo, other, memory, shelf):
    for session, start in (("a", 0), ("b", 100), ("c", 200), ("d", 300)):
        await commit(repo, shelf, session, range(start, start + 16), 0, NS)
    gone = block_key(repo, shelf, range(16), 2)
    await memory.delete([gone])
    flipped = block_key(repo, shelf, range(100, 116), 1)
    body = bytearray(bodies(memory)[flipped])
    body[-1] ^= 1
    await memory.put(flipped, bytes(body), OVERWRITE)
    cut = block_key(repo, shelf, range(200, 216), 3)
    await memory.put(cut, bodies(memory)[cut][:-4], OVERWRITE)
    await memory.put("r/heads/default/garbled", b"{", CREATE)
    await memory.put(keys_of(memory, "names")[0], b"{}", OVERWRITE)
    for foreign in ("r/heads/x", "r/manifests/x", "r/blocks/x", "r/names/x"):
        await memory.put(foreign, b"", CREATE)

    shallow = await fsck(other)
    assert not shallow.clean
    assert kinds(shallow) == sorted(
        ["block_missing", "block_corrupt", "head_unreadable", "name_unreadable", *["foreign_key"] * 4]
    )  # a size that is not the stated one is looked into; a flipped bit takes a deep look
    deep = await fsck(other, deep=True)
    assert {finding.key for finding in deep.findings if finding.kind == "block_corrupt"} == {flipped, cut}
    assert {finding.key for finding in deep.findings if finding.kind == "block_missing"} == {gone}


async def test_a_missing_manifest_is_named_although_it_is_remembered(repo, memory, shelf):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await memory.delete(keys_of(memory, "manifests"))
    report = await fsck(repo)
    assert kinds(report) == ["manifest_missing"]
    assert report.garbage_blocks == 4


async def test_repair_shortens_to_what_is_sound_as_a_rewind_would(repo, other, memory, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await commit(repo, shelf, "s", range(16), 1, NS)
    await commit(repo, shelf, "s", range(20), 2, NS)
    await memory.delete([block_key(repo, shelf, range(16), 2)])
    report = await fsck(other, repair=True)
    assert not report.clean
    assert len(report.repaired) == 1
    session = await repo.sessions.get("default", "s")
    assert (session.version, session.tokens) == (4, 8)
    assert [(each.version, each.tokens) for each in (await repo.sessions.versions("default", "s")).versions] == [(4, 8), (1, 8)]
    assert (await fsck(other, deep=True, repair=True)).findings == []
    assert broken(bodies(memory), repo.root.keys) == []
    assert (await commit(repo, shelf, "s", range(20), 4, NS)).tokens == 20  # and life goes on


async def test_repair_of_a_missing_manifest_falls_back_on_an_older_version(repo, other, memory, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    before = set(keys_of(memory, "manifests"))
    await commit(repo, shelf, "s", range(16), 1, NS)
    await commit(repo, shelf, "lost", range(100, 108), 0, NS)
    await memory.delete(sorted(set(keys_of(memory, "manifests")) - before))
    assert len((await fsck(other, repair=True)).repaired) == 2
    kept, lost = await other.sessions.get("default", "s"), await other.sessions.get("default", "lost")
    assert (kept.version, kept.tokens) == (3, 8)
    assert (lost.version, lost.tokens) == (2, 0)
    assert (await fsck(other)).findings == []


async def test_repair_puts_the_bytes_of_another_generation_over_a_bad_copy(repo, other, memory, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    key = block_key(repo, shelf, range(8), 1)
    sound = bodies(memory)[key]
    await memory.put(block_key(repo, shelf, range(8), 1, gen=2), sound, CREATE)
    await memory.put(key, sound[:100] + b"\x00" * (len(sound) - 100), OVERWRITE)
    report = await fsck(other, deep=True, repair=True)
    assert kinds(report) == ["block_corrupt"]
    assert "another generation" in report.repaired[0]
    assert bodies(memory)[key] == sound
    assert (await repo.sessions.get("default", "s")).version == 1


async def test_a_block_that_changed_size_and_is_sound_is_only_a_note(repo, other, memory, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    link = shelf.fill(NS, range(8))[0]
    name = BlockName(NS.id, Shard(), link.prefix_id, link.tokens)
    await memory.put(repo.uploads.key(name, 1), codec.encode(memoryview(shelf.held[name]), name, NS, "zstd").body, OVERWRITE)
    report = await fsck(other)
    assert kinds(report) == ["block_resized"]
    assert report.clean


async def test_an_unnamed_branch_that_never_expires_is_dropped_after_its_grace(repo, other, memory, clock, shelf):
    store = Faults(memory, [Fault(action="crash-before", verb="put", key="*/names/*")], clock)
    async with opened(memory, clock, SeededIds(9)) as crashing:
        crashing.root.store = store
        with pytest.raises(Crash):
            await crashing.sessions.create("default", "s", NS, ttl=0)
    assert (await fsck(other, repair=True)).unnamed_branches == 1  # it may be a create under way
    clock.advance(8 * 86400)
    report = await fsck(other, repair=True)
    assert kinds(report) == ["branch_unnamed"]
    assert report.clean
    assert len(report.repaired) == 1
    assert (await fsck(other)).unnamed_branches == 0


async def test_an_unnamed_branch_that_expires_is_left_to_expire(repo, other, memory, clock, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    (key,) = keys_of(memory, "heads")
    head = parse(bodies(memory)[key], Head, key)
    extra = msgspec.structs.replace(next(iter(head.branches.values())), history=())
    await memory.put(key, dump(swapped(head, "f" * 32, branches={"0" * 32: extra}), key), OVERWRITE)
    clock.advance(30 * 86400)
    report = await fsck(other, repair=True)
    assert (report.unnamed_branches, report.repaired) == (1, [])
    assert (await collect(other)).expired == 2


async def test_fsck_beside_a_writer_and_a_collector_raises_no_false_alarm(memory, clock, shelf):
    stop = asyncio.Event()

    async def writer() -> None:
        async with opened(memory, clock, SeededIds(1), history=1) as node:
            for turn in range(30):
                if turn % 3 == 2:
                    await node.sessions.rewind("default", "s", tokens=4)
                else:
                    await commit(node, shelf, "s", range(turn * 100, turn * 100 + 12), turn, NS, lane="main")
        stop.set()

    async def collector() -> None:
        async with opened(memory, clock, SeededIds(2)) as node:
            while not stop.is_set():
                await collect(node, now=True)
                for _ in range(100):  # a collection at a time leaves writers room to land
                    await asyncio.sleep(0)

    async def checker() -> int:
        runs = 0
        async with opened(memory, clock, SeededIds(3)) as node:
            while not stop.is_set():
                assert [f for f in (await fsck(node, deep=True)).findings if f.severity == "error"] == []
                runs += 1
        return runs

    *_, runs = await asyncio.gather(writer(), collector(), checker())
    assert runs > 1


async def test_blocks_that_a_rewind_gave_up_while_fsck_looked_are_not_missing(memory, clock, shelf):
    """Found by the simulation: the manifest is still named, and fewer blocks of it."""
    store = Faults(memory, clock=clock)
    async with opened(store, clock, history=0) as checker, opened(memory, clock, SeededIds(2), history=0) as node:
        await commit(node, shelf, "s", range(16), 0, NS)
        held = Fault(action="stall", verb="get", key="*/manifests/*")
        store.script.append(held)
        checking = asyncio.create_task(fsck(checker))
        await until(lambda: not held.times)
        await node.sessions.rewind("default", "s", tokens=4)
        await collect(node, now=True)
        store.release.set()
        assert (await checking).findings == []


async def test_what_a_head_and_its_manifest_disagree_on_is_an_error(repo, other, memory, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    (key,) = keys_of(memory, "heads")
    head = parse(bodies(memory)[key], Head, key)
    longer = {name: msgspec.structs.replace(branch, n=5) for name, branch in head.branches.items()}
    await memory.put(key, dump(swapped(head, "f" * 32, branches=longer), key), OVERWRITE)
    assert kinds(await fsck(other)) == ["manifest_short"]


async def test_a_clean_root_is_read_once_and_a_missing_block_costs_a_second_look(memory, clock, shelf):
    store = Faults(memory, clock=clock)
    async with opened(store, clock) as repo:
        await commit(repo, shelf, "s", range(16), 0, NS)
        await repo.sessions.fork("default", "s", NS.id, "", "t")
        await commit(repo, shelf, "t", range(24), 1, NS)
    async with opened(store, clock, SeededIds(2)) as other:
        store.requests.clear()
        assert (await fsck(other)).clean
        assert [entry.verb for entry in store.requests if "/manifests/" in entry.key and entry.verb == "get"] == ["get"] * 2
        assert [entry for entry in store.requests if "/blocks/" in entry.key and entry.verb != "list"] == []
        gone = block_key(other, shelf, range(16), 2)
        await memory.delete([gone])
        store.requests.clear()
        report = await fsck(other)
        assert [(finding.kind, finding.key) for finding in report.findings] == [
            ("block_missing", gone)
        ]  # though two versions name it
        assert [entry.verb for entry in store.requests if "/blocks/" in entry.key and entry.verb != "list"] == ["head"]
        assert (await fsck(other, repair=True)).repaired
    for session in ("s", "t"):
        async with opened(memory, clock, SeededIds(3)) as after:
            assert (await after.sessions.get("default", session)).tokens == 8


async def test_sizes_are_compared_with_what_any_manifest_states(repo, other, memory, shelf):
    namespace = tiny(dtype="BF16", layers=2)
    await commit(repo, shelf, "s", range(8), 0, namespace)
    link = shelf.fill(namespace, range(8))[1]
    name = BlockName(namespace.id, Shard(), link.prefix_id, link.tokens)
    key = repo.uploads.key(name, 1)
    await memory.put(key, codec.encode(memoryview(shelf.held[name]), name, namespace, "zstd").body, OVERWRITE)  # repaired elsewhere
    report = await fsck(other)
    assert report.clean
    assert [(finding.kind, finding.key) for finding in report.findings] == [("block_resized", key)]
    assert report.garbage_blocks == 0
