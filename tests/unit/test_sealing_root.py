"""A sealed root: all goes on as in a plain one, nothing is read without the keys, and no missing key deletes anything."""

import random  # noqa: TID251  seeded

import pytest
from fakes.sealed import contents

from kvstore.clock import SeededIds
from kvstore.errors import AlreadyExists, Conflict, Corrupt, Denied, Gone, NotFound, Unsupported
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle.collector import collect
from kvstore.objects import OVERWRITE, Fault, Faults
from kvstore.repo.blocks import want
from kvstore.repo.fsck import fsck
from kvstore.repo.testing import bodies, broken, commit, opened, tiny
from kvstore.sealing import MasterKey, MasterKeys, rewrap_keyring
from tiering import Miss

NS = tiny()
OLD, NEW = MasterKey("old", b"o" * 32), MasterKey("new", b"n" * 32)
MASTERS = MasterKeys([OLD])


@pytest.fixture
async def repo(memory, clock):
    async with opened(memory, clock, masters=MASTERS) as repo:
        yield repo


async def fetched(repo, link, namespace=NS):
    asked = want(namespace, BlockName(namespace.id, Shard(), link.prefix_id, link.tokens))
    into = memoryview(bytearray(asked.size))
    return await repo.origin.fetch(asked, into) or bytes(into)


async def test_nothing_of_tokens_ids_and_labels_is_in_the_bucket(repo, memory, shelf):
    tokens = [0x41424344 + index for index in range(8)]
    links = shelf.fill(NS, tokens)
    await commit(repo, shelf, "alice@example.com", tokens, 0, NS, labels={"patient": "zero-zero-seven"})
    for key, body in bodies(memory).items():
        for word in (
            b"alice",
            b"zero-zero",
            b"patient",
            (0x41424344).to_bytes(4, "little"),
            *(link.prefix_id.encode() for link in links),
        ):
            assert word not in key.encode() + body, key


async def test_sessions_fork_rewind_expire_and_are_collected_as_in_a_plain_root(repo, memory, clock, shelf):
    rng = random.Random(7)
    async with opened(memory, clock, SeededIds(2), masters=MASTERS) as other:
        seqs: dict[str, int] = {}
        for step in range(60):
            node, name = rng.choice((repo, other)), f"s{rng.randrange(4)}"
            try:
                match rng.randrange(6):
                    case 0 | 1 | 2:
                        tokens = [*range(4 * rng.randrange(1, 5)), step]
                        seqs[name] = (await commit(node, shelf, name, tokens, seqs.get(name, 0), NS)).version
                    case 3:
                        await node.sessions.fork("default", name, NS.id, "", f"s{rng.randrange(4)}")
                    case 4:
                        await node.sessions.delete("default", name)
                    case _:
                        await collect(node, now=True)
            except (NotFound, Gone, Conflict, AlreadyExists) as error:
                seqs[name] = int(error.facts.get("current", 0))
            assert broken(await contents(repo, memory), repo.root.keys) == []
        assert (await fsck(other, deep=True)).clean
        listed = (await other.sessions.list("default", "s", "", 10)).sessions
        assert {session.id for session in listed} == {s.id for s in (await repo.sessions.list("default", "", "", 10)).sessions}


async def test_swapped_objects_are_a_miss(repo, memory, shelf):
    links = shelf.fill(NS, range(8))
    await commit(repo, shelf, "s", range(8), 0, NS)
    first, second = sorted(key for key in bodies(memory) if key.startswith("r/blocks/"))
    await memory.put(first, bodies(memory)[second], OVERWRITE)
    assert Miss.CORRUPT in [await fetched(repo, link) for link in links]


