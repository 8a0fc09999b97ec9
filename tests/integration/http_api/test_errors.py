"""Errors over HTTP are problem documents, and every kind has its status."""

import json

import pytest
from fakes.http_face import NS

from kvstore import api
from kvstore.errors import KINDS, Conflict


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
