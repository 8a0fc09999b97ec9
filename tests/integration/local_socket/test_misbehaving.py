"""Clients that send garbage, too much, or do not read: that connection ends, and no other."""

import asyncio

import msgspec
import pytest
from fakes.node import SHARD, VERSION, filler, links_of, until
from fakes.raw_socket import LIMITS, NS, Raw, answer, framed, get_of, leased, url

import kvstore
from kvstore import api, wire
from kvstore.server.local import LocalServer


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\x7f",
        b"\0\0\0\0",
        b"\4\0\0\0\xde\xad\xbe\xef",
        wire.frame(wire.Hello(1, VERSION, "acme")),
        wire.frame(wire.Ask(0, "health", msgspec.Raw(b"\x80"))),
        wire.frame(wire.Ask(-3, "health", msgspec.Raw(b"\x80"))),
        framed(msgspec.msgpack.encode(["Release", [(1, 1)] * 70000])),
        framed(b"\x91" * 5000 + b"\xc0"),
    ],
)
async def test_garbage_ends_that_connection_and_no_other(raw, server, service, path, garbage):
    async with kvstore.open(url(path)) as kv:
        client = await raw()
        fault = await answer(client, garbage)
        assert (fault.id, fault.problem.kind) == (0, "corrupt")
        assert await answer(client) is None
        assert (await kv.health()).ok


async def test_a_request_number_in_use_ends_the_connection(raw, service):
    service.plane.gate = asyncio.Event()
    service.plane.namespaces[NS.id] = NS
    client = await raw()
    get = get_of(7, links_of(NS, 1)[0])
    client.send(get)
    fault = await answer(client, get)
    assert (fault.id, fault.problem.kind) == (0, "corrupt")
    await until(lambda: service.plane.waiting == 0)


async def test_a_call_that_cannot_be_understood_fails_alone(raw):
    client = await raw()
    for number, (name, body) in enumerate(
        [("nonsense", b"\x80"), ("x" * 10000, b"\x80"), ("restore", b"\x80"), ("restore", b"\xc0"), ("commit", b"\x81\xa2id\x05")],
        1,
    ):
        fault = await answer(client, wire.Ask(number, name, msgspec.Raw(body)))
        assert (fault.id, fault.problem.kind) == (number, "invalid")
        assert len(fault.problem.detail) < 2000
    assert isinstance(await answer(client, wire.Ask(99, "health", msgspec.Raw(b"\x80"))), wire.Reply)


async def test_more_requests_than_allowed_are_answered_as_overload(raw, service):
    service.plane.gate = asyncio.Event()
    service.plane.namespaces[NS.id] = NS
    client = await raw()
    link = links_of(NS, 1)[0]
    frames = b"".join(wire.frame(get_of(n, link)) for n in range(1, wire.MAX_IN_FLIGHT + 2))
    fault = await answer(client, frames)
    assert (fault.id, fault.problem.kind) == (wire.MAX_IN_FLIGHT + 1, "overloaded")
    service.plane.gate.set()
    assert {(await answer(client)).id for _ in range(wire.MAX_IN_FLIGHT)} == set(range(1, wire.MAX_IN_FLIGHT + 1))


async def test_every_request_is_answered_once_also_when_it_is_cancelled(raw, service):
    service.plane.gate = asyncio.Event()
    service.plane.namespaces[NS.id] = NS
    client = await raw()
    link = links_of(NS, 1)[0]
    frames = b""
    for number in range(1, 41):  # cancelled before its first step, and while it waits
        frames += wire.frame(get_of(number, link))
        frames += wire.frame(wire.Cancel(number)) if number % 2 else b""
    client.send(frames)
    await until(lambda: service.plane.waiting == 20)
    client.send(b"".join(wire.frame(wire.Cancel(number)) for number in (*range(1, 41), 4711)))
    seen = [await answer(client) for _ in range(40)]
    assert sorted(each.id for each in seen) == list(range(1, 41))
    assert {each.problem.kind for each in seen} == {"closed"}
    assert isinstance(await answer(client, wire.Ask(50, "health", msgspec.Raw(b"\x80"))), wire.Reply)


async def test_a_client_that_does_not_read_is_dropped_with_its_leases(service, path):
    labels = {"x" * 200 + str(i): "y" * 200 for i in range(500)}
    service.answers["get_session"] = api.Session(id="s", namespace=NS.id, lane="main", version=1, tokens=0, blocks=0, labels=labels)
    links = links_of(NS, 1)
    async with LocalServer.open(service, path, limits=msgspec.structs.replace(LIMITS, stall=0.2)) as server:
        async with kvstore.open(url(path)) as kv:
            await kv.put(NS, SHARD, links, filler(links))
        client = await asyncio.to_thread(Raw, path)
        await asyncio.to_thread(client.hello)
        client.send(get_of(1, links[0]))
        ask = msgspec.Raw(msgspec.msgpack.encode(api.OfSession(id="s")))
        client.send(b"".join(wire.frame(wire.Ask(number, "get_session", ask)) for number in range(2, 50)))
        await until(lambda: server.connections == 0 and leased(service) == 0)
        client.close()


async def test_a_commit_goes_on_when_its_client_dies(raw, service, server):
    begun, finish, done = asyncio.Event(), asyncio.Event(), []

    async def commit(tenant, request):
        begun.set()
        await finish.wait()
        done.append(request.id)
        return api.Receipt(id=request.id, namespace=NS.id, lane="main", version=1, tokens=0, blocks=0, durability="bucket")

    service.answers["commit"] = commit
    client = await raw()
    await until(lambda: server.connections == 1)
    request = api.Commit(id="s", base_version=0, blocks=[])
    client.send(wire.Ask(1, "commit", msgspec.Raw(msgspec.msgpack.encode(request))))
    await begun.wait()
    client.send(wire.Cancel(1))
    client.close()
    await asyncio.sleep(0.02)
    finish.set()
    await until(lambda: server.connections == 0)
    assert done == ["s"]
