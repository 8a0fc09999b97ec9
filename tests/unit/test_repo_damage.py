"""Flipped bits in registers and manifests: on the way they cost one more read; at rest nobody believes or spreads them."""

import logging

import pytest

from kvstore.clock import SeededIds
from kvstore.errors import Corrupt, KVTierError, Unavailable
from kvstore.keys import Keys
from kvstore.lifecycle.collector import collect
from kvstore.lifecycle.hints import CollectHint, UsageHint, read_hint
from kvstore.model import MAX_EPOCH, Epoch, Head, Manifest, dump, parse
from kvstore.objects import OVERWRITE, Fault, Faults, MemoryStore
from kvstore.repo.fsck import fsck
from kvstore.repo.manifests import pack, unpack
from kvstore.repo.testing import Shelf, bodies, broken, commit, opened, tiny

NS = tiny()
BITS = (0x01, 0x20, 0x80)


async def _made(memory, clock, shelf):
    """A session of two versions, a fork, and a collection that has passed."""
    async with opened(memory, clock) as repo:
        await repo.put_namespace(NS)
        await commit(repo, shelf, "s", range(16), 0, NS)
        await commit(repo, shelf, "s", range(20), 1, NS)
        await repo.sessions.fork("default", "s", NS.id, "", "fork")
        await collect(repo)


@pytest.fixture
async def made(memory, clock, shelf):
    await _made(memory, clock, shelf)
    return memory


def key_of(memory, kind):
    return next(key for key in bodies(memory) if f"{key}/".startswith(f"r/{kind}/"))


async def flip(memory, key, at, bits=0x01):
    body = bytearray(bodies(memory)[key])
    body[at % len(body)] ^= bits
    await memory.put(key, bytes(body), OVERWRITE)


async def _commit(repo, shelf):
    await commit(repo, shelf, "s", range(24), 2, NS)
    return 24


async def _rewind(repo, shelf):
    await repo.sessions.rewind("default", "s", NS.id, "", tokens=8)
    return 8


async def _touch(repo, shelf):
    await repo.sessions.touch("default", "s", NS.id, ttl=77)
    return 20


async def _pin(repo, shelf):
    await repo.sessions.pin("default", "s", NS.id)
    return 20


async def _fork(repo, shelf):
    await repo.sessions.fork("default", "s", NS.id, "", "another")
    return 20


async def _collect(repo, shelf):
    await collect(repo, now=True)
    return 20


@pytest.mark.parametrize("step", [_commit, _rewind, _touch, _pin, _fork, _collect], ids=lambda step: step.__name__[1:])
async def test_i7_a_flip_on_the_way_of_a_head_is_read_again_and_never_written_back(made, clock, shelf, step):
    """The second node has read nothing yet. One answer to it is damaged, at every seventh byte and in three bits."""
    start = dict(made._objects)
    length = len(bodies(made)[key_of(made, "heads")])
    for number, at in enumerate(range(0, length, 7)):
        made._objects.clear()
        made._objects.update(start)
        faults = Faults(made, [Fault(action="corrupt", verb="get", key="*/heads/*", at=at, bits=BITS[number % 3])], clock)
        async with opened(faults, clock, SeededIds(2)) as repo:
            tokens = await step(repo, shelf)
            assert faults.script[0].times == 0
            assert repo.root.corrupt_reads == {"heads": 1}
        async with opened(made, clock, SeededIds(3)) as after:
            assert (await after.sessions.get("default", "s")).tokens == tokens
            assert (await after.sessions.get("default", "fork")).tokens == 20
            assert [version.tokens for version in (await after.sessions.versions("default", "s")).versions][-1] == 16
            assert (await fsck(after, deep=number == 0)).findings == []
        assert broken(bodies(made), Keys("r")) == []


