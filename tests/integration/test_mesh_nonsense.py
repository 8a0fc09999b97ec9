"""Peers that answer nonsense, and requests that are none: a miss or a refusal, and others are served."""

import asyncio
import os
import socket

import msgspec
import pytest
from fakes.mesh_pair import PATIENT, answer_frame, asking, idle, only, pair
from fakes.mesh_peers import NS, Counted, block, mesh_node, wants_of
from fakes.node import until
from fakes.peer import request_of, scripted

from kvstore.errors import Invalid
from kvstore.mesh import frames
from kvstore.server.peering import PeeringLimits
from kvstore.service.names import Names
from tiering import Miss

GARBAGE = {
    "nothing": b"",
    "noise": bytes(range(256)) * 40,
    "a refusal": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n" + b" " * 60,
    "half a frame": frames.ANSWER + answer_frame(0, 0, 10)[:9],
    "a short object": frames.ANSWER + answer_frame(0, 0, 10, b"x" * 10 + b"\r\n"),
    "a huge object": frames.ANSWER + answer_frame(0, 0, 1 << 39),
    "a huge coded one": frames.ANSWER + answer_frame(1, 0, 1 << 39),
    "another's place": frames.ANSWER + answer_frame(0, 7, wants_of(1)[0].size),
    "an unknown miss": frames.ANSWER + answer_frame(99, 0, 0, b"\r\n"),
    "a miss with bytes": frames.ANSWER + answer_frame(2, 0, 5, b"x" * 5 + b"\r\n"),
    "another length": frames.ANSWER + b"00000000ff\r\n" + frames._FRAME.pack(0, 0, wants_of(1)[0].size),
    "zeros": frames.ANSWER + answer_frame(0, 0, wants_of(1)[0].size, bytes(wants_of(1)[0].size) + b"\r\n"),
    "no coding": frames.ANSWER + answer_frame(1, 0, 100, b"x" * 100 + b"\r\n"),
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE.keys())
async def test_a_peer_that_talks_nonsense_is_a_miss(said):
    async def answer(reader, writer):
        await request_of(reader)
        writer.write(said)
        await writer.drain()

    bucket = Counted()
    async with mesh_node("b", bucket=bucket, settings=PATIENT) as b, scripted(answer) as member:
        wants = wants_of(3)
        only(b, wants, member)
        got, sources = await b.read(wants)
        assert got == [block(each) for each in wants]
        assert sources == ["bucket"] * 3
        with pytest.raises((OSError, frames.Malformed)):
            await b.links.holds(member, [each.key for each in wants])
        await until(lambda: idle(b))


def _post(path, body, length=None, kind=frames.MEDIA_TYPE):
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n".encode() + body


def _ask(**fields):
    fine = {"namespace": NS, "shard": "t0of1.p0of1.g0", "prefixes": bytes(32), "tokens": [64]}
    return msgspec.msgpack.encode(fine | fields)


NONSENSE = {
    "another method": b"GET /v1/peer/blocks HTTP/1.1\r\nContent-Type: application/msgpack\r\n\r\n",
    "another path": _post("/", _ask()),
    "a page's content type": _post(frames.BLOCKS, _ask(), kind="text/plain"),
    "an endless head": b"POST " + b"x" * 6_000,
    "a huge body": _post(frames.BLOCKS, b"", 1 << 40),
    "no length": b"POST /v1/peer/blocks HTTP/1.1\r\nContent-Type: application/msgpack\r\n\r\n",
    "no msgpack": _post(frames.BLOCKS, b"\xff" * 50),
    "an unknown field": _post(frames.BLOCKS, _ask(more=1)),
    "too many tokens": _post(frames.BLOCKS, _ask(tokens=[129])),
    "no namespace": _post(frames.BLOCKS, _ask(namespace={"model": "m", "revision": "r", "layers": 0})),
    "no shard": _post(frames.BLOCKS, _ask(shard="../etc")),
    "no blocks": _post(frames.BLOCKS, _ask(prefixes=b"", tokens=[])),
    "too many blocks": _post(frames.BLOCKS, _ask(prefixes=bytes(32) * 600, tokens=[64] * 600)),
    "half a prefix": _post(frames.BLOCKS, _ask(prefixes=bytes(33))),
    "half a key": _post(frames.HOLDS, msgspec.msgpack.encode(bytes(33))),
    "too many keys": _post(frames.HOLDS, msgspec.msgpack.encode(bytes(32 * 17_000))),
}


