"""Blocks over HTTP: objects, ranges, digests, misses, and leases that end with their streams."""

import asyncio
import base64

import msgspec
import pytest
from blake3 import blake3
from fakes.http_face import LIMITS, NS, block_path
from fakes.node import SHARD, filler, links_of, namespace, pattern, until

import kvstore
from kvstore import codec
from kvstore.ids import BlockName
from kvstore.server.app import HttpServer


async def test_a_block_is_an_object_anyone_can_check(stored, http):
    link, body = stored
    codec.verify(memoryview(body), BlockName(NS.id, SHARD, link.prefix_id, 16), NS)
    response, _ = await http("GET", block_path(link))
    assert (response.content_length, response.headers["Accept-Ranges"]) == (len(body), "bytes")
    assert response.headers["ETag"] == f'"{codec.block_digest(memoryview(body))}"'
    head, nothing = await http("HEAD", block_path(link))
    assert (head.status, head.content_length, nothing) == (200, len(body), b"")


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=4096-8191", 4096, 8192),
        ("bytes=-100", -100, None),
        ("bytes=69000-", 69000, None),
        ("bytes=5-999999", 5, None),
    ],
)
async def test_a_range_is_served(stored, http, header, start, end):
    link, body = stored
    response, part = await http("GET", block_path(link), headers={"Range": header})
    assert (response.status, part) == (206, body[start:end])
    first = start % len(body)
    assert response.headers["Content-Range"] == f"bytes {first}-{first + len(part) - 1}/{len(body)}"


@pytest.mark.parametrize("header", ["bytes=9-5", "bytes=0-1,5-6", "items=0-5", "bytes=-", "bytes=x-y", ""])
async def test_a_range_that_means_nothing_is_ignored(stored, http, header):
    link, body = stored
    response, whole = await http("GET", block_path(link), headers={"Range": header})
    assert (response.status, whole) == (200, body)


@pytest.mark.parametrize("header", ["bytes=999999-", "bytes=-0"])
async def test_a_range_outside_is_416(stored, http, header):
    link, body = stored
    response, _ = await http("GET", block_path(link), headers={"Range": header})
    assert (response.status, response.headers["Content-Range"]) == (416, f"bytes */{len(body)}")


async def test_a_range_of_another_version_is_the_whole(stored, http):
    link, body = stored
    response, whole = await http("GET", block_path(link), headers={"Range": "bytes=0-9", "If-Range": '"other"'})
    assert (response.status, whole) == (200, body)


async def test_a_miss_is_404_with_its_reason(http, link):
    response, problem = await http("GET", block_path(link))
    assert (response.status, response.headers["X-KVTier-Miss"], problem["kind"]) == (404, "absent", "not_found")


async def test_leases_of_streams_are_released(stored, http, service):
    link, _ = stored
    await asyncio.gather(*(http("GET", block_path(link)) for _ in range(10)))
    await until(lambda: service.plane.tiers["default"].leases == 0)


async def test_a_client_that_goes_away_while_it_reads_leaves_no_lease(service, server):
    big = namespace(layers=64, block_tokens=64)  # 8 MiB: more than the sockets' buffers
    service.plane.namespaces[big.id] = big
    links = links_of(big, 1)
    async with kvstore.open(server.url.replace("http", "kvtier")) as kv:
        await kv.put(big, SHARD, links, filler(links))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    path = f"/v1/blocks/{big.id}/{SHARD}/{links[0].prefix_id}?tokens=64"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await reader.readexactly(100)
    assert service.plane.tiers["default"].leases == 1
    writer.transport.abort()
    await until(lambda: service.plane.tiers["default"].leases == 0)


async def test_a_client_that_stops_reading_is_dropped_with_its_lease(service):
    big = namespace(layers=64, block_tokens=64)
    service.plane.namespaces[big.id] = big
    links = links_of(big, 1)
    async with HttpServer.open(service, "127.0.0.1:0", limits=msgspec.structs.replace(LIMITS, stall=0.1)) as server:
        async with kvstore.open(server.url.replace("http", "kvtier")) as kv:
            await kv.put(big, SHARD, links, filler(links))
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        path = f"/v1/blocks/{big.id}/{SHARD}/{links[0].prefix_id}?tokens=64"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await reader.readexactly(100)
        await until(lambda: service.plane.tiers["default"].leases == 0)
        writer.close()


@pytest.mark.parametrize("length", [0, 1, 65599, 65601])
async def test_a_payload_of_another_length_is_refused(http, link, service, length):
    response, problem = await http("PUT", block_path(link), data=bytes(length))
    assert (response.status, problem["kind"]) == (400, "invalid")

    async def chunks():
        yield bytes(length)

    response, problem = await http("PUT", block_path(link), data=chunks())
    assert (response.status, problem["kind"]) == (400, "invalid")
    assert service.plane.tiers["default"].used == 0


async def test_a_payload_that_does_not_match_its_digest_is_refused(http, link, service):
    payload = pattern(link, 65600)
    digest = base64.b64encode(blake3(payload).digest()).decode()
    altered = b"\0" + payload[1:]
    response, problem = await http("PUT", block_path(link), data=altered, headers={"Content-Digest": f"blake3=:{digest}:"})
    assert (response.status, problem["kind"]) == (422, "corrupt")
    assert service.plane.tiers["default"].used == 0
    response, taken = await http("PUT", block_path(link), data=payload, headers={"Content-Digest": f"blake3=:{digest}:"})
    assert (response.status, taken) == (200, {"taken": True})


async def test_a_payload_that_never_comes_does_not_keep_its_room(service, link):
    async with HttpServer.open(service, "127.0.0.1:0", limits=msgspec.structs.replace(LIMITS, upload=0.1)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        head = f"PUT {block_path(link)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 65600\r\n\r\nonly this"
        writer.write(head.encode())
        assert (await reader.readline()).split()[1] == b"400"
        assert service.plane.tiers["default"].used == 0
        writer.close()


async def test_b37_altered_bytes_on_the_way_are_a_miss(service, server, link, monkeypatch):
    async with kvstore.open(server.url.replace("http", "kvtier")) as kv:
        await kv.put(NS, SHARD, [link], filler([link]))
        lease = service.plane.tiers["default"].lease(service.plane.want("default", NS.id, SHARD, link))
        service.plane.tiers["default"]._arena.view[lease.offset + 20_000] ^= 1  # one bit, after it was sealed
        lease.release()
        with await kv.get(NS, SHARD, [link]) as blocks:
            assert (len(blocks), blocks.miss) == (0, "corrupt")


@pytest.mark.parametrize("query", ["", "?tokens=x", "?tokens=16&unknown=1", "?tokens=16&reach=moon"])
async def test_a_wrong_block_query_is_refused(http, link, query):
    response, problem = await http("GET", f"/v1/blocks/{NS.id}/{SHARD}/{link.prefix_id}{query}")
    assert (response.status, problem["kind"]) == (400, "invalid")


async def test_a_full_node_says_so_without_an_error(http, service, link):
    service.plane.full = True
    response, taken = await http("PUT", block_path(link), data=pattern(link, 65600))
    assert (response.status, taken) == (200, {"taken": False})
