"""Whoever cancels, at any moment, leaves nothing leased, reserved or written to."""

import asyncio

from fakes.mesh_pair import PATIENT, idle, only, pair
from fakes.mesh_peers import block, mesh_node, wants_of
from fakes.node import until
from fakes.peer import request_of, scripted

from kvstore.mesh.connections import LinkSettings
from tiering import Miss, Reach


async def test_a_fetch_can_be_cancelled_at_any_moment():
    """A thousand times: nothing stays leased at the source, nor reserved here, and nobody writes to a place that was given up."""
    async with pair() as (a, b):
        wants = wants_of(6)
        a.put(wants)
        loop = asyncio.get_running_loop()
        places = [bytearray(wants[0].size) for _ in range(4)]
        for turn in range(1000):
            tasks = [loop.create_task(b.peers.fetch(each, memoryview(place))) for each, place in zip(wants, places, strict=False)]
            await _steps(turn % 40, turn % 7 * 0.0002)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            for place, how in zip(places, ended, strict=True):
                assert how is None or isinstance(how, asyncio.CancelledError)
                place[:64] = b"\xaa" * 64
                place[-64:] = b"\xaa" * 64
            if turn % 50 == 0:
                await asyncio.sleep(0.002)
                assert all(place[:64] == place[-64:] == b"\xaa" * 64 for place in places)
        await until(lambda: idle(a, b))
        assert all(place[:64] == place[-64:] == b"\xaa" * 64 for place in places)
        assert (await b.read(wants))[0] == [block(each) for each in wants]


async def test_reads_can_be_cancelled_at_any_moment():
    async with pair() as (a, b):
        wants = wants_of(12)
        a.put(wants)
        for turn in range(200):
            task = asyncio.create_task(b.stack.get_many(wants))
            await _steps(turn % 30, turn % 5 * 0.0005)
            task.cancel()
            (got,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(got, asyncio.CancelledError):
                for lease in got:
                    lease.release()
                b.dram.discard_many([each.key for each in wants])
        await until(lambda: idle(a, b))


async def _steps(loops, seconds):
    for _ in range(loops):
        await asyncio.sleep(0)
    if seconds:
        await asyncio.sleep(seconds)


async def test_a_stop_cuts_what_is_under_way():
    async def answer(reader, writer):
        await request_of(reader)
        await asyncio.sleep(3600)

    async with scripted(answer) as member, mesh_node("b", settings=PATIENT, links=LinkSettings(silent_s=60)) as b:
        only(b, wants_of(1), member)
        task = asyncio.create_task(b.stack.get_many(wants_of(1), reach=Reach.ORIGIN))
        await until(lambda: b.peers._supplier(member).load)
        async with asyncio.timeout(10):
            await b.stack.aclose()
            assert await task == [Miss.UNAVAILABLE]
