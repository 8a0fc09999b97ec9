"""Room that a writer is promised before it names its blocks: a real node, and clients that hold to it or do not."""

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from importlib.metadata import version

import msgspec
import pytest
from fakes.node import SHARD, filler, links_of, namespace, pattern, payload_of, until

import kvstore
from kvstore import api, codec, wire
from kvstore.config import Bytes, DramSettings, Settings
from kvstore.node import Node
from kvstore.server import ahead
from kvstore.server.limits import Limits
from kvstore.server.local import LocalServer

NS = namespace()
PLAN = codec.layout(NS, SHARD, NS.block_tokens)
SIZE, STEP = PLAN.payload_bytes, -(-PLAN.payload_bytes // 4096) * 4096
LIMITS = Limits(window=4 << 20, drain=5)
DRAM = 16 << 20
MOST = LIMITS.window // 4 // SIZE  # that one connection is promised


@asynccontextmanager
async def opened():
    async with Node.open(Settings(dram=DramSettings(size=Bytes(DRAM)))) as node:
        await node.service.call("default", "put_namespace", api.PutNamespace(namespace=NS.id, fields=NS))
        yield node


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """What was promised is kept, however long this machine takes."""
    monkeypatch.setattr(ahead, "_KEPT_S", 600.0)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "node.sock")


@pytest.fixture
async def node(path):
    async with opened() as node, LocalServer.open(node.service, path, limits=LIMITS) as server:
        yield node.service.plane.tiers("default").dram, node.service.plane, server


@pytest.fixture
def dram(node):
    return node[0]