async def test_a_node_without_the_key_is_told_so_and_nothing_is_lost(repo, memory, clock, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    before = bodies(memory)
    for masters in (None, MasterKeys([NEW]), MasterKeys([MasterKey("old", b"x" * 32)])):
        with pytest.raises(Denied) as refused:
            async with opened(memory, clock, masters=masters):
                pass
        assert refused.value.kind == "no_key"
        assert "nothing is lost" in refused.value.remedy
    assert bodies(memory) == before


async def test_a_plain_root_is_not_written_to_with_keys(memory, clock, shelf):
    async with opened(memory, clock) as plain:
        await commit(plain, shelf, "s", range(8), 0, NS)
    before = bodies(memory)
    with pytest.raises(Unsupported) as refused:
        async with opened(memory, clock, masters=MASTERS):
            pass
    assert refused.value.kind == "not_encrypted"
    assert bodies(memory) == before


async def test_two_nodes_agree_on_one_key(repo, memory, clock, shelf):
    async with opened(memory, clock, SeededIds(2), masters=MASTERS) as other:
        rings = [await node.root.tenants.sealing("default") for node in (repo, other)]
        assert rings[0].current == rings[1].current
        await commit(repo, shelf, "s", range(8), 0, NS)
        assert await fetched(other, shelf.fill(NS, range(8))[0]) in shelf.held.values()


async def test_a_rotated_data_key_is_for_new_objects_and_other_nodes_find_it(repo, memory, clock, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    async with opened(memory, clock, SeededIds(2), masters=MASTERS) as other:
        await other.root.tenants.opening("default")  # known there before it turns
        assert await repo.root.tenants.rotate("default")
        before = bodies(memory)
        await commit(repo, shelf, "s", range(12), 1, NS)
        used = {body[8:24] for key, body in bodies(memory).items() if key.startswith("r/blocks/")}
        assert len(used) == 2
        assert {key: body for key, body in bodies(memory).items() if key in before and "/blocks/" in key}.items() <= before.items()
        for link in shelf.fill(NS, range(12)):
            assert await fetched(other, link) in shelf.held.values()
        assert not await repo.root.tenants.rotate("nobody")


async def test_a_rotated_master_key_rewraps_and_rewrites_no_block(repo, memory, clock, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    before = bodies(memory)
    both = MasterKeys([NEW, OLD])
    async with opened(memory, clock, SeededIds(2), masters=both) as other:
        assert await rewrap_keyring(memory, other.root.keys, both, other.root.ids)
        assert not await rewrap_keyring(memory, other.root.keys, both, other.root.ids)
        assert await other.root.tenants.rewrap("default")
        assert not await other.root.tenants.rewrap("default")
    changed = {key for key, body in bodies(memory).items() if before.get(key) != body}
    assert changed == {"r/keyring", "r/keys/default"}
    async with opened(memory, clock, masters=MasterKeys([NEW])) as after:
        assert (await fsck(after, deep=True)).clean


async def test_r12_a_key_that_is_missing_for_whatever_reason_stops_a_collection(repo, memory, clock, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    register = bodies(memory)["r/keys/default"]
    await memory.delete(["r/keys/default"])
    async with opened(memory, clock, SeededIds(2), masters=MASTERS) as other:
        with pytest.raises(Denied) as stopped:
            await collect(other, now=True)
        assert stopped.value.kind == "no_key"
        report = await fsck(other, deep=True, repair=True)
        assert {finding.kind for finding in report.findings} == {"no_key"}
        assert report.repaired == []
        await memory.put("r/keys/default", register, OVERWRITE)
        assert (await fsck(other, deep=True)).clean
        with pytest.raises(NotFound):
            await other.sessions.get("default", "nobody")


async def test_r12_another_key_made_meanwhile_does_not_unname_what_the_lost_one_sealed(repo, memory, clock, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await memory.delete(["r/keys/default"])
    async with opened(memory, clock, SeededIds(2), masters=MASTERS) as other:
        await commit(other, shelf, "t", range(100, 108), 0, NS)
        with pytest.raises(Denied):
            await collect(other, now=True)
        assert len([key for key in bodies(memory) if key.startswith("r/blocks/")]) == 4


async def test_a_tenant_whose_key_was_deleted_is_gone_and_its_blocks_are_collected(repo, memory, clock, shelf):
    kept, gone = tiny("keeper"), tiny("leaver")
    for namespace in (kept, gone):
        await commit(repo, shelf, "s", range(8), 0, namespace, ttl=0)
    await repo.root.tenants.destroy("leaver")
    await repo.root.tenants.destroy("leaver")
    async with opened(memory, clock, SeededIds(2), masters=MASTERS) as other:
        assert await fetched(other, shelf.fill(gone, range(8))[0], gone) is Miss.UNAVAILABLE
        for call in (other.sessions.get("leaver", "s"), commit(other, shelf, "new", range(4), 0, gone)):
            with pytest.raises(Gone) as refused:
                await call
            assert refused.value.kind == "key_destroyed"
        assert (await other.sessions.list("leaver", "", "", 10)).sessions == []
        report = await fsck(other, deep=True, repair=True)
        assert report.clean
        assert report.repaired == []
        await collect(other, now=True)
        left = [key for key in bodies(memory) if key.startswith("r/blocks/")]
        assert {key.split("/")[2] for key in left} == {kept.id}
        assert await fetched(other, shelf.fill(kept, range(8))[1], kept) in shelf.held.values()


async def test_a_damaged_register_of_keys_is_damage_not_a_new_key(repo, memory, clock, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    body = bytearray(bodies(memory)["r/keys/default"])
    body[-3] ^= 1
    await memory.put("r/keys/default", bytes(body), OVERWRITE)
    async with opened(memory, clock, SeededIds(2), masters=MASTERS) as other:
        for call in (other.root.tenants.sealing("default"), collect(other, now=True)):
            with pytest.raises(Corrupt):
                await call


@pytest.mark.parametrize("action", ["lost", "before"])
async def test_a_lost_answer_leaves_one_key_whoever_asks(memory, clock, shelf, action):
    store = Faults(memory, clock=clock)
    async with opened(store, clock, masters=MASTERS) as repo:
        for turn in (repo.root.tenants.sealing, repo.root.tenants.rotate):
            store.script.append(Fault(action=action, verb="put", key="*/keys/*"))
            await turn("default")
        assert not any(fault.times for fault in store.script)
        assert len((await repo.root.tenants.sealing("default")).keys) == 2
        await commit(repo, shelf, "s", range(8), 0, NS)
    async with opened(memory, clock, SeededIds(2), masters=MASTERS) as other:
        assert (await fsck(other, deep=True)).clean
