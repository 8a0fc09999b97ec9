"""Peers, readers and owners that are waited for, and for how long; and whoever stops waiting leaves nothing behind."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from fakes.mesh_pair import PATIENT, answer_frame, asking, idle, only
from fakes.mesh_peers import Counted, block, introduce, mesh_node, wants_of
from fakes.node import until
from fakes.peer import request_of, scripted

from kvstore.mesh import frames
from kvstore.mesh.connections import Connections
from kvstore.mesh.members import Member, owner
from kvstore.mesh.supplier import PeerSettings
from kvstore.server.peering import PeeringLimits


async def test_a_peer_that_takes_too_long_is_not_waited_for():
    async def answer(reader, writer):
        await request_of(reader)
        writer.write(frames.ANSWER + answer_frame(0, 0, wants_of(1)[0].size, b"x"))
        await asyncio.sleep(3600)

    bucket = Counted()
    quick = PeerSettings(patience_s=0.05, unmeasured=1e9)
    async with mesh_node("b", bucket=bucket, settings=quick) as b, scripted(answer) as member:
        wants = wants_of(3)
        only(b, wants, member)
        got, _ = await b.read(wants)
        assert got == [block(each) for each in wants]
        assert b.peers.counts["hedged"]
        await until(lambda: idle(b))
        asked = bucket.asked.copy()
        more = wants_of(1, first=5)
        only(b, more, member)
        await b.read(more)  # it is left alone for a while
        assert b.peers.counts["hedged"] <= 3
        assert bucket.asked.keys() - asked.keys() == {more[0].key}


async def test_a_reader_that_does_not_read_holds_nothing_for_long():
    limits = PeeringLimits(stall_s=0.2, slowest=1e9)
    async with mesh_node("a", dram=64 << 20, limits=limits) as a:
        wants = wants_of(100)
        a.put(wants)
        sock = asking(a, wants)
        await until(lambda: a.dram.leases > 0)
        await until(lambda: a.peering.counts["connections idle or stalled"] == 1)
        await until(lambda: idle(a))
        sock.close()


async def test_a_reader_that_leaves_ends_its_answer():
    bucket = Counted()
    bucket.held = asyncio.Event()
    async with mesh_node("a", bucket=bucket, placement=False) as a:
        wants = wants_of(3)
        sock = asking(a, wants, through=True)
        await until(lambda: bucket.asked)
        sock.close()
        await until(lambda: not a.peering._visits and idle(a))


async def test_a_peer_that_lets_nobody_connect_holds_no_thread(monkeypatch):
    async def never(self):
        await asyncio.sleep(60)

    monkeypatch.setattr(Connections, "dialled", never)
    async with mesh_node("a") as a:
        with pytest.raises(TimeoutError):
            await a.links.holds(Member("b", 1, "127.0.0.1", 1), [bytes(32)])
        assert not a.links.askers._threads


@pytest.mark.parametrize("count", [3, 5])
async def test_a_herd_reads_each_block_from_the_bucket_once(count):
    bucket = Counted()
    async with AsyncExitStack() as life:
        nodes = [
            await life.enter_async_context(
                mesh_node(
                    f"n{index}",
                    dram=64 << 20,
                    bucket=bucket,
                    settings=PATIENT,
                    limits=PeeringLimits(from_one=1000, tiers_s=60, through_s=60),
                )
            )
            for index in range(count)
        ]
        introduce(*nodes)
        wants = wants_of(100)
        answers = await asyncio.gather(*(node.read(wants) for node in nodes))
        for got, _ in answers:
            assert got == [block(each) for each in wants]
        assert set(bucket.asked.values()) == {1}
        assert len(bucket.asked) == 100
        await until(lambda: idle(*nodes))


async def test_an_owner_that_takes_too_long_is_not_waited_for():
    held, bucket = Counted(), Counted()
    held.held = asyncio.Event()
    quick = PeerSettings(patience_s=0.05, through_s=0.05, unmeasured=1e9)
    async with mesh_node("a", bucket=held) as a, mesh_node("b", bucket=bucket, settings=quick) as b:
        introduce(a, b)
        wants = [each for each in wants_of(30) if owner(each.key, ["a", "b"]) == "a"][:2]
        got, sources = await b.read(wants)
        assert got == [block(each) for each in wants]
        assert sources == ["bucket"] * 2
        assert b.peers.counts["through"] == 2
        held.held.set()


async def test_nodes_that_disagree_about_an_owner_do_not_wait_for_each_other():
    """Each believes that the other is to read the block."""
    bucket = Counted()
    async with mesh_node("a", bucket=bucket, settings=PATIENT) as a, mesh_node("b", bucket=bucket, settings=PATIENT) as b:
        introduce(a, b)
        for node, other in ((a, b), (b, a)):
            node.peers._owner = lambda want, node=node, other=other: node.peers._supplier(other.member)
            node.peering._lending._owns = lambda key: False
        wants = wants_of(5)
        async with asyncio.timeout(20):
            answers = await asyncio.gather(a.read(wants), b.read(wants))
        assert all(got == [block(each) for each in wants] for got, _ in answers)
