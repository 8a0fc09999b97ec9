"""Requests over HTTP: what is checked, named and bounded, and what is counted of them."""

import aiohttp
import msgspec
import pytest
from fakes.http_face import LIMITS, NS

import kvstore
from kvstore import api
from kvstore.server.app import HttpServer

JSON = {"Content-Type": "application/json"}


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