@pytest.mark.parametrize(("through", "why"), [(False, "absent"), (True, "full")])
async def test_a_namespace_that_nobody_has_heard_of_costs_little(through, why, monkeypatch):
    def sizes(self, tokens):
        raise AssertionError(f"{len(tokens)} blocks of {self.namespace.layers} layers are measured")

    strange = msgspec.structs.replace(NS, layers=4096, block_tokens=512)
    async with pair() as (a, _):
        reader, writer = await asyncio.open_connection(*a.peering.address)
        with monkeypatch.context() as patched:
            patched.setattr(Names, "sizes", sizes)
            ask = _ask(namespace=strange, prefixes=os.urandom(32 * 512), tokens=[*range(1, 513)], through=through)
            writer.write(_post(frames.BLOCKS, ask))
            assert (await reader.readuntil(frames.LAST)).startswith(frames.ANSWER)
        assert a.peering.counts[why] == 512
        writer.close()


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE.keys())
async def test_a_request_that_is_none_is_refused_and_others_are_served(said):
    async with pair() as (a, b):
        reader, writer = await asyncio.open_connection(*a.peering.address)
        writer.write(said)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400")
        writer.close()
        wants = wants_of(2)
        a.put(wants)
        assert (await b.read(wants))[1] == ["peer"] * 2


@pytest.mark.parametrize(
    ("fields", "miss"),
    [({"namespace": msgspec.structs.replace(NS, tenant="another")}, Miss.ABSENT), ({"prefixes": bytes(32)}, Miss.ABSENT)],
)
async def test_what_a_node_does_not_know_is_a_miss(fields, miss):
    async with mesh_node("a") as a:
        reader, writer = await asyncio.open_connection(*a.peering.address)
        writer.write(_post(frames.BLOCKS, _ask(**fields)))
        answer = await reader.readexactly(len(frames.ANSWER) + frames.FRAME_BYTES)
        assert frames.parse_frame(answer[len(frames.ANSWER) :]).miss is miss
        writer.close()


async def test_only_trusted_addresses_may_connect():
    async with mesh_node("a", networks=("10.0.0.0/8",)) as a:
        reader, writer = await asyncio.open_connection(*a.peering.address)
        assert await reader.read() == b""
        assert a.peering.counts["connections untrusted"] == 1
        writer.close()


async def test_a_listener_beyond_loopback_needs_networks():
    async with mesh_node("a") as a:
        opening = type(a.peering).open(a.stack, {}, None, None, None, listen="0.0.0.0:0")
        with pytest.raises(Invalid, match="no network is trusted"):
            async with opening:
                pass


async def test_one_address_has_so_many_connections():
    async with mesh_node("a", limits=PeeringLimits(from_one=2)) as a:
        socks = [socket.create_connection(a.peering.address) for _ in range(3)]
        await until(lambda: a.peering.counts["connections crowded"] == 1)
        for sock in socks:
            sock.close()


async def test_what_is_beyond_the_bound_of_a_request_is_a_miss():
    limits = PeeringLimits(asked=2 * wants_of(1)[0].size)
    async with mesh_node("a", limits=limits) as a:
        wants = wants_of(6)
        a.put(wants)
        sock = asking(a, wants)
        data = b""
        while frames.LAST not in data[-5:]:
            data += await asyncio.to_thread(sock.recv, 1 << 20)
        assert a.peering.counts["raw"] == 2
        assert a.peering.counts["full"] == 4
        sock.close()
