"""Tenants of one gateway, whose engines know no tenants: every route with wrong credentials, and what an engine is sent."""

import inspect
import json
import re
import ssl
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest

from kvstore.access import SCOPES, Tokens, new_token
from kvstore.clock import RandomIds
from kvstore.config import AuthSettings, TlsSettings
from kvstore.connectors.session_names import OTHER_HEADERS, PARENT_HEADERS
from kvstore.errors import Invalid
from kvstore.gateway.app import Gateway, _Face
from kvstore.gateway.engines import EngineSettings
from kvstore.gateway.proxy import Proxy
from kvstore.gateway.settings import GatewaySettings
from kvstore.gateway.tenancy import salted, session_name
from kvstore.server.auth import need_of
from tests.integration.gateway_fleet import CHAT, open_fleet


class Tenants:
    """A fleet behind tokens."""

    def __init__(self, fleet, file):
        self.fleet, self.file, self._known = fleet, file, {}

    def bearer(self, tenant, scopes=("read", "write"), expires=None):
        text, token_id, made = new_token(RandomIds(), tenant, scopes, expires)
        self._known[token_id] = made
        self.file.write_text(Tokens(self._known).text())
        return f"Bearer {text}"

    async def ask(self, method, path, header, **how):
        headers = {**({"Authorization": header} if header else {}), **how.pop("headers", {})}
        async with self.fleet.client.request(method, self.fleet.gateway.url + path, headers=headers, **how) as answer:
            return answer.status, await answer.read()

    async def seen(self, header, body, *, headers=None):
        """What an engine was sent: fields and headers."""
        status, text = await self.ask("POST", CHAT, header, data=body, headers=headers or {})
        assert status == 200, text
        (_, sent, got), *_ = [engine.seen.pop() for engine in self.fleet.engines.values() if engine.seen]
        return json.loads(sent), {name.lower(): value for name, value in got.items()}, sent


@asynccontextmanager
async def tenants(tmp_path, **more):
    file = tmp_path / "tokens.toml"
    file.write_text(Tokens({}).text())
    async with open_fleet(gateway={"auth": AuthSettings(tokens_file=str(file)), **more.pop("gateway", {})}, **more) as fleet:
        yield Tenants(fleet, file)


@pytest.fixture
async def stage(tmp_path):
    async with tenants(tmp_path, names="a") as stage:
        yield stage


def routes():
    face = _Face(*(Mock(handle=Proxy.handle) for _ in inspect.signature(_Face).parameters))
    app = face.application(*(Mock() for _ in inspect.signature(face.application).parameters))
    return [(route.method, route.resource.canonical, route) for route in app.router.routes()]


ROUTES = routes()
BODIES = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"model": "m", "prompt": "hello"},
    "/v1/route": {"token_ids": [1, 2, 3]},
}


def asked_of(method, path):
    filled = path.replace("{name}", "a")
    filled = re.sub(r"\{what:[^}]*\}", "drain", filled).replace("{what}", "drain")
    return filled, {"json": BODIES.get(path, {})} if method == "POST" else {}


def test_every_route_says_what_it_needs():
    assert [path for _, path, route in ROUTES if need_of(route.handler) is None] == []
    opened = {path for _, path, route in ROUTES if need_of(route.handler) == "open" and not path.startswith("/console/")}
    assert opened == {"/", "/healthz", "/readyz"}
    needs = {path: need_of(route.handler) for _, path, route in ROUTES}
    assert needs[CHAT] == "write"
    assert {path for path, need in needs.items() if need == "admin"} >= {"/v1/engines", "/v1/decisions"}
    assert len(ROUTES) >= 10


async def test_whoever_shows_no_valid_token_reaches_no_engine(stage):
    good = stage.bearer("acme", SCOPES)
    expired = stage.bearer("acme", SCOPES, datetime.now(UTC) - timedelta(seconds=1))
    wrong = good[:-1] + ("0" if good[-1] != "0" else "1")
    for header in ("", "Bearer kvt_x", f"Basic {good}", wrong, expired):
        for method, path, route in ROUTES:
            target, how = asked_of(method, path)
            status, text = await stage.ask(method, target, header, **how)
            opened = need_of(route.handler) == "open" and not header
            assert status == (200 if opened else 401), (header, method, path, status, text)
            assert stage.fleet.engines["a"].url.encode() not in text
            assert not header or header.partition(" ")[2].encode() not in text
    assert stage.fleet.engines["a"].seen == []
    # And nobody was drained.
    assert not json.loads((await stage.ask("GET", "/v1/engines", good))[1])[0]["draining"]


