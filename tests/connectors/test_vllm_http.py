"""The middleware for vLLM's server: what a request's headers say of its session is in its body then, and nothing else changes."""

import asyncio
import json
import logging
import subprocess
import sys

import pytest

from kvstore.connectors import session_names, vllm_http
from kvstore.connectors.vllm_http import SessionHeaders

PATH = "/v1/chat/completions"
CLAUDE, PLAIN, PARENT = "X-Claude-Code-Session-Id", "session-id", "X-Parent-Session-ID"


class App:
    """Reads the whole body, as vLLM does, and answers in three pieces."""

    def __init__(self):
        self.body, self.scope, self.received = None, None, []

    async def __call__(self, scope, receive, send):
        self.scope, more = scope, scope["type"] == "http"
        while more:
            self.received.append(message := await receive())
            if message["type"] != "http.request":
                return
            more = message.get("more_body", False)
        self.body = b"".join(message["body"] for message in self.received)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"data: a\n\n", b"data: b\n\n", b""):
            await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})


def chunks_of(*bodies):
    last = len(bodies) - 1
    return [{"type": "http.request", "body": body, "more_body": index < last} for index, body in enumerate(bodies)]


class Asked:
    """One request through the middleware: what the application got, and what the client did."""

    def __init__(self, messages, headers=None, *, path=PATH, method="POST", kind="http", app=None, middleware=None):
        self.app = app or App()
        self.middleware = middleware or SessionHeaders(self.app)
        self.scope = {
            "type": kind,
            "method": method,
            "path": path,
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
        }
        self.sent, left = [], list(messages)

        async def receive():
            await asyncio.sleep(0)
            return left.pop(0) if left else {"type": "http.disconnect"}

        async def send(message):
            self.sent.append(message)

        asyncio.run(self.middleware(self.scope, receive, send))
        self.left = left

    @property
    def xargs(self):
        return json.loads(self.app.body).get("vllm_xargs")


def asked(body, headers=None, **more):
    return Asked(chunks_of(body if isinstance(body, bytes) else json.dumps(body).encode()), headers, **more)


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/responses", "/v1/messages", "/behind/a/root/v1/messages"])
def test_a_header_that_vllm_does_not_read_is_in_the_body_and_the_rest_is_as_it_was(path):
    body = b'{ "messages":[{"content":"caf\xc3\xa9"}],\n"n": 1.0, "big": 1e999, "x": NaN }'
    said = asked(body, {CLAUDE: "s", "Content-Length": str(len(body)), "Authorization": "Bearer x"}, path=path)
    assert said.xargs == {"session_id": "s"}
    assert said.app.body.startswith(body[:-1])
    assert said.app.scope["headers"] == [
        (b"x-claude-code-session-id", b"s"),
        (b"authorization", b"Bearer x"),
    ]  # the length is another
    assert said.scope["headers"][1][0] == b"content-length"  # of the caller's own scope nothing was taken
    assert said.middleware.counts == {"marked": 1}


def test_an_empty_object_has_room_too():
    assert json.loads(asked(b" {}\n", {CLAUDE: "s"}).app.body) == {"vllm_xargs": {"session_id": "s"}}


@pytest.mark.parametrize(
    ("headers", "body", "added"),
    [
        ({CLAUDE: "a", PLAIN: "b"}, {}, {"session_id": "a"}),
        ({PLAIN: "b", "X-Own": "c"}, {}, {"session_id": "b"}),
        ({"X-Own": "c"}, {}, {"session_id": "c"}),
        ({PLAIN: "", "X-Own": "c"}, {}, {"session_id": "c"}),
        ({CLAUDE: "a"}, {"session_id": None, "vllm_xargs": None, "kv_transfer_params": None}, {"session_id": "a"}),
        ({CLAUDE: "a"}, {"session_id": 7}, {"session_id": "a"}),
        ({CLAUDE: "a"}, {"session_id": "body"}, None),
        ({CLAUDE: "a"}, {"vllm_xargs": {"session_id": "body"}}, None),
        ({CLAUDE: "a"}, {"vllm_xargs": {"Session-Id": "body"}}, None),
        ({CLAUDE: "a"}, {"kv_transfer_params": {"session_id": "body"}}, None),
        ({CLAUDE: "a", "X-Session-ID": "vllm's"}, {}, None),
        ({CLAUDE: "a", "X-Session-ID": ""}, {}, {"session_id": "a"}),
        ({PARENT: "p", CLAUDE: "a"}, {}, {"session_id": "a", "parent_session_id": "p"}),
        ({PARENT: "p", "X-Session-ID": "vllm's"}, {}, {"parent_session_id": "p"}),
        ({PARENT: "p", CLAUDE: "a"}, {"session_id": "body"}, {"parent_session_id": "p"}),
        ({"x-claude-code-parent-session-id": "p"}, {"session_id": "body"}, {"parent_session_id": "p"}),
        ({PARENT: "p"}, {"kv_transfer_params": {"parent_session_id": "body"}}, None),
        ({CLAUDE: "a"}, {"vllm_xargs": {"mine": [1, "x"]}}, {"mine": [1, "x"], "session_id": "a"}),
        ({}, {}, None),
    ],
)
def test_the_first_name_that_has_an_id_counts(headers, body, added, monkeypatch):
    monkeypatch.setenv("KVTIER_SESSION_HEADER", "X-Own")
    body = {"messages": [], **body}
    said = asked(body, headers)
    if added is None:
        assert said.app.body == json.dumps(body).encode()
        assert not said.middleware.counts["marked"]
    else:
        assert json.loads(said.app.body) == {**body, "vllm_xargs": added}


