"""The client's side of HTTP: what it refuses, what it carries, and what it says of a connection that broke."""

import asyncio

import msgspec
import pytest
from fakes.http_face import NS
from fakes.node import SHARD, filler, links_of, payload_of, until

import kvstore
from kvstore import api
from kvstore.errors import Invalid, Unavailable, Unsupported


async def test_a_client_refuses_what_is_not_a_node():
    async def nonsense(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\nsorry")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    async with server:
        with pytest.raises(Unavailable, match="is there a kvtier node"):
            await kvstore.connect(f"kvtier://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_a_client_checks_the_nodes_version(server, service):
    service.version = "0.9.0"
    with pytest.raises(Unsupported) as caught:
        await kvstore.connect(server.url.replace("http", "kvtier"))
    assert caught.value.kind == "version_mismatch"


@pytest.mark.parametrize("url", ["kvtier://node.example", "kvtier://192.0.2.1:7878"])
async def test_kv_does_not_travel_unencrypted_unless_it_is_said(url):
    with pytest.raises(Invalid, match="allow_http"):
        await kvstore.connect(url)


async def test_a_tenant_over_tcp_needs_the_socket(server):
    with pytest.raises(Unsupported, match="tenant"):
        await kvstore.connect(server.url.replace("http", "kvtier") + "?tenant=acme")


async def test_blocks_travel_over_http_in_both_directions(server):
    links = links_of(NS, 30)  # more than travel at a time
    async with kvstore.open(server.url.replace("http", "kvtier")) as kv:
        assert await kv.put(NS, SHARD, links, filler(links)) == [True] * 30
        with await kv.get(NS, SHARD, links) as blocks:
            assert [payload_of(NS, lease)[:32].hex() for lease in blocks.leases] == [link.prefix_id for link in links]


async def test_b47_cancelled_requests_leave_nothing(service, server):
    links = links_of(NS, 3)
    async with kvstore.open(server.url.replace("http", "kvtier")) as kv:
        await kv.put(NS, SHARD, links, filler(links))
        for round_ in range(20):
            service.plane.gate = asyncio.Event() if round_ % 2 else None
            running = [asyncio.create_task(kv.get(NS, SHARD, links)) for _ in range(4)]
            running += [asyncio.create_task(kv.put(NS, SHARD, links, filler(links))) for _ in range(2)]
            for _ in range(5 * round_):
                await asyncio.sleep(0)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await until(lambda: service.plane.waiting == 0)
        service.plane.gate = None
        assert await kv.put(NS, SHARD, links, filler(links)) == [True] * 3
    tier = service.plane.tiers["default"]
    await until(lambda: tier.leases == 0 and tier._budget.reserved == 0)


async def test_a_connection_that_breaks_says_whether_a_change_may_have_been_made(service):
    async def hang_up(reader, writer):
        if b"healthz" in await reader.readuntil(b"\r\n\r\n"):
            body = msgspec.json.encode(await service.health("default", api.Nothing()))
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server, kvstore.open(f"kvtier://127.0.0.1:{server.sockets[0].getsockname()[1]}") as kv:
        with pytest.raises(Unavailable) as caught:
            await kv.get_session("x")
        assert caught.value.kind == "unavailable"
        with pytest.raises(Unavailable) as caught:
            await kv.rewind("x", version=1)
        assert caught.value.kind == "outcome_unknown"
