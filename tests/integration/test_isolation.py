"""No route gives anything to somebody whom it is not for: every route of a node, with every kind of wrong credentials.

The routes are those that the application has, so that one that is added later is tried, too. What is sent to a route is made of
`VALUES`; a route that wants something else fails here until it is said what.
"""

import asyncio
import json
import os
import re
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest
from fakes.node import SHARD, filler, links_of, namespace, pattern
from yarl import URL

import kvstore
from kvstore import api
from kvstore.access import SCOPES, Tokens, new_token
from kvstore.clock import RandomIds
from kvstore.config import AuthSettings, Bytes, DramSettings, Settings, StoreSettings, Tenant
from kvstore.errors import Denied, KVTierError
from kvstore.node import Node
from kvstore.server.app import HttpServer, application
from kvstore.server.auth import need_of
from kvstore.server.limits import Limits
from kvstore.server.local import LocalServer
from kvstore.server.metrics import Metrics
from kvstore.server.visitors import Visitors

NS = namespace(tenant="acme", model="acme-model")
LINKS = links_of(NS, 2)
HIDDEN = "acme-hidden-session"  # no request says it: whoever sees it was told
SESSION = "acme-session"
VALUES = {  # what fields of requests are, where the tenant `acme` asks for its own
    "id": SESSION,
    "namespace": NS.id,
    "shard": str(SHARD),
    "prefix_id": LINKS[0].prefix_id,
    "tenant": "acme",
    "fields": msgspec.to_builtins(NS),
    "base_version": 1,
    "blocks": msgspec.to_builtins(LINKS),
    "as": "acme-copy",
    "event": "final",
    "prefix_ids": [link.prefix_id for link in LINKS],
    "tokens": 16,
    "version": 1,
}
# What a request's type cannot say that it needs.
MORE = {"create_session": ["namespace"], "commit": ["namespace"], "rewind": ["version"], "warm": ["as"]}
NOWHERE = {  # the same shape, of what nobody has
    SESSION: "nobody-here",
    NS.id: "ab" * 32,
    LINKS[0].prefix_id: "cd" * 32,
    LINKS[1].prefix_id: "ef" * 32,
}


def routes():
    """Method, path and handler of each, as the server has them; HEAD, too."""
    app = application(Mock(), Mock(), Limits(), Metrics(), Mock(), Visitors(Limits()), bound="")
    return [(route.method, route.resource.canonical, route) for route in app.router.routes()]


ROUTES = routes()


def needed_of(call):
    """Names of the fields that a request must have."""
    return [field.encode_name for field in msgspec.structs.fields(call.request) if field.required] + MORE.get(call.name, [])


def asked_of(method, path, route, values):
    """Path and JSON body of a request."""
    # A template's patterns are in it, as {id:[^{}/]*}.
    names = re.findall(r"\{(\w+)[^{}]*(?:\{\}[^{}]*)*\}", path)
    call = api.BY_NAME.get(route.name)
    query = {"tokens": values["tokens"]} if path.startswith("/v1/blocks/") else {}
    filled = re.sub(r"\{(\w+)[^{}]*(?:\{\}[^{}]*)*\}", lambda match: str(values[match[1]]), path)
    body = None
    if method in {"POST", "PUT"} and call is not None:
        body = {name: values[name] for name in needed_of(call) if name not in names}
    elif method == "PUT":
        body = pattern(LINKS[0], 65_600)
    return str(URL(filled, encoded=True).with_query(query)) if query else filled, body