def test_the_order_is_the_connectors():
    """vLLM's own three, then what this adds: `session_of` has them in one list."""
    assert (session_names.FIELD, session_names.HEADER, *vllm_http.OTHER_HEADERS) == session_names.SESSION
    assert SessionHeaders(None)._headers == session_names.SESSION[2:]


def test_of_a_header_that_is_there_twice_the_first_counts():
    said = Asked([], {})
    said.scope["headers"] = [(b"session-id", b"first"), (b"session-id", b"second")]
    assert said.middleware._ids(said.scope) == {"session_id": "first"}


def test_a_body_in_chunks():
    body = json.dumps({"messages": ["x" * 1000]}).encode()
    pieces = [body[start : start + 100] for start in range(0, len(body), 100)]
    said = Asked(chunks_of(*pieces, b""), {CLAUDE: "s"})
    assert said.xargs == {"session_id": "s"}
    assert len(said.app.received) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"\xff{}",
        b"\xef\xbb\xbf{}",
        b"{}".decode().encode("utf-16"),
        b'{"vllm_xargs": "text"}',
        b"[" * 200_000,
    ],
    ids=["nothing", "cut", "a list", "text", "no text", "a mark before it", "utf-16", "other xargs", "deep"],
)
def test_what_is_no_json_object_goes_on_as_it_is_and_is_said_once(body, caplog):
    app = App()
    middleware = SessionHeaders(app)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            app.received.clear()
            assert asked(body, {CLAUDE: "s"}, app=app, middleware=middleware).app.body == body
    assert middleware.counts == {"unread": 3}
    assert len(caplog.records) == 1


@pytest.mark.parametrize("piece", [1, 50, 1000])
def test_what_is_too_large_goes_on_as_it_is_and_is_held_no_further(piece, monkeypatch, caplog):
    for module in (session_names, vllm_http):
        monkeypatch.setattr(module, "MOST_BODY", 100)
    body = json.dumps({"messages": ["x" * 800]}).encode()
    said = Asked(chunks_of(*(body[start : start + piece] for start in range(0, len(body), piece))), {CLAUDE: "s"})
    assert said.app.body == body
    assert said.middleware.counts == {"too_large": 1}
    assert "too_large" in caplog.text
    assert len(said.app.received[0]["body"]) <= 100 + piece
    exact = json.dumps({"messages": "x" * 84}).encode()
    assert len(exact) == 100
    assert asked(exact, {CLAUDE: "s"}).xargs == {"session_id": "s"}


@pytest.mark.parametrize("how", [{"method": "GET"}, {"path": "/v1/embeddings"}, {"path": "/v1/messages/count_tokens"}])
def test_other_requests_are_not_touched(how):
    said = asked(b'{"input": 1}', {CLAUDE: "s", "Content-Length": "12"}, **how)
    assert said.app.body == b'{"input": 1}'
    assert said.app.scope is said.scope
    assert said.middleware.counts == {}


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_other_protocols_are_not_touched(kind):
    said = Asked([], {CLAUDE: "s"}, kind=kind)
    assert said.app.scope is said.scope


def test_answers_stream_through():
    said = asked({}, {CLAUDE: "s"})
    assert [message.get("body") for message in said.sent] == [None, b"data: a\n\n", b"data: b\n\n", b""]


def test_after_the_body_a_client_that_leaves_is_seen():
    class Waits(App):
        async def __call__(self, scope, receive, send):
            self.seen = [(await receive())["type"], (await receive())["type"]]

    assert asked({}, {CLAUDE: "s"}, app=Waits()).app.seen == ["http.request", "http.disconnect"]


def test_a_client_that_leaves_in_the_middle_leaves_no_half_of_a_body():
    said = Asked(chunks_of(b'{"a": ', b"1}")[:1], {CLAUDE: "s"})
    assert [message["type"] for message in said.app.received] == ["http.disconnect"]
    assert said.middleware.counts == {}


def test_a_body_is_not_read_for_who_refuses_the_request():
    class Refuses(App):
        async def __call__(self, scope, receive, send):
            await send({"type": "http.response.start", "status": 401, "headers": []})

    said = asked({"messages": []}, {CLAUDE: "s"}, app=Refuses())
    assert len(said.left) == 1
    assert said.sent[0]["status"] == 401


def test_the_module_itself_needs_nothing_that_is_not_in_python():
    code = (
        "import sys, types; sys.modules['kvstore'] = package = types.ModuleType('kvstore'); package.__path__ = ['kvstore']; "
        "import kvstore.connectors.vllm_http; print(set(sys.modules) & {'msgspec', 'numpy', 'blake3', 'httpx', 'starlette'})"
    )
    root = vllm_http.__file__.split("/kvstore/")[0]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert run.stdout.strip() == "set()"