class Writer:
    """A client that sends what it likes, whenever it likes: never waiting, on the node's own loop."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5)
        self.socket.connect(path)

    async def hello(self):
        self.send(wire.Hello(wire.PROTOCOL, version("kvtier"), "default"))
        assert isinstance(await self.answer(), wire.Welcome)
        return self

    def send(self, message):
        self.socket.sendall(message if isinstance(message, bytes) else wire.frame(message))

    async def answer(self, kind=object):
        while True:
            message = await asyncio.to_thread(self._receive)
            if isinstance(message, kind):
                return message

    def _receive(self):
        head, fds, _, _ = socket.recv_fds(self.socket, 4, 2)
        for fd in fds:
            os.close(fd)
        body = b""
        while len(body) < wire.body_length(head):
            body += self.socket.recv(wire.body_length(head) - len(body))
        return wire.parse_to_client(body)

    async def publish(self, number, links, **fields):
        self.send(publish(number, links, **fields))
        return await self.answer(wire.Published)


@pytest.fixture
async def connect(path, node):
    made = []

    async def one():
        made.append(await Writer(path).hello())
        return made[-1]

    yield one
    for each in made:
        each.socket.close()


def publish(number, links, *, ahead=0, tokens=NS.block_tokens, size=SIZE):
    prefixes = b"".join(bytes.fromhex(link.prefix_id) for link in links)
    extents = [(tokens, index * STEP, size) for index in range(len(links))]
    return wire.Publish(number, NS.id, str(SHARD), prefixes, extents, ahead=ahead)


async def test_room_is_promised_to_who_asks_for_it_only(connect, dram):
    writer, links = await connect(), links_of(NS, 3)
    assert (await writer.publish(1, links[:1])).ready == 0  # as a client of an earlier version
    held = dram.used
    assert (await writer.publish(2, links[1:2], ahead=3)).ready == 3
    assert dram.used == held + 4 * PLAN.raw_bytes
    assert (await writer.publish(3, links[2:], ahead=3)).ready == 3  # it took one of them, and another was made
    assert dram.used == held + 5 * PLAN.raw_bytes


async def test_a_promise_is_bounded_by_the_window_and_by_the_nodes_memory(connect, dram):
    links = links_of(NS, 9)
    ready = [(await (await connect()).publish(1, [link], ahead=1 << 40)).ready for link in links]
    assert ready[0] == MOST
    assert sum(ready) * PLAN.raw_bytes <= DRAM // 8 < (sum(ready) + 1) * PLAN.raw_bytes


@pytest.mark.parametrize("ahead", [-1, -(1 << 63)])
async def test_less_than_nothing_is_nothing(connect, dram, ahead):
    published = await (await connect()).publish(1, links_of(NS, 1), ahead=ahead)
    assert (published.taken, published.ready, dram.used) == ([True], 0, PLAN.raw_bytes)


async def test_what_was_promised_is_taken_though_the_memory_is_full_of_what_is_read(connect, node):
    plane = node[1]
    writer, links = await connect(), links_of(NS, 260)
    assert (await writer.publish(1, links[:1], ahead=2)).ready == 2
    others, pins = await connect(), []
    for number, link in enumerate(links[10:], 1):
        if not (await others.publish(number, [link])).taken[0]:
            break
        await plane.settled("default")
        [pin] = plane.pin_now("default", NS.id, str(SHARD), bytes.fromhex(link.prefix_id), [NS.block_tokens])
        pins.append(pin)
    assert (await writer.publish(2, links[1:3])).taken == [True, True]
    assert (await writer.publish(3, links[3:5])).taken.count(True) <= 1  # the first of all is still nobody's
    plane.unpin("default", pins)


async def test_who_goes_away_or_writes_something_else_leaves_no_room_taken(connect, node):
    dram, _, server = node
    writer, links = await connect(), links_of(NS, 3)
    assert (await writer.publish(1, links[:1], ahead=5)).ready == 5
    other = codec.layout(NS, SHARD, 3)
    assert (await writer.publish(2, links[1:2], ahead=5, tokens=3, size=other.payload_bytes)).ready == 5
    assert dram.used == PLAN.raw_bytes + 6 * other.raw_bytes
    assert (await writer.publish(3, links[2:], ahead=2)).ready == 2
    writer.socket.close()
    await until(lambda: server.connections == 0)
    await until(lambda: dram.used == 2 * PLAN.raw_bytes + other.raw_bytes)


async def test_room_that_nobody_uses_is_given_back(connect, node, monkeypatch):
    monkeypatch.setattr(ahead, "_KEPT_S", 0.2)
    dram, plane, _ = node
    assert (await (await connect()).publish(1, links_of(NS, 1), ahead=5)).ready == 5
    assert plane.writing("default")
    await until(lambda: dram.used == PLAN.raw_bytes)
    assert not plane.writing("default")


@pytest.mark.parametrize("asked", ["get", "lookup"])
async def test_who_asks_once_a_promised_block_was_sent_finds_it_however_late_the_node_looks(connect, node, asked):
    writer, reader, links = await connect(), await connect(), links_of(NS, 2)
    assert (await writer.publish(1, links[:1], ahead=1)).ready == 1
    await node[1].settled("default")
    lookup = api.Lookup(namespace=NS.id, prefix_ids=[link.prefix_id for link in links])
    if asked == "get":
        frame = wire.frame(wire.Get(1, NS.id, str(SHARD), bytes.fromhex(links[1].prefix_id), [NS.block_tokens], 0, "dram"))
    else:
        frame = wire.frame(wire.Ask(1, "lookup", msgspec.Raw(msgspec.msgpack.encode(lookup))))
    reader.send(frame[:3])  # so that the node comes to it first
    writer.send(publish(2, links[1:]))
    reader.send(frame[3:])
    answer = await reader.answer()
    if asked == "get":
        assert (len(answer.offsets), answer.miss) == (1, "")
    else:
        assert msgspec.msgpack.decode(answer.body, type=api.Found).run == 2


async def test_a_node_that_stops_takes_what_was_sent_by_then(path):
    links = links_of(NS, 2)
    async with opened() as node:
        plane = node.service.plane
        async with LocalServer.open(node.service, path, limits=LIMITS):
            writer = await Writer(path).hello()
            assert (await writer.publish(1, links[:1], ahead=1)).ready == 1
            await plane.settled("default")
            writer.send(publish(2, links[1:]))
        await plane.settled("default")
        assert plane.tiers("default").dram.count == 2
    writer.socket.close()


async def test_a_burst_of_a_real_client_is_there_when_each_call_is_over(path, node):
    dram, plane, _ = node

    def burst():
        with kvstore.open_sync(f"kvtier+unix://{path}") as kv, kvstore.open_sync(f"kvtier+unix://{path}") as other:
            early = 0
            for turn in range(20):
                links = links_of(NS, 8, start=turn * 1000)
                for index, link in enumerate(links):
                    assert kv.put(NS, SHARD, [link], filler([link])) == [True]
                    early += kv._direct._line is not None and len(kv._direct._line._promised)
                    if index in {3, 7}:
                        with other.get(NS, SHARD, links[: index + 1], reach="dram") as blocks:
                            assert [payload_of(NS, lease) for lease in blocks.leases] == [
                                pattern(each, SIZE) for each in links[: index + 1]
                            ]
            return early

    assert await asyncio.to_thread(burst) > 0  # some calls were over before their answers came
    await until(lambda: not plane.writing("default"))
    assert dram.used == dram.count * PLAN.raw_bytes