class Stage:
    """A node that serves `acme` and `rival` over HTTP, and tokens for it. `acme` has sessions, blocks and a restore."""

    def __init__(self, node, url, http, file):
        self.node, self.url, self._http, self._file = node, url, http, file
        self.known = {}
        self.values = dict(VALUES)

    def token(self, tenant, scopes, expires=None):
        text, token_id, made = new_token(RandomIds(), tenant, scopes, expires)
        self.known[token_id] = made
        self._file.write_text(Tokens(self.known).text())
        return text

    async def ask(self, method, path, header, body=None):
        """Status, headers and body. A stream is read for a while."""
        how = {"data": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
        headers = {"Authorization": header} if header else {}
        async with self._http.request(method, URL(self.url + path, encoded=True), headers=headers, **how) as answer:
            text = b""
            try:
                async with asyncio.timeout(5):
                    text = await answer.read()
            except TimeoutError:
                assert answer.content_type == "text/event-stream"
            return answer.status, dict(answer.headers), text

    async def all(self, header, *, values=None, without=()):
        """(route, status, body) of every route."""
        found = []
        for method, path, route in ROUTES:
            if route.name not in without:
                target, body = asked_of(method, path, route, values or self.values)
                status, _, text = await self.ask(method, target, header, body)
                found.append((f"{method} {path}", need_of(route.handler), status, text))
        return found


@pytest.fixture
async def stage(tmp_path):
    store = StoreSettings(url=f"memory://{RandomIds().new()}")
    tenants = {"acme": Tenant(uids=(os.getuid(),)), "rival": Tenant(uids=(os.getuid(),))}
    settings = Settings(store=store, dram=DramSettings(size=Bytes(32 << 20)), tenants=tenants)
    file = tmp_path / "tokens.toml"
    file.write_text(Tokens({}).text())
    async with AsyncExitStack() as lifetime:
        node = await lifetime.enter_async_context(Node.open(settings))
        opening = HttpServer.open(node.service, "127.0.0.1:0", auth=AuthSettings(tokens_file=str(file)))
        server = await lifetime.enter_async_context(opening)
        socket = str(tmp_path / "node.sock")
        await lifetime.enter_async_context(LocalServer.open(node.service, socket))
        http = await lifetime.enter_async_context(aiohttp.ClientSession())
        stage = Stage(node, server.url, http, file)
        kv = await lifetime.enter_async_context(kvstore.open(f"kvtier+unix://{socket}?tenant=acme"))
        stage.kv, stage.socket = kv, socket
        for session in (SESSION, HIDDEN):
            await kv.create_session(session, namespace=NS, labels={"note": "acme-label"})
            await kv.put(NS, SHARD, LINKS, filler(LINKS))
            await kv.commit(session, namespace=NS, base_version=0, blocks=LINKS)
        stage.values["restore_id"] = (await kv.wait(await kv.restore(SESSION))).restore_id
        yield stage


# What is nowhere in a request: `acme`'s hidden session, labels, and its KV (twice 32 bytes of the pattern it is filled with).
SECRETS = (HIDDEN.encode(), b"acme-label", *(bytes.fromhex(link.prefix_id) * 2 for link in LINKS))


def test_every_route_says_what_it_needs():
    assert [path for _, path, route in ROUTES if need_of(route.handler) is None] == []
    of_calls = {route.name: need_of(route.handler) for _, _, route in ROUTES}
    assert {call.name: call.scope for call in api.CALLS} == {call.name: of_calls[call.name] for call in api.CALLS}
    # What asks for nothing is this, and holds nothing of anybody.
    assert {path for _, path, route in ROUTES if need_of(route.handler) == "open" and not path.startswith("/console/")} == {
        "/",
        "/healthz",
        "/readyz",
    }
    assert len(ROUTES) > 30


async def test_a_route_that_does_not_say_what_it_needs_is_nobodys(stage, monkeypatch):
    monkeypatch.setattr("kvstore.server.auth.need_of", lambda handler: None)
    for header in ("", f"Bearer {stage.token('acme', ['admin'])}"):
        assert (await stage.ask("GET", "/v1/stats", header))[0] in {401, 500}
    assert (await stage.ask("GET", "/healthz", ""))[0] == 500


async def test_acme_itself_is_answered(stage):
    """Else the other tests prove nothing: these requests are right but for who sends them."""
    header = f"Bearer {stage.token('acme', SCOPES)}"
    for method, path, route in ROUTES:
        if route.name in {"delete_session", "delete_namespace", "delete_tenant", "cancel_restore"}:
            continue
        target, body = asked_of(method, path, route, stage.values)
        status, _, text = await stage.ask(method, target, header, body)
        exists = route.name == "create_session"
        assert status in ({409} if exists else {200, 201, 202}), (method, path, status, text[:300])
    assert (await stage.kv.get_session(HIDDEN)).version == 1


def wrong(stage):
    """Headers that show no valid token, by what is wrong with them."""
    good = stage.token("acme", SCOPES)
    past = datetime.now(UTC) - timedelta(seconds=1)
    return {
        "no token": "",
        "malformed": "Bearer kvt_x",
        "no bearer": f"Basic {good}",
        "nothing behind": "Bearer ",
        "not ASCII": "Bearer kvt_é",
        "very long": "Bearer " + "k" * 5000,
        "wrong secret": f"Bearer {good[:-1]}{'0' if good[-1] != '0' else '1'}",
        "wrong id": f"Bearer kvt_{'0' * 16}_{good[-64:]}",
        "expired": f"Bearer {stage.token('acme', SCOPES, past)}",
    }


async def test_whoever_shows_no_valid_token_gets_nothing(stage):
    for kind, header in wrong(stage).items():
        for route, need, status, text in await stage.all(header):
            opened = need == "open" and kind == "no token"
            assert status == (200 if opened else 401), (kind, route, status, text)
            assert not any(secret in text for secret in SECRETS), (kind, route)
            if status == 401 and not route.startswith("HEAD"):
                problem = json.loads(text)
                assert (problem["kind"], problem["status"]) == ("unauthenticated", 401)
                assert "KVTIER_TOKEN" in problem["remedy"]
            shown = header.partition(" ")[2]
            assert not shown or shown.encode() not in text, (kind, route)
    assert (await stage.kv.get_session(SESSION)).version == 1


async def test_a_token_without_the_scope_gets_nothing(stage):
    headers = {
        scope: f"Bearer {stage.token('acme', [each for each in SCOPES if each not in {scope, 'admin'}])}" for scope in SCOPES
    }
    refused = set()
    for method, path, route in ROUTES:
        scope = need_of(route.handler)
        if scope != "open":
            header = headers[scope]
            target, body = asked_of(method, path, route, stage.values)
            status, _, text = await stage.ask(method, target, header, body)
            assert status == 403, (method, path, status)
            assert method == "HEAD" or scope in json.loads(text)["remedy"]
            assert not any(secret in text for secret in SECRETS), path
            refused.add(scope)
    assert refused == set(SCOPES)
    assert (await stage.kv.get_session(SESSION)).version == 1


CHANGING = re.compile(rb'"(?:uptime_s|elapsed_ms|eta_ms|restore_id|branch|updated|expires|family)":[^,}]*|restore \'\w+\'')


def same(text, names):
    """A body, without what differs from one request to the next, and with `names` for what was asked for."""
    for there, nowhere in names.items():
        text = text.replace(there.encode(), nowhere.encode())
    return CHANGING.sub(b"", text)


@pytest.mark.parametrize("scopes", [["read", "write", "metrics"], ["admin"]], ids=["tenant", "operator"])
async def test_another_tenants_token_gets_what_there_would_be_if_there_were_no_acme(stage, scopes):
    header = f"Bearer {stage.token('rival', scopes)}"
    operator = {"collect", "stats", "metrics"} if scopes == ["admin"] else {"metrics"}  # of the whole node, which is their purpose
    # What nobody has is asked for first: these requests create nothing that the others would meet.
    nowhere = dict(stage.values)
    for name, value in nowhere.items():
        text = json.dumps(value)
        for there, other in NOWHERE.items():
            text = text.replace(there, other)
        nowhere[name] = json.loads(text)
    nowhere["restore_id"] = "0" * len(stage.values["restore_id"])
    nowhere["fields"] = {**VALUES["fields"], "tenant": "nobody"}
    expected = await stage.all(header, values=nowhere, without=operator)
    found = await stage.all(header, without=operator)
    names = {**NOWHERE, stage.values["restore_id"]: nowhere["restore_id"]}
    ok = set()
    for (route, need, status, text), (_, _, there, nothing) in zip(found, expected, strict=True):
        assert not any(secret in text for secret in SECRETS), (route, text)
        if need == "open":
            continue
        if route.startswith("PUT /v1/namespaces/"):  # the fields name their tenant: that is refused, whosever they are
            assert (status, there) == (400, 400)
            continue
        if route.endswith("/v1/stats"):  # they count `rival`'s own requests, these included
            assert b"acme" not in text
            assert NS.id.encode() not in text
        else:
            assert same(text, names) == same(nothing, names), route
        assert status == there, route
        assert status in {200, 202, 403, 404}, (route, status)
        if status < 300:
            ok.add(route.split("{")[0])
    # These answer, of `rival` alone, and of nothing that is `acme`'s: what a restore finds is said in its status.
    lists = {"GET /v1/sessions", "HEAD /v1/sessions", "GET /v1/namespaces", "HEAD /v1/namespaces", "POST /v1/sessions/"}
    assert ok <= lists | {"GET /v1/stats", "HEAD /v1/stats"}, ok
    assert json.loads(next(text for route, _, _, text in found if route == "GET /v1/sessions")) == {"sessions": [], "cursor": ""}
    # And nothing of `acme` has changed.
    assert (await stage.kv.get_session(SESSION)).version == 1
    assert (await stage.kv.get_session(HIDDEN)).blocks == 2
    with await stage.kv.get(NS, SHARD, LINKS) as blocks:
        assert len(blocks) == 2


async def test_what_a_restore_of_anothers_session_comes_to(stage):
    header = f"Bearer {stage.token('rival', ['read', 'write'])}"
    _, _, text = await stage.ask("POST", f"/v1/sessions/{SESSION}/restore", header, {})
    begun = json.loads(text)["restore_id"]
    _, _, text = await stage.ask("GET", f"/v1/restores/{begun}?wait_ms=5000", header)
    status = json.loads(text)
    assert (status["state"], status["kind"], status["tokens"], status["staged_bytes"]) == ("failed", "not_found", None, 0)
    assert (await stage.ask("GET", f"/v1/restores/{begun}/events", header))[0] == 200
    # The other way round: `acme` has no way to see `rival`'s.
    acme = f"Bearer {stage.token('acme', SCOPES)}"
    for method, path in (
        ("GET", f"/v1/restores/{begun}"),
        ("GET", f"/v1/restores/{begun}/events"),
        ("DELETE", f"/v1/restores/{begun}"),
    ):
        assert (await stage.ask(method, path, acme))[0] == 404


async def test_what_is_of_the_whole_node_is_told_to_admin_alone(stage):
    await stage.kv.collect()
    read, admin = (f"Bearer {stage.token('rival', scopes)}" for scopes in (["read"], ["admin"]))
    _, _, text = await stage.ask("GET", "/v1/stats", read)
    mine = msgspec.json.decode(text, type=api.Stats)
    assert not mine.whole
    assert (mine.store, mine.reads, mine.commits, mine.store_requests, mine.restored) == ("", {}, {}, {}, {})
    assert list(mine.tiers) == ["dram"]
    assert b"acme" not in text
    assert NS.id.encode() not in text
    _, _, text = await stage.ask("GET", "/v1/stats", admin)
    whole = msgspec.json.decode(text, type=api.Stats)
    assert whole.whole
    assert whole.store.startswith("memory://")
    assert whole.commits
    _, _, text = await stage.ask("POST", "/v1/collect", admin, {"dry_run": True})
    assert {usage["tenant"] for usage in json.loads(text)["usage"]} == {"acme"}
    # Reasons quote errors, and errors name keys.
    stage.node.service._health.ask("bucket", lambda: f"GET heads/acme/{HIDDEN} failed")
    for header, told in (("", False), (read, False), (admin, True)):
        _, _, text = await stage.ask("GET", "/readyz", header)
        assert list(json.loads(text)["degraded"]) == ["bucket"]
        assert (HIDDEN.encode() in text) == told
    # Metrics are the operator's, by a scope of their own, and never name a session.
    assert (await stage.ask("GET", "/metrics", read))[0] == 403
    status, _, text = await stage.ask("GET", "/metrics", f"Bearer {stage.token('rival', ['metrics'])}")
    assert status == 200
    assert not any(secret in text for secret in (*SECRETS, SESSION.encode()))


async def test_a_tenant_drops_itself_with_admin_and_nobody_else(stage):
    admin, writes = (f"Bearer {stage.token('acme', scopes)}" for scopes in (["admin"], ["read", "write"]))
    rival = f"Bearer {stage.token('rival', ['admin'])}"
    assert (await stage.ask("DELETE", "/v1/tenants/acme", rival))[0] == 403
    assert (await stage.ask("DELETE", "/v1/tenants/acme", writes))[0] == 403
    assert (await stage.kv.get_session(HIDDEN)).version == 1
    status, _, text = await stage.ask("DELETE", "/v1/tenants/acme", admin)
    assert (status, json.loads(text)["sessions"]) == (200, 2)


async def test_a_token_of_a_tenant_that_is_not_served_gets_nothing(stage):
    header = f"Bearer {stage.token('stranger', SCOPES)}"
    for route, need, status, text in await stage.all(header):
        assert need == "open" or status in {403, 404}, (route, status, text)
        assert not any(secret in text for secret in SECRETS)


async def test_tokens_are_taken_and_revoked_while_the_node_runs(stage):
    async def status(text):
        return (await stage.ask("GET", "/v1/sessions", f"Bearer {text}"))[0]

    old = stage.token("acme", ["read"])
    assert await status(old) == 200
    stage.known.clear()
    new = stage.token("acme", ["read"])
    async with asyncio.timeout(20):
        while (await status(new), await status(old)) != (200, 401):  # noqa: ASYNC110  it looks at the file now and then
            await asyncio.sleep(0.1)
    stage._file.write_text("[tokens")  # in the middle of somebody's edit
    await asyncio.sleep(1.1)
    assert await status(new) == 200
    assert await status(old) == 401


async def test_the_socket_gives_others_than_the_nodes_own_user_no_admin(stage, monkeypatch):
    monkeypatch.setattr("kvstore.server.local.os.geteuid", lambda: os.getuid() + 1)
    async with kvstore.open(f"kvtier+unix://{stage.socket}?tenant=rival") as kv:
        for call in api.CALLS:
            if call.scope == "admin":
                request = api.OfTenant(tenant="rival") if call.name == "delete_tenant" else call.request()
                with pytest.raises(Denied, match="admin"):
                    await kv._transport.call(call.name, request)
        assert not (await kv.stats()).whole
        for call in api.CALLS:
            if issubclass(call.request, api.OfSession) and call.name not in {"restore", "hint"}:
                fields = {name: stage.values[name] for name in needed_of(call)}
                request = msgspec.convert({"namespace": NS.id, **fields}, call.request)
                with pytest.raises(KVTierError) as caught:
                    await kv._transport.call(call.name, request)
                assert caught.value.kind == "not_found", call.name
        with pytest.raises(KVTierError) as caught:
            await kv.get(NS, SHARD, LINKS)
        assert caught.value.kind in {"not_found", "invalid"}  # `invalid`: the client says whose namespace it is first
