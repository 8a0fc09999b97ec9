"""Shared prefixes: published once, found by everybody in the tenant for as long as they are pinned."""

import asyncio
from contextlib import suppress

import pytest

from kvstore import api
from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import AlreadyExists, Gone, Invalid, Unavailable
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle.collector import Collector, CollectSettings, collect
from kvstore.lifecycle.removal import drop_namespace
from kvstore.lifecycle.warm import LEARN_EVERY_S, keep_learning, learn, publish
from kvstore.repo import want
from kvstore.repo.testing import bodies, broken, commit, opened, tiny
from kvstore.sealing import MasterKey, MasterKeys

NS = tiny()
SYSTEM = range(16)  # four blocks


@pytest.fixture
async def repo(memory, clock):
    async with opened(memory, clock) as repo:
        yield repo


def wants(shelf, tokens, namespace=NS):
    return [want(namespace, BlockName(namespace.id, Shard(), link.prefix_id, 4)) for link in shelf.fill(namespace, tokens)]


async def test_others_find_the_prefix_after_its_session_is_gone_and_two_collections_ran(repo, other, clock, shelf):
    await commit(repo, shelf, "origin", [*SYSTEM, 90, 91, 92, 93], 0, NS, ttl=60)
    made = await publish(repo, "default", "origin", tokens=18)
    assert (made.id, made.tokens, made.pinned, made.expires, made.ttl_s) == ("warm/origin", 16, True, 0, 0)
    await repo.sessions.delete("default", "origin")
    deleted = [await collect(repo, now=True) for _ in range(2)]
    assert [done.blocks_deleted for done in deleted] == [1, 0]  # the block behind the prefix, and nothing else
    clock.advance(61)  # so that every node looks at the epoch again

    prompt = wants(shelf, [*SYSTEM, 50, 51, 52, 53])  # another prompt with the same beginning
    assert await repo.origin.contains(prompt) == 4
    assert await other.origin.contains(prompt) == 0  # its generation is two epochs back, and nobody told
    assert await learn(other, "default") == 4
    assert await other.origin.contains(prompt) == 4
    room = memoryview(bytearray(prompt[3].size))
    assert await other.origin.fetch(prompt[3], room) is None
    assert bytes(room) == shelf.held[prompt[3].ref.name]


async def test_what_was_used_is_copied_forward_so_that_even_a_node_that_learnt_nothing_finds_it(repo, memory, clock, shelf):
    await commit(repo, shelf, "origin", SYSTEM, 0, NS)
    await publish(repo, "default", "origin")
    await collect(repo, now=True)
    for one in wants(shelf, SYSTEM):
        assert await repo.origin.fetch(one, memoryview(bytearray(one.size))) is None
    await repo.origin.aclose()
    async with opened(memory, clock, SeededIds(3)) as fresh:
        assert await fresh.origin.contains(wants(shelf, SYSTEM)) == 4


async def test_a_node_keeps_learning_and_waits_for_a_bucket_that_is_away(repo, other, shelf):
    await commit(repo, shelf, "origin", SYSTEM, 0, NS)
    moments = []

    def reached():
        if not moments:
            raise Unavailable("not reached yet")
        return other

    class Clock(VirtualClock):
        async def sleep(self, seconds):
            moments.append(seconds)
            if len(moments) == 2:  # it has looked once, in vain
                await publish(repo, "default", "origin")
                await collect(repo, now=True)
            elif len(moments) == 3:
                raise asyncio.CancelledError

    with suppress(asyncio.CancelledError):
        await keep_learning(reached, ["default"], Clock(), lambda: None)
    assert moments == [5, LEARN_EVERY_S, LEARN_EVERY_S]
    assert await other.origin.contains(wants(shelf, SYSTEM)) == 4


async def test_a_tenant_whose_keys_are_gone_is_a_counted_miss_and_the_others_are_looked_up(memory, clock, shelf, caplog):
    masters = MasterKeys([MasterKey("1", b"k" * 32)])
    async with opened(memory, clock, masters=masters) as repo:
        for tenant in ("gone", "ann"):
            await commit(repo, shelf, "origin", SYSTEM, 0, tiny(tenant))
            await publish(repo, tenant, "origin")
        await memory.delete([repo.root.keys.tenant_keys("gone")])
    missed = []

    class Clock(VirtualClock):
        async def sleep(self, seconds):
            raise asyncio.CancelledError

    async with opened(memory, clock, SeededIds(3), masters=masters) as repo:
        with suppress(asyncio.CancelledError):
            await keep_learning(lambda: repo, ["gone", "ann"], Clock(), lambda: missed.append(1))
        assert len(missed) == 1
        assert repo.uploads.known(wants(shelf, SYSTEM, tiny("ann"))[0].ref.name) is not None
    assert "tenant gone were not looked up" in caplog.text
    assert "Traceback" not in caplog.text