async def test_an_emptied_file_of_tokens_changes_nothing_and_is_seen(stage):
    header = stage.bearer("acme", SCOPES)
    assert (await stage.ask("GET", "/v1/models", header))[0] == 200
    stage.file.write_text("")
    assert (await stage.ask("GET", "/v1/models", f"Bearer kvt_{'0' * 16}_{'0' * 64}"))[0] == 401
    assert (await stage.ask("GET", "/v1/models", header))[0] == 200
    assert b'kvtier_gateway_degraded{part="access"} 1.0' in (await stage.ask("GET", "/metrics", header))[1]


async def test_a_token_without_the_scope_reaches_no_engine(stage):
    headers = {scope: stage.bearer("acme", [each for each in SCOPES if each not in {scope, "admin"}]) for scope in SCOPES}
    refused = set()
    for method, path, route in ROUTES:
        scope = need_of(route.handler)
        if scope != "open":
            target, how = asked_of(method, path)
            status, text = await stage.ask(method, target, headers[scope], **how)
            assert (status, stage.fleet.engines["a"].url.encode() in text) == (403, False), (method, path, text)
            refused.add(scope)
    assert refused == set(SCOPES)
    assert stage.fleet.engines["a"].seen == []
    status, text = await stage.ask("POST", "/v1/route", headers["admin"], json={"prefix_ids": ["ab" * 32], "tokens": 256})
    assert status == 403, text  # blocks by name may be anybody's


async def test_where_engines_are_is_told_to_operators_alone(stage):
    told = {}
    for scope in ("read", "admin"):
        status, text = await stage.ask("POST", "/v1/route", stage.bearer("acme", [scope]), json=BODIES["/v1/route"])
        assert status == 200
        told[scope] = [(each["engine"], each["url"]) for each in json.loads(text)["candidates"]]
    assert told == {"read": [("a", "")], "admin": [("a", stage.fleet.engines["a"].url)]}


async def test_the_same_request_of_two_tenants_shares_nothing_at_an_engine(stage):
    acme, rival = stage.bearer("acme"), stage.bearer("rival")
    for body in (
        b'{"model": "m", "messages": []}',
        b'{"model": "m", "messages": [], "cache_salt": "s"}',
        b'{"model": "m", "messages": [], "cache_salt": 5}',
        b'{"model": "m", "messages": [], "cache_salt": "%s"}' % salted("acme", "").encode(),
        b'{"cache_salt": "s", "model": "m", "messages": [], "cache_salt": "%s"}' % salted("acme", "s").encode(),
        b'{"model": "m", "messages": [], "cache_salt": "' + b"s" * 70_000 + b'"}',
        b' {"model": "m", "messages": [], "cache_s\\u0061lt": "s"} ',
        b"{ }",
    ):
        one, headers, sent = await stage.seen(acme, body)
        other, _, _ = await stage.seen(rival, body)
        again, _, _ = await stage.seen(acme, body)
        assert one["cache_salt"] == again["cache_salt"] != other["cache_salt"]
        assert len(one["cache_salt"]) == 64
        assert other["cache_salt"] not in {salted("acme", ""), salted("acme", "s")}
        # Readers that take the first of a name would be told another: there is none that stays before it as it was said last.
        assert msgspec.json.decode(sent)["cache_salt"] == one["cache_salt"]
        assert "authorization" not in headers
    assert salted("a", "bc") != salted("ab", "c")


SAID = [
    ({"session_id": "chat"}, {}),
    ({"vllm_xargs": {"session_id": "chat", "top": 1}}, {}),
    ({"vllm_xargs": {"X-SESSION-ID": "chat"}}, {}),
    ({"kv_transfer_params": {"Session_Id": "chat", "other": 2}}, {}),
    ({"kv_transfer_params": None, "vllm_xargs": None}, {"X-Session-ID": "chat"}),
    *[({}, {name: "chat"}) for name in OTHER_HEADERS],
    ({}, {"X-Mine": "chat"}),
]


@pytest.mark.parametrize(("fields", "headers"), SAID, ids=str)
async def test_a_session_is_the_tenants_wherever_its_id_stands(tmp_path, fields, headers):
    async with tenants(tmp_path, names="a", gateway={"header": "X-Mine"}) as stage:
        body = json.dumps({"model": "m", "messages": [], **fields}).encode()
        for tenant in ("acme", "a/b"):
            sent, got, _ = await stage.seen(stage.bearer(tenant), body, headers={**headers, PARENT_HEADERS[0]: "root"})
            name = session_name(tenant, "chat")
            assert sent["vllm_xargs"] == {
                **{key: value for key, value in (fields.get("vllm_xargs") or {}).items() if key == "top"},
                "session_id": name,
                "parent_session_id": session_name(tenant, "root"),
            }
            assert got["x-session-id"] == name
            # Wherever an engine may look, it finds this one or none.
            places = [sent, sent.get("kv_transfer_params") or {}, got]
            names = {"session_id", "x-session-id", "session-id", "x-claude-code-session-id", "x-mine"}
            said = {value for place in places for key, value in place.items() if key.lower() in names}
            assert said == {name}
            assert (sent.get("kv_transfer_params") or {}).get("other") == (fields.get("kv_transfer_params") or {}).get("other")
    assert session_name("a", "b/c") != session_name("a/b", "c")


