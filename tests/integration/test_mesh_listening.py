"""An engine's events over real sockets: gaps are repaired or forgotten, and lives kept apart."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvstore.ids import Namespace, chain
from kvstore.mesh import listening
from kvstore.mesh.listening import Listener
from kvstore.mesh.residency import Residency

NAMESPACE = Namespace(model="m", revision="r", layers=1, kv_heads=1, head_dim=8, block_tokens=2)


class Publisher:
    """As vLLM's: numbered batches, and a buffer that is sent again from any number on."""

    def __init__(self, port=0, replay_port=0, keeps=1000):
        self.context = zmq.asyncio.Context()
        self.socket, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.router.bind(f"tcp://127.0.0.1:{replay_port or '*'}")
        self.at, self.replay = self.socket.getsockopt_string(zmq.LAST_ENDPOINT), self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.buffer, self.keeps, self.number = [], keeps, 0
        self.answering = asyncio.create_task(self.answer())

    async def answer(self):
        while True:
            client, _, first = await self.router.recv_multipart()
            for number, payload in self.buffer:
                if number >= int.from_bytes(first, "big"):
                    await self.router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def say(self, first, *, lost=False):
        payload = msgspec.msgpack.encode([0.0, [["BlockStored", [first], None, [first, first + 1], 2, None, "GPU"]], 0])
        self.buffer = [*self.buffer, (self.number, payload)][-self.keeps :]
        if not lost:
            await self.socket.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    async def close(self):
        self.answering.cancel()
        await asyncio.gather(self.answering, return_exceptions=True)
        self.context.destroy(linger=0)


@asynccontextmanager
async def following(publisher):
    held = set()

    def told(more, fewer):
        held.update(more)
        held.difference_update(fewer)

    listener = Listener(publisher.at, publisher.replay, Residency(NAMESPACE, told))
    task = asyncio.create_task(listener.run())
    yield listener, held
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def engine():
    publisher = Publisher()
    yield publisher
    await publisher.close()


async def until(publisher, held, *firsts, more=()):
    """Say the last of them until it is heard: a subscription takes a moment. Then exactly these are held."""
    wanted = {chain(NAMESPACE, [first, first + 1])[0].prefix_id for first in firsts}
    async with asyncio.timeout(30):
        while not wanted <= held:
            await publisher.say(firsts[-1])
            await asyncio.sleep(0.02)
    assert held == wanted | {chain(NAMESPACE, [first, first + 1])[0].prefix_id for first in more}


async def test_what_was_said_before_anyone_listened_and_what_was_lost(engine):
    for first in (10, 20, 30):
        await engine.say(first)
    async with following(engine) as (listener, held):
        await until(engine, held, 10, 20, 30, 40)
        await engine.say(50, lost=True)
        await until(engine, held, 10, 20, 30, 40, 50, 60)
        assert listener.heard.gaps == 1
        assert listener.heard.repaired in {1, 2}  # what was before anybody listened may have been asked for as well


async def test_what_was_missed_is_asked_for_though_nothing_more_comes(engine, monkeypatch):
    monkeypatch.setattr(listening, "_QUIET_MS", 50)
    names = {first: chain(NAMESPACE, [first, first + 1])[0].prefix_id for first in (10, 20, 30)}
    await engine.say(10)
    async with following(engine) as (listener, held), asyncio.timeout(30):
        while held != {names[10]}:  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.02)
        await engine.say(20, lost=True)
        while held != {names[10], names[20]}:  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.02)
        assert (listener.heard.gaps, listener.heard.forgotten) == (0, 0)
        await until(engine, held, 10, 20, 30)
        assert listener.heard.forgotten == 0


async def test_a_gap_that_cannot_be_closed_is_forgotten_with_all_before_it(engine):
    async with following(engine) as (listener, held):
        await until(engine, held, 10)
        engine.keeps, engine.buffer = 1, []
        await engine.say(20, lost=True)
        await engine.say(30, lost=True)
        await until(engine, held, 40)
        assert listener.heard.gaps == 1


async def test_another_life_of_the_engine_holds_nothing_of_the_one_before():
    first = Publisher()
    try:
        async with following(first) as (_, held):
            await until(first, held, 10)
            await first.close()
            async with asyncio.timeout(30):
                while held:  # noqa: ASYNC110  nobody tells a test
                    await asyncio.sleep(0.02)
            port, replay_port = (int(each.rpartition(":")[2]) for each in (first.at, first.replay))
            second = Publisher(port, replay_port)
            try:
                await until(second, held, 20)
            finally:
                await second.close()
    finally:
        await first.close()