@pytest.mark.parametrize(
    ("pattern", "folder"),
    [("*/names/*", "names"), ("*/epoch", "epoch"), ("*/manifests/*", "manifests"), ("*/format.json", "format.json"),
     ("*/namespaces/*", "namespaces")],
)  # fmt: skip
async def test_i7_a_flip_on_the_way_of_anything_else_is_read_again(made, clock, shelf, pattern, folder):
    start = dict(made._objects)
    for number, at in enumerate(range(0, len(bodies(made)[key_of(made, folder)]), 11)):
        made._objects.clear()
        made._objects.update(start)
        fault = Fault(action="corrupt", verb="get", key=pattern, at=at, bits=BITS[number % 3])
        fault.skip = int(folder == "format.json")  # the first one only asks whether it is there
        faults = Faults(made, [fault], clock)
        async with opened(faults, clock, SeededIds(2)) as repo:
            assert (await repo.namespace(NS.id)) == NS
            await commit(repo, shelf, "s", range(24), 2, NS)
            await collect(repo)
            assert fault.times == 0
            assert repo.root.corrupt_reads == {folder: 1}
        async with opened(made, clock, SeededIds(3)) as after:
            assert (await after.sessions.get("default", "s")).tokens == 24
            assert (await fsck(after)).findings == []


async def test_i9_an_answer_that_was_meant_for_another_session_is_no_answer(memory, clock, shelf, caplog):
    """As of a proxy that mixes answers up: whole, with a sound digest, and of another key."""
    async with opened(memory, clock) as repo:
        await commit(repo, shelf, "a", range(8), 0, NS)
        await commit(repo, shelf, "b", range(100, 124), 0, NS)
        await repo.sessions.delete("default", "a")

    class Mixed(MemoryStore):
        """The first answer for each head and name is another's."""

        def __init__(self):
            super().__init__(clock)
            self._objects, self.asked = memory._objects, set()

        async def get(self, key, **kwargs):
            folder = key.split("/")[1]
            if folder in {"heads", "names"} and key not in self.asked:
                self.asked.add(key)
                key = next(other for other in bodies(self) if other.startswith(f"r/{folder}/") and other != key)
            return await super().get(key, **kwargs)

    async with opened(Mixed(), clock, SeededIds(2)) as other:
        with caplog.at_level(logging.WARNING):
            assert (await other.sessions.get("default", "b")).tokens == 24
        assert other.root.corrupt_reads == {"names": 1, "heads": 1}
        assert caplog.text.count("damaged answer") == 2
    async with opened(Mixed(), clock, SeededIds(3)) as other:  # the other head names nothing: taken for ours, all of ours would go
        before = {key for key in bodies(memory) if "/blocks/" in key and "/names/" not in key}
        await collect(other, now=True)
        assert other.root.corrupt_reads == {"heads": 2}
        assert len(before) == 8
        assert len([key for key in bodies(memory) if "/blocks/" in key]) == 6
        assert broken(bodies(memory), Keys("r")) == []


@pytest.mark.parametrize("folder", ["heads", "manifests"])
async def test_i1_what_is_damaged_at_rest_stops_every_collection_which_says_so_and_deletes_nothing(made, clock, shelf, folder):
    """Nobody knows which blocks such a head names, so none of the bucket may go; also none of other sessions."""
    async with opened(made, clock, SeededIds(4)) as repo:
        await commit(repo, shelf, "garbage", range(500, 508), 0, NS)
        await repo.sessions.delete("default", "garbage")
        for _ in range(4):
            await repo.epochs.advance(await repo.epochs.read())
    start = dict(made._objects)
    key = max((key for key in bodies(made) if f"r/{folder}/" in key), key=lambda key: len(bodies(made)[key]))
    if folder == "manifests":
        key = next(key for key in bodies(made) if key.startswith("r/manifests/") and unpack(bodies(made)[key], key).tokens == 20)
    for at in range(0, len(start[key][0]), 5):
        made._objects.clear()
        made._objects.update(start)
        await flip(made, key, at)
        before = {name: body for name, body in bodies(made).items() if "/heads/" not in name and name != "r/epoch"}
        damaged = bodies(made)[key]
        async with opened(made, clock, SeededIds(5)) as repo:
            for dry_run in (True, False):
                with pytest.raises(Corrupt) as refused:
                    await collect(repo, now=True, dry_run=dry_run)
                assert key in refused.value.message
                assert "kvtier fsck" in refused.value.remedy
            report = await fsck(repo)
            assert (f"{folder.removesuffix('s')}_unreadable", key) in {(found.kind, found.key) for found in report.findings}
        assert {name: body for name, body in bodies(made).items() if "/heads/" not in name and name != "r/epoch"} == before
        assert bodies(made)[key] == damaged