async def test_what_is_learnt_and_gone_is_a_miss_and_is_forgotten(repo, other, clock, shelf):
    await commit(repo, shelf, "origin", SYSTEM, 0, NS)
    await publish(repo, "default", "origin")
    await repo.sessions.delete("default", "origin")
    await collect(repo, now=True)
    assert await learn(other, "default") == 4
    await repo.sessions.delete("default", "warm/origin")
    await collect(repo, now=True)
    clock.advance(61)
    assert await other.origin.contains(wants(shelf, SYSTEM)) == 0
    assert other.uploads.known(wants(shelf, SYSTEM)[0].ref.name) is None
    assert await learn(other, "default") == 0


async def test_only_pinned_sessions_are_learnt_and_no_life_is_prolonged(repo, other, clock, shelf):
    await commit(repo, shelf, "warm/mine", SYSTEM, 0, NS, ttl=100)
    before = (await repo.sessions.get("default", "warm/mine")).expires
    clock.advance(80)
    assert await learn(other, "default") == 0
    assert (await repo.sessions.get("default", "warm/mine")).expires == before


async def test_b20_another_tenant_learns_nothing(repo, other, shelf):
    await commit(repo, shelf, "origin", SYSTEM, 0, tiny("ann"))
    await publish(repo, "ann", "origin")
    assert await learn(other, "bob") == 0
    assert await learn(other, "ann") == 4
    assert await other.origin.contains(wants(shelf, SYSTEM, tiny("bob"))) == 0


async def test_it_is_a_version_cut_to_whole_blocks(repo, memory, shelf):
    await commit(repo, shelf, "s", SYSTEM, 0, NS)
    await commit(repo, shelf, "s", range(30), 1, NS)  # ends in a block of two tokens
    assert (await publish(repo, "default", "s", as_="first", version=1)).tokens == 16
    assert (await publish(repo, "default", "s", as_="warm/cut", tokens=9)).id == "warm/cut"
    assert (await repo.sessions.get("default", "warm/cut")).tokens == 8
    assert (await publish(repo, "default", "s", as_="whole")).tokens == 30
    with pytest.raises(Invalid, match="not one whole block"):
        await publish(repo, "default", "s", as_="none", tokens=3)
    with pytest.raises(AlreadyExists):
        await publish(repo, "default", "s", as_="first")
    assert (await repo.sessions.get("default", "warm/first")).tokens == 16
    assert {each.id for each in (await repo.sessions.list("default", "warm/")).sessions} == {"warm/cut", "warm/first", "warm/whole"}
    assert broken(bodies(memory), repo.root.keys) == []


async def test_it_pins_no_older_version(repo, memory, shelf):
    for turn, length in enumerate((16, 24, 32)):
        await commit(repo, shelf, "s", range(length), turn, NS)
    await publish(repo, "default", "s", tokens=16)
    await repo.sessions.delete("default", "s")
    assert (await collect(repo, now=True)).blocks_kept == 4


async def test_neither_time_nor_want_of_room_takes_it(repo, memory, clock, shelf):
    await commit(repo, shelf, "origin", SYSTEM, 0, NS, ttl=60)
    await publish(repo, "default", "origin")
    clock.advance(10 * 365 * 86400)
    collector = Collector(repo, CollectSettings(max_bytes=1, max_skew_s=None))
    assert (await collector.run(api.Collect(now=True))).expired == 1
    assert (await collector.run(api.Collect(now=True))).evicted == 0
    assert (await repo.sessions.get("default", "warm/origin")).tokens == 16


async def test_removing_a_namespace_takes_its_prefixes_too(repo, shelf):
    await commit(repo, shelf, "origin", SYSTEM, 0, NS)
    await publish(repo, "default", "origin")
    assert (await drop_namespace(repo, "default", NS.id)).sessions == 2
    with pytest.raises(Gone):
        await repo.sessions.get("default", "warm/origin", NS.id, "main")
