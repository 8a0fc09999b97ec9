"""Peers, directories and visitors that mean harm, or are as if: a miss at most, and never somebody else's."""

import asyncio
import logging
import socket
from contextlib import AsyncExitStack

import pytest
from fakes.mesh_peers import block, introduce, mesh_node, wants_of
from fakes.node import until
from fakes.peer import request_of, scripted

from kvstore.config import static_peers
from kvstore.errors import Invalid
from kvstore.mesh.link import LinkSettings
from kvstore.mesh.members import Member
from kvstore.mesh.supplier import PeerSettings
from tiering import Miss

SILENT = LinkSettings(silent_s=600)
SOON = PeerSettings(patience_s=0.1, unmeasured=1e9)


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
    async with mesh_node("a") as a, mesh_node("b", placement=False) as b:
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
