"""Blocks between nodes over real sockets: what arrives is what was published, or it is a miss."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from fakes.mesh_pair import PATIENT, idle, only, pair
from fakes.mesh_peers import Counted, block, introduce, mesh_node, wants_of
from fakes.node import until
from fakes.peer import through

from kvstore.mesh import link
from kvstore.mesh.members import Member
from tiering import Miss


@pytest.mark.parametrize("blocks", [1, 3, 60])
async def test_what_arrives_is_what_was_published(blocks):
    async with pair() as (a, b):
        wants = wants_of(blocks)
        a.put(wants)
        got, sources = await b.read(wants)
        assert got == [block(each) for each in wants]
        assert sources == ["peer"] * blocks
        assert (await b.read(wants))[1] == ["dram"] * blocks
        await until(lambda: idle(a, b))


async def test_requests_are_batched_and_the_directory_is_asked_once_for_all():
    async with pair() as (a, b):
        wants = wants_of(16)
        a.put(wants)
        await b.read(wants)
        assert b.directory.asked == 1
        assert a.peering.counts["requests blocks"] <= 4


async def test_a_block_on_the_disk_is_read_into_memory_first(tmp_path):
    async with pair(first={"nvme": tmp_path / "nvme"}) as (a, b):
        wants = wants_of(20)
        a.put(wants)
        for each in wants:
            assert a.stack.offer(each)
        await a.stack.flush(wants)
        a.dram.discard_many([each.key for each in wants[5:]])
        got, _ = await b.read(wants)
        assert got == [block(each) for each in wants]


async def test_a_hole_ends_the_prefix():
    async with pair(placement=False) as (a, b):
        wants = wants_of(12)
        a.put(wants[:5] + wants[6:])
        only(b, wants, a.member)
        found = await b.stack.get_many(wants)
        assert found[5] is Miss.ABSENT
        assert len(found) == 6
        for lease in found[:5]:
            lease.release()
        assert b.directory.wrongs[0] == ("a", wants[5].key)
        await until(lambda: idle(a, b))


async def test_a_peer_says_what_it_has(monkeypatch):
    monkeypatch.setattr(link, "_HOLDS_S", 30.0)
    async with pair() as (a, b):
        wants = wants_of(30)
        a.put(wants[::2])
        keys = [each.key for each in wants]
        assert await b.links.holds(a.member, keys) == [True, False] * 15
        with pytest.raises(ConnectionRefusedError):
            await b.links.holds(Member("gone", 1, "127.0.0.1", 1), keys)


async def test_a_peer_that_is_killed_is_a_shorter_prefix_and_the_next_origin_has_the_rest(tmp_path):
    bucket = Counted()
    async with mesh_node("b", dram=256 << 20, bucket=bucket, settings=PATIENT) as b:
        script = Path(__file__).parents[1] / "crash" / "kill9_peer.py"
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(sys.executable, str(script), stdin=pipe, stdout=pipe)
        try:
            name, port = (await child.stdout.readline()).split()
            served = Member(name.decode(), 1, "127.0.0.1", int(port))
            came = 0

            async def kill_after_some(total, data):
                nonlocal came
                came += len(data)
                if came > 20 << 20 and child.returncode is None:
                    os.kill(child.pid, signal.SIGKILL)
                    await child.wait()
                return data

            async with through(served, kill_after_some) as member:
                wants = wants_of(400)
                only(b, wants, member)
                got, sources = await b.read(wants)
                assert got == [block(each) for each in wants]
                assert set(sources) == {"peer", "bucket"}
                await until(lambda: idle(b))
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()


@pytest.mark.parametrize("bit", [1_000_000, 70_000, 250])
async def test_a_flipped_bit_is_no_block(bit):
    """In a tensor, in a later block, and in a header."""
    bucket = Counted()

    def flip(total, data):
        if total <= bit < total + len(data):
            data = bytearray(data)
            data[bit - total] ^= 1
        return bytes(data)

    async with pair(bucket=bucket) as (a, b):
        wants = wants_of(14)
        a.put(wants)
        async with through(a.member, flip) as member:
            only(b, wants, member)
            got, _ = await b.read(wants)
            assert got == [block(each) for each in wants]
            counts = b.peers.counts  # where `a` owns the block it is asked once more, to read it through
            assert bucket.asked or counts["through"] or counts["hits"] < len(wants)
            await until(lambda: idle(b))


async def test_bytes_that_changed_while_they_were_read_are_another_sources():
    async with pair(bucket=Counted()) as (a, b), mesh_node("c") as c:
        introduce(a, b, c)
        wants, others = wants_of(4), wants_of(1, first=9)
        a.put(wants)
        c.put(wants)
        lease = a.dram.lease(wants[2])
        a.dram.memory[lease.offset : lease.offset + lease.size] = block(others[0])  # a sound block, and not this one
        only(b, wants, a.member)
        b.directory.places[wants[2].key] = (a.member, c.member)
        b.peers._supplier(c.member).speed = 1.0  # so that `a` is asked first
        got, sources = await b.read(wants)
        assert got == [block(each) for each in wants]
        assert sources == ["peer"] * 4
        assert b.peers.counts["corrupt"] == 1
        assert ("a", wants[2].key) in b.directory.wrongs
        lease.release()


async def test_leading_layers_are_told_of_as_they_come():
    async with pair() as (a, b):
        wants = wants_of(1)
        a.put(wants)
        place, told = bytearray(wants[0].size), []
        assert await b.peers.fetch(wants[0], memoryview(place), told.append) is None
        assert told == sorted(told)
        assert told[-1] == wants[0].size