@pytest.mark.parametrize("place", ["vllm_xargs", "kv_transfer_params"])
@pytest.mark.parametrize("value", [[1], "text", {"session_id": "chat", "pad": "x" * 70_000}], ids=["list", "text", "large"])
async def test_an_id_cannot_be_hidden_from_the_gateway(stage, place, value):
    status, text = await stage.ask("POST", CHAT, stage.bearer("acme"), json={"model": "m", "messages": [], place: value})
    assert (status, place.encode() in text) == (400, True)
    assert stage.fleet.engines["a"].seen == []


@pytest.mark.parametrize("text", ["a\r\nX-Session-ID: acme/b", "a\nb", "a\0b"])
@pytest.mark.parametrize("field", ["session_id", "parent_session_id"])
async def test_an_id_that_no_header_can_carry_is_refused(stage, field, text):
    for fields in ({field: text}, {"vllm_xargs": {field: text}}, {"kv_transfer_params": {field: text}}):
        status, said = await stage.ask("POST", CHAT, stage.bearer("acme"), json={"model": "m", "messages": [], **fields})
        assert (status, field.encode() in said) == (400, True)
    assert stage.fleet.engines["a"].seen == []


async def test_an_engines_own_key_is_the_gateways_to_show(tmp_path):
    key = tmp_path / "key"
    key.write_text("sk-engine\n")
    async with tenants(tmp_path, names="a", engine={"key_file": str(key)}) as stage:
        _, got, _ = await stage.seen(stage.bearer("acme"), b'{"model": "m", "messages": []}')
        assert got["authorization"] == "Bearer sk-engine"
    async with open_fleet(names="a") as fleet:  # without tokens it stays the client's
        await fleet.ask(headers={"Authorization": "Bearer mine"})
        assert fleet.engines["a"].seen[0][2]["Authorization"] == "Bearer mine"
        assert b"cache_salt" not in fleet.engines["a"].seen[0][1]


async def test_which_engines_there_are_is_for_admin(stage):
    stage.fleet.engines["a"].well = False
    await stage.fleet.gateway.routing._engines.look()
    await stage.fleet.gateway.routing._engines.look()
    url = stage.fleet.engines["a"].url.encode()
    for header, told in (("", False), (stage.bearer("acme"), False), (stage.bearer("ops", ["admin"]), True)):
        status, text = await stage.ask("GET", "/readyz", header)
        assert (status, b"a is down" in text, url in text) == (503, told, False)


@pytest.mark.parametrize("fault", ["down", "503", "refuse", "huge head"])
async def test_no_failure_tells_a_tenant_where_engines_are(stage, fault):
    engine, header = stage.fleet.engines["a"], stage.bearer("acme")
    engine.fault, engine.well = fault, fault != "down"
    for _ in range(2 * (fault == "down")):
        await stage.fleet.gateway.routing._engines.look()
    for method, path in (("POST", CHAT), ("GET", "/v1/models")):
        status, text = await stage.ask(method, path, header, **({"json": BODIES[path]} if path in BODIES else {}))
        assert status == 503
        assert re.search(rb'"detail":"[^"]*\ba\b', text)
        assert engine.url.partition("//")[2].encode() not in text


async def test_a_gateway_is_reached_by_tls_and_from_elsewhere_by_nothing_else(tmp_path):
    certificates = pytest.importorskip("fakes.certificates", reason="the package cryptography is not installed")
    authority = certificates.Authority(tmp_path)
    cert, key = map(str, authority.issue("gateway", "127.0.0.1"))
    trusted = ssl.create_default_context(cafile=authority.ca)
    async with tenants(tmp_path, names="a", gateway={"tls": TlsSettings(cert=cert, key=key)}) as stage:
        assert stage.fleet.gateway.url.startswith("https://")
        assert (await stage.ask("GET", "/readyz", "", ssl=trusted))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await stage.ask("GET", "/readyz", "")
        with pytest.raises(aiohttp.ClientError):
            await stage.fleet.client.get(stage.fleet.gateway.url.replace("https", "http") + "/readyz")
    table = {"a": EngineSettings(url="http://127.0.0.1:1")}
    for auth, says in ((AuthSettings(), "loopback"), (AuthSettings(anonymous=True), "TLS")):
        with pytest.raises(Invalid, match=says):
            async with Gateway.open(GatewaySettings(engines=table, listen="0.0.0.0:0", auth=auth)):
                pass
