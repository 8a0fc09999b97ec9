"""The first words on the socket: versions that fit, garbage that is refused, and how many may come in."""

import asyncio

import msgspec
import pytest
from fakes.node import until
from fakes.raw_socket import LIMITS, Raw, answer, url

import kvstore
from kvstore import wire
from kvstore.client.local import LocalTransport
from kvstore.errors import Unsupported
from kvstore.server.local import LocalServer


@pytest.mark.parametrize("version", ["0.0.9", "0.1.7", "0.2.0", "0.1.0rc1"])
async def test_neighbouring_minor_versions_work_together(raw, version):
    client = await raw(hello=False)
    assert isinstance(await asyncio.to_thread(lambda: client.hello(version=version)), wire.Welcome)


@pytest.mark.parametrize("version", ["0.3.0", "1.1.0", "", "x.y", "0", "0.-1", "٠.١"])
async def test_other_versions_get_a_clear_refusal(raw, version):
    client = await raw(hello=False)
    fault = await asyncio.to_thread(lambda: client.hello(version=version))
    assert (fault.id, fault.problem.kind, fault.problem.status) == (0, "version_mismatch", 426)
    assert await answer(client) is None


async def test_a_client_is_told_which_versions_do_not_fit(server, service, path):
    service.version = "0.7.0"
    with pytest.raises(Unsupported, match=r"0\.7\.0") as caught:
        await LocalTransport.open(path)
    assert caught.value.kind == "version_mismatch"


async def test_another_protocol_is_refused(raw):
    client = await raw(hello=False)
    fault = await asyncio.to_thread(lambda: client.hello(protocol=99))
    assert fault.problem.kind == "version_mismatch"


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\5\0\0\0hello",
        wire.frame(wire.Release([(1, 1)])),
        b"\1\x10\0\0",
    ],
)
async def test_garbage_instead_of_a_hello_is_refused(raw, server, first):
    client = await raw(hello=False)
    fault = await answer(client, first)
    assert (fault.id, fault.problem.kind) == (0, "corrupt")
    assert await answer(client) is None
    await until(lambda: server.connections == 0)


async def test_a_silent_connection_is_dropped(service, path):
    async with LocalServer.open(service, path, limits=msgspec.structs.replace(LIMITS, hello=0.05)):
        client = await asyncio.to_thread(Raw, path)
        client.send(b"\1")
        assert await answer(client) is None
        client.close()


async def test_more_connections_than_allowed_are_refused(service, path):
    async with LocalServer.open(service, path, limits=msgspec.structs.replace(LIMITS, connections=2)) as server:
        clients = [await kvstore.connect(url(path)) for _ in range(2)]
        with pytest.raises(kvstore.Overloaded):
            await kvstore.connect(url(path))
        await clients[0].aclose()
        await until(lambda: server.connections == 1)
        clients.append(await kvstore.connect(url(path)))
        for client in clients:
            await client.aclose()