@pytest.mark.parametrize("folder", ["heads", "names", "manifests"])
async def test_i7_no_byte_that_is_damaged_at_rest_gives_another_session_and_no_swap_spreads_it(made, clock, shelf, folder):
    """Every byte of what the session rests on."""
    start = dict(made._objects)
    key = key_of(made, folder)
    if folder == "manifests":
        key = next(key for key in bodies(made) if key.startswith("r/manifests/") and unpack(bodies(made)[key], key).tokens == 20)
    if folder == "names":
        key = next(key for key in bodies(made) if key.startswith("r/names/default/s/"))
    for at in range(len(start[key][0])):
        made._objects.clear()
        made._objects.update(start)
        await flip(made, key, at, BITS[at % 3])
        before = bodies(made)
        async with opened(made, clock, SeededIds(2)) as repo:
            with pytest.raises(Corrupt, match=key.removeprefix("r/")):
                await repo.sessions.touch("default", "s", NS.id)
            if folder != "manifests":
                with pytest.raises(Corrupt, match=key.removeprefix("r/")):
                    await commit(repo, shelf, "s", range(24), 2, NS)
            assert repo.root.corrupt_reads[folder] >= 2
        assert {name: body for name, body in bodies(made).items() if "/blocks/" not in name} == {
            name: body for name, body in before.items() if "/blocks/" not in name
        }


