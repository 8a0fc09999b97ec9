"""The HTTP face as a stranger meets it: what is checked, what errors look like, ranges, event streams, stopping."""

import asyncio
import base64
import json

import aiohttp
import msgspec
import pytest
from blake3 import blake3
from fakes.node import SHARD, fake_service, filler, links_of, namespace, pattern, payload_of, until
from yarl import URL

import kvstore
from kvstore import api, codec
from kvstore.errors import KINDS, AlreadyExists, Conflict, Invalid, Unavailable, Unsupported
from kvstore.ids import BlockName
from kvstore.server.app import HttpServer
from kvstore.server.limits import Limits

NS = namespace()
LIMITS = Limits(drain=5)
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def service():
    async with fake_service() as service:
        service.plane.namespaces[NS.id] = NS
        yield service


@pytest.fixture
async def server(service):
    async with HttpServer.open(service, "127.0.0.1:0", limits=LIMITS) as server:
        yield server


@pytest.fixture
async def http(server):
    async with aiohttp.ClientSession() as session:

        async def ask(method, path, **options):
            async with session.request(method, URL(server.url + path, encoded=True), **options) as response:
                body = await response.read()
                return response, (json.loads(body) if "json" in response.content_type else body)

        yield ask


async def raw_request(server, head):
    """Status line and body of a hand-made request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


# --- trust ---


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "192.0.2.7:7878", "[::]:0", "example.com:80", "10.0.0.1:0"])
async def test_an_address_that_others_reach_is_refused(service, listen):
    with pytest.raises(Invalid, match="loopback only"):
        async with HttpServer.open(service, listen):
            pass


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7878", "127.0.0.1.evil.example", "", "[::1", "169.254.169.254"])
async def test_a_request_for_another_host_is_refused(server, service, host):
    answer = await raw_request(server, f"GET /v1/sessions/x HTTP/1.1\nHost: {host}\nConnection: close")
    assert answer.split()[1] in {b"403", b"400"}
    assert service.calls == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:7878", "[::1]:7878", "LOCALHOST:1"])
async def test_this_hosts_names_are_taken(server, host):
    answer = await raw_request(server, f"GET /healthz HTTP/1.1\nHost: {host}\nConnection: close")
    assert answer.split()[1] == b"200"


async def test_a_request_without_a_host_is_refused(server):
    answer = await raw_request(server, "GET /healthz HTTP/1.0")
    assert answer.split()[1] in {b"403", b"400"}


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""])
async def test_a_post_that_a_foreign_page_could_send_is_refused(http, service, content_type):
    for path in ("/v1/sessions/x/pin", "/v1/sessions/x/restore", "/v1/collect"):
        response, problem = await http("POST", path, data=b"{}", headers={"Content-Type": content_type})
        assert (response.status, problem["kind"]) == (415, "invalid")
    assert service.calls == []


async def test_no_other_origin_is_ever_allowed(http):
    response, _ = await http("OPTIONS", "/v1/sessions/x", headers={"Origin": "https://evil.example"})
    assert response.status == 405
    assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_port_in_use_is_said(server, service):
    with pytest.raises(AlreadyExists):
        async with HttpServer.open(service, server.url.removeprefix("http://")):
            pass


# --- requests ---


async def test_path_query_and_body_make_one_request(http, service):
    service.answers["get_session"] = service.answers["commit"] = api.Done()
    await http("GET", "/v1/sessions/a%2Fb?lane=l1&namespace=" + NS.id)
    assert service.calls[-1][2] == api.OfSession(id="a/b", lane="l1", namespace=NS.id)
    body = {"id": "a/b", "base_version": 2, "blocks": [{"prefix_id": "ab" * 32, "tokens": 16}]}
    response, _ = await http("POST", "/v1/sessions/a%2Fb/commit?lane=l1", json=body)
    assert response.status == 200
    assert service.calls[-1][2] == api.Commit(id="a/b", lane="l1", base_version=2, blocks=[kvstore.Link("ab" * 32, 16)])


async def test_query_parameters_have_types(http, service):
    service.answers["list_sessions"] = api.SessionPage(sessions=[])
    await http("GET", "/v1/sessions?limit=7&prefix=a%20b%2Bc")
    assert service.calls[-1][2] == api.ListSessions(limit=7, prefix="a b+c")
    response, problem = await http("GET", "/v1/sessions?limit=seven")
    assert (response.status, problem["kind"]) == (400, "invalid")
    assert "limit" in problem["detail"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ('{"base_version": 1, "blocks": [], "bogus": 1}', "bogus"),
        ('{"base_version": "1", "blocks": []}', "base_version"),
        ('{"blocks": []}', "base_version"),
        ('{"base_version": 1, "blocks": [{"prefix_id": 5, "tokens": 1}]}', "prefix_id"),
        ('{"base_version": 1, "blocks": [], "id": "another"}', "id"),
        ("[]", "object"),
        ("null", "object"),
        ('{"base_version": 1', "JSON"),
        ('{"base_version": 1, "blocks": ' + "[" * 100_000, "JSON"),
        ('{"labels": ' + '{"a":' * 5000, "JSON"),
    ],
)
async def test_a_wrong_body_is_named(http, service, body, named):
    response, problem = await http("POST", "/v1/sessions/x/commit", data=body, headers=JSON)
    assert (response.status, problem["kind"], response.content_type) == (400, "invalid", "application/problem+json")
    assert named in problem["detail"]
    assert len(problem["detail"]) < 1000
    assert service.calls == []


async def test_an_unknown_query_parameter_is_named_with_the_known_ones(http):
    response, problem = await http("GET", "/v1/sessions/x?versoin=3")
    assert response.status == 400
    assert "versoin" in problem["detail"]
    assert "lane" in problem["detail"]


async def test_a_body_beyond_the_limit_is_refused(service):
    limits = msgspec.structs.replace(LIMITS, body=1000)
    async with HttpServer.open(service, "127.0.0.1:0", limits=limits) as server, aiohttp.ClientSession() as session:
        response = await session.post(server.url + "/v1/sessions/x/restore", json={"model": "m" * 2000})
        assert (response.status, (await response.json(content_type=None))["kind"]) == (413, "invalid")
    assert service.calls == []


async def test_more_requests_than_allowed_are_told_to_come_back(service):
    limits = msgspec.structs.replace(LIMITS, requests=1)
    async with HttpServer.open(service, "127.0.0.1:0", limits=limits) as server, aiohttp.ClientSession() as session:
        restore = await service.restore("default", api.Restore(id="x"))
        async with session.get(f"{server.url}/v1/restores/{restore.restore_id}/events"):
            async with session.get(server.url + "/healthz") as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
            await service.advance(restore.restore_id, state="ready")


@pytest.mark.parametrize("bad", ["..%2F..%2Fx", "%252e%252e%2Fx", "a%2F..%2Fb", "%00", "", ".."])
async def test_b22_traversal_and_empty_ids_are_400(http, bad):
    for method, tail in (("GET", ""), ("POST", "/restore"), ("DELETE", ""), ("PUT", "")):
        response, problem = await http(method, f"/v1/sessions/{bad}{tail}", **({"json": {}} if method in {"POST", "PUT"} else {}))
        assert (response.status, problem["kind"]) == (400, "invalid"), (method, bad)
    response, problem = await http("GET", f"/v1/blocks/{bad}/{bad}/{bad}?tokens=16")
    assert (response.status, problem["kind"]) == (400, "invalid")


# --- errors ---


async def test_an_error_is_a_problem_document(http, service):
    async def conflict(tenant, request):
        raise Conflict("session 'x' is at version 9", current=9)

    service.answers["rewind"] = conflict
    response, problem = await http("POST", "/v1/sessions/x/rewind", json={"version": 3})
    assert (response.status, response.content_type) == (409, "application/problem+json")
    assert problem == {
        "type": "urn:kvtier:error:conflict",
        "title": "Conflict",
        "status": 409,
        "detail": "session 'x' is at version 9",
        "kind": "conflict",
        "remedy": KINDS["conflict"].remedy,
        "facts": {"current": 9},
    }


async def test_every_kind_has_its_status(http, service):
    for kind, known in KINDS.items():

        async def fail(tenant, request, kind=kind, known=known):
            raise known.error("no", kind=kind)

        service.answers["stats"] = fail
        response, problem = await http("GET", "/v1/stats")
        assert (response.status, problem["kind"], problem["status"]) == (known.http, kind, known.http)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("PATCH", "/v1/sessions/x", 405)])
async def test_what_the_library_refuses_is_a_problem_too(http, method, path, status):
    response, problem = await http(method, path)
    assert (response.status, problem["status"], response.content_type) == (status, status, "application/problem+json")
    assert status != 405 or "DELETE" in response.headers["Allow"]


async def test_a_defect_says_nothing_of_the_inside(http, service, caplog):
    async def broken(tenant, request):
        raise RuntimeError("secret")

    service.answers["stats"] = broken
    response, problem = await http("GET", "/v1/stats")
    assert (response.status, problem["kind"]) == (500, "internal")
    assert "secret" not in json.dumps(problem)
    assert "secret" in caplog.text


async def test_readiness_has_a_status_of_its_own(http, service):
    service.answers["ready"] = api.Health(ok=False, node="n", version="1", degraded={"starting": "tiers are being opened"})
    response, body = await http("GET", "/readyz")
    assert (response.status, body["degraded"]) == (503, {"starting": "tiers are being opened"})
    assert (await http("GET", "/healthz"))[0].status == 200


async def test_creation_and_restores_have_the_statuses_of_the_table(http, service):
    service.answers["create_session"] = service.answers["fork"] = api.Session(
        id="x", namespace=NS.id, lane="main", version=0, tokens=0, blocks=0
    )
    assert (await http("PUT", "/v1/sessions/x", json={"namespace": NS.id}))[0].status == 201
    assert (await http("POST", "/v1/sessions/x/fork", json={"as": "y"}))[0].status == 201
    response, status = await http("POST", "/v1/sessions/x/restore", json={})
    assert (response.status, status["state"], status["version"], status["eta_ms"]) == (202, "resolving", None, None)


# --- blocks ---


def block_path(link, tokens=16, **query):
    more = "".join(f"&{key}={value}" for key, value in query.items())
    return f"/v1/blocks/{NS.id}/{SHARD}/{link.prefix_id}?tokens={tokens}{more}"


@pytest.fixture
def link():
    return links_of(NS, 1)[0]


@pytest.fixture
async def stored(http, link):
    """A block, put over HTTP: (link, its raw object)."""
    payload = pattern(link, 65600)
    response, taken = await http("PUT", block_path(link), data=payload)
    assert (response.status, taken) == (200, {"taken": True})
    response, body = await http("GET", block_path(link))
    assert response.status == 200
    return link, body


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


# --- event streams ---


async def each_event(response):
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def events_of(response):
    return [event async for event in each_event(response)]


async def test_a_restores_progress_is_a_stream_that_ends_with_it(server, service):
    begun = await service.restore("default", api.Restore(id="x"))
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/v1/restores/{begun.restore_id}/events") as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        seen = []
        async for event in each_event(response):  # the next state only once this one was seen: states in between may be left out
            seen.append(event["state"])
            if event["state"] == "resolving":
                await service.advance(begun.restore_id, state="staging", version=2)
            elif event["state"] == "staging":
                await service.advance(begun.restore_id, state="ready")
        assert seen == ["resolving", "staging", "ready"]


async def test_events_of_an_unknown_restore_are_404(http):
    response, problem = await http("GET", "/v1/restores/none/events")
    assert (response.status, problem["kind"]) == (404, "not_found")


# --- metrics ---


async def test_metrics_name_tiers_and_outcomes_and_never_a_session(http, service):
    await http("GET", "/v1/sessions/very-secret-session")
    await http("GET", "/v1/stats")
    response, page = await http("GET", "/metrics")
    text = page.decode()
    assert response.content_type == "text/plain"
    for line in (
        'kvtier_tier_used_bytes{tier="dram"} 0.0',
        'kvtier_tier_hits_total{tier="dram"} 3.0',
        'kvtier_tier_moved_bytes_total{direction="out",tier="dram"} 20.0',
        'kvtier_commits_total{outcome="committed"} 2.0',
        "kvtier_commits_pending 1.0",
        'kvtier_store_requests_total{op="get",outcome="ok"} 5.0',
        'kvtier_requests_total{op="get_session",outcome="not_found"} 1.0',
        'kvtier_requests_total{op="stats",outcome="ok"} 1.0',
        'kvtier_request_seconds_count{op="stats"} 1.0',
    ):
        assert line in text.splitlines()
    assert "very-secret-session" not in text


# --- life ---


async def test_a_commit_goes_on_when_its_client_goes_away(service, server):
    begun, finish, done = asyncio.Event(), asyncio.Event(), []

    async def commit(tenant, request):
        begun.set()
        await finish.wait()
        done.append(request.id)
        return api.Done()

    service.answers["commit"] = commit
    async with aiohttp.ClientSession() as session:
        body = {"base_version": 0, "blocks": []}
        asking = asyncio.create_task(session.post(server.url + "/v1/sessions/s/commit", json=body))
        await begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await asyncio.sleep(0.02)
    finish.set()
    await until(lambda: done == ["s"])


async def test_a_read_ends_when_its_client_goes_away(service, server, link):
    service.plane.gate = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.get(URL(server.url + block_path(link), encoded=True)))
        await until(lambda: service.plane.waiting == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: service.plane.waiting == 0)


async def test_a_stop_finishes_changes_and_cuts_reads_short(service):
    release = asyncio.Event()

    async def commit(tenant, request):
        await release.wait()
        return api.Receipt(id=request.id, namespace=NS.id, lane="main", version=5, tokens=0, blocks=0, durability="bucket")

    service.answers["commit"] = commit
    opened = HttpServer.open(service, "127.0.0.1:0", limits=LIMITS)
    server = await opened.__aenter__()
    async with kvstore.open(server.url.replace("http", "kvtier")) as kv, aiohttp.ClientSession() as session:
        begun = await kv.restore("x")
        committing = asyncio.create_task(kv.commit("s", namespace=NS.id, base_version=4, blocks=[]))
        waiting = asyncio.create_task(kv.get_restore(begun.restore_id, wait_ms=60_000))
        response = await session.get(f"{server.url}/v1/restores/{begun.restore_id}/events")
        await until(lambda: {"commit", "get_restore"} <= {name for _, name, _ in service.calls})
        closing = asyncio.create_task(opened.__aexit__(None, None, None))
        with pytest.raises(Unavailable, match="stopping"):
            await waiting
        assert [event["state"] for event in await events_of(response)] == ["resolving"]
        release.set()
        assert (await committing).version == 5
        await closing
        with pytest.raises(Unavailable, match="no node listens"):
            await kv.health()


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