async def test_i7_a_node_that_holds_the_head_in_memory_writes_it_whole_again(made, clock, shelf):
    """Bits that rot inside a store leave the ETag alone, so that the next swap is of what the node has verified before."""
    async with opened(made, clock, SeededIds(2)) as repo:
        await repo.sessions.get("default", "s", NS.id)
        key = key_of(made, "heads")
        body, meta = made._objects[key]
        rotten = bytearray(body)
        rotten[len(body) // 2] ^= 4
        made._objects[key] = (bytes(rotten), meta)
        async with opened(made, clock, SeededIds(3)) as cold:
            with pytest.raises(Corrupt):
                await cold.sessions.get("default", "s", NS.id)
        await repo.sessions.touch("default", "s", NS.id, ttl=99)
    async with opened(made, clock, SeededIds(3)) as cold:
        assert (await cold.sessions.get("default", "s", NS.id)).tokens == 20
        assert (await fsck(cold)).findings == []


async def test_r9_a_damaged_epoch_stops_everybody_and_nothing_is_written(made, clock, shelf):
    async with opened(made, clock, SeededIds(2)) as repo:
        sound = made._objects["r/epoch"]
        for at in range(len(sound[0])):
            made._objects["r/epoch"] = sound
            await flip(made, "r/epoch", at, BITS[at % 3])
            before = bodies(made)
            for work in (repo.epochs.read(), collect(repo, now=True)):
                with pytest.raises(Corrupt, match="r/epoch is not a valid Epoch"):
                    await work
            with pytest.raises(KVTierError):
                async with opened(made, clock, SeededIds(3)):
                    pass
            assert bodies(made) == before


@pytest.mark.parametrize("epoch", [MAX_EPOCH + 1, 9_999_999_999, 10_000_000_000, (1 << 53) - 1])
async def test_r9_an_epoch_that_no_key_has_room_for_is_refused_by_everybody(made, clock, shelf, epoch):
    await made.put("r/epoch", dump(Epoch(epoch=epoch, write="w"), "r/epoch"), OVERWRITE)
    before = bodies(made)
    with pytest.raises(Corrupt, match="not a valid Epoch") as refused:
        async with opened(made, clock, SeededIds(2)):
            pass
    assert "damaged registers" in refused.value.remedy
    assert bodies(made) == before


async def test_r9_the_last_epoch_takes_commits_and_is_not_advanced(made, clock, shelf):
    await made.put("r/epoch", dump(Epoch(epoch=MAX_EPOCH, write="w"), "r/epoch"), OVERWRITE)
    async with opened(made, clock, SeededIds(2)) as repo:
        await commit(repo, shelf, "s", range(24), 2, NS)
        await commit(repo, shelf, "new", range(300, 308), 0, NS)
        assert f"r/manifests/default/{MAX_EPOCH}" not in bodies(made)
        assert any(f"/{MAX_EPOCH}-" in key for key in bodies(made))
        with pytest.raises(Corrupt, match="the last there is") as refused:
            await collect(repo, now=True)
        assert "empty root" in refused.value.remedy
        assert (await repo.epochs.read()).epoch == MAX_EPOCH
        assert broken(bodies(made), Keys("r")) == []


async def test_b31_fsck_names_all_that_is_damaged(made, clock):
    keys = {folder: key_of(made, folder) for folder in ("heads", "names", "namespaces")}
    for key in keys.values():
        await flip(made, key, 33)
    async with opened(made, clock, SeededIds(2)) as repo:
        found = {(each.kind, each.key) for each in (await fsck(repo, repair=True)).findings if each.severity == "error"}
    assert found >= {
        ("head_unreadable", keys["heads"]),
        ("name_unreadable", keys["names"]),
        ("namespace_unreadable", keys["namespaces"]),
    }


async def test_a_damaged_hint_counts_for_nothing(made, clock):
    async with opened(made, clock, SeededIds(2)) as repo:
        hints = {repo.root.keys.collect_hint: CollectHint, repo.root.keys.usage_hint: UsageHint}
        for key, kind in hints.items():
            assert isinstance(await read_hint(repo.root, key, kind), kind)
            sound = made._objects[key]
            for at in range(0, len(sound[0]), 13):
                made._objects[key] = sound
                await flip(made, key, at)
                assert await read_hint(repo.root, key, kind) is None


def _large():
    family = "f" * 32
    manifest = Manifest(
        namespace=NS.id,
        shards=("t0of1.p0of1.g0",),
        block_tokens=4,
        tokens=0,
        labels={f"l{n:04d}": f"{n * n:x}" * 9 for n in range(400)},
    )
    return Keys("r").manifest("default", family, f"0000000001-{family}"), manifest


def test_i7_no_flipped_byte_of_a_compressed_manifest_gives_another():
    """A frame has bits that mean nothing: with one of those flipped it is still the same manifest."""
    key, manifest = _large()
    body = bytearray(pack(manifest, key))
    assert body[:4] == b"\x28\xb5\x2f\xfd"
    harmless = 0
    for at in range(len(body)):
        body[at] ^= BITS[at % 3]
        try:
            assert unpack(bytes(body), key) == manifest
            harmless += 1
        except Corrupt:
            pass
        body[at] ^= BITS[at % 3]
    assert harmless <= 4
    with pytest.raises(Corrupt):
        unpack(bytes(body), key.replace("0000000001-", "0000000002-"))


async def test_a_commit_whose_head_is_damaged_after_a_lost_answer_is_not_reported_as_failed(made, clock, shelf):
    """R8: it may have landed, and nobody can tell."""
    faults = Faults(made, [], clock)
    async with opened(faults, clock, SeededIds(2)) as repo:
        await repo.sessions.get("default", "s", NS.id)
        faults.script += [
            Fault(action="lost", verb="put", key="*/heads/*", times=2),
            Fault(action="corrupt", verb="get", key="*/heads/*", times=99, at=40),
        ]
        with pytest.raises(Unavailable) as unknown:
            await repo.sessions.touch("default", "s", NS.id, ttl=50)
        assert unknown.value.kind == "outcome_unknown"


async def test_stored_heads_verify_after_every_kind_of_swap(clock):
    memory, shelf = MemoryStore(clock), Shelf()
    await _made(memory, clock, shelf)
    async with opened(memory, clock, SeededIds(7)) as repo:
        for step in (_commit, _pin, _touch, _fork, _rewind, _collect):
            await step(repo, shelf)
            for key, body in bodies(memory).items():
                if "/heads/" in key:
                    parse(body, Head, key)
