"""What a process says on stderr: requests with their ids, and never a token, a query or a header."""

import asyncio
import json
import logging

import pytest
from aiohttp import ClientSession, web

from kvstore.access import Access
from kvstore.clock import SeededIds
from kvstore.server.auth import ACCESS
from kvstore.server.logs import REQUEST_ID, LogFormat, log_to_stderr, logged, name_request
from kvstore.server.problems import problems

TOKEN = "kvt_0123456789abcdef_" + "5e" * 32


@pytest.fixture
def said(capsys):
    """Logging as a process of ours sets it up: `said(form)`, and `said()` for the lines since."""
    root, access = logging.getLogger(), logging.getLogger("kvstore.access")
    before = root.handlers, root.level, access.level

    def lines(form=None):
        if form:
            root.handlers = []  # else pytest's own would keep ours out
            log_to_stderr(logging.INFO, form)
            return None
        text = capsys.readouterr().err.splitlines()
        return [json.loads(line) for line in text] if text and text[0].startswith("{") else text

    yield lines
    root.handlers, root.level = before[:2]
    access.setLevel(before[2])


@pytest.fixture
async def url():
    """A face with one route of each kind."""

    @web.middleware
    async def somebody(request, handler):
        request[ACCESS] = Access("research", frozenset(), "0123456789abcdef")
        return await handler(request)

    async def show(request):
        logging.getLogger("kvstore.there").info("at work for %s", request.headers.get("Authorization", "nobody"))
        return web.Response(text="ok")

    async def fail(_):
        raise RuntimeError("a defect")

    app = web.Application(middlewares=[logged(SeededIds(1)), problems, somebody])
    app.on_response_prepare.append(name_request)
    app.add_routes(
        [web.get("/v1/sessions/{id}", show, name="show"), web.get("/fail", fail, name="fail"), web.get("/healthz", show)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def ask(url, **headers):
    async with ClientSession() as client, client.get(url, headers=headers) as answer:
        return answer.status, answer.headers[REQUEST_ID]


async def test_a_request_is_one_line_with_who_asked_for_what(said, url):
    said(LogFormat.json)
    assert await ask(f"{url}/v1/sessions/chat-42", **{REQUEST_ID: "caller-7"}) == (200, "caller-7")
    inside, line = said()
    assert inside["request_id"] == "caller-7"
    assert inside["logger"] == "kvstore.there"
    assert line.pop("duration_ms") > 0
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info", "logger": "kvstore.access", "message": "GET show 200", "request_id": "caller-7", "route": "show",
        "method": "GET", "status": 200, "session": "chat-42", "tenant": "research", "token": "0123456789abcdef",
    }  # fmt: skip


async def test_a_failure_is_a_line_too_and_its_trace_has_the_same_id(said, url):
    said(LogFormat.json)
    status, request_id = await ask(f"{url}/fail", **{"X-Session-ID": "s" * 999})
    defect, line = said()
    assert (status, line["status"], line["session"]) == (500, 500, "s" * 256)
    assert defect["request_id"] == line["request_id"] == request_id == SeededIds(1).new()
    assert "RuntimeError: a defect" in defect["exception"]


async def test_what_a_caller_sends_is_not_logged(said, url):
    said(LogFormat.json)
    await ask(f"{url}/v1/sessions/x?token=hunter2&secret={TOKEN}", Authorization=f"Bearer {TOKEN}", Cookie="hunter3")
    text = json.dumps(said())
    assert "5e5e" not in text
    assert "hunter" not in text
    assert "Bearer kvt_0123456789abcdef_***" in text  # which token it was may be known


@pytest.mark.parametrize("form", LogFormat)
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\nHost: h\nAuthorization: Bearer sk-hunter2\n\n{}",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n9;x\r\nhunter2hunter2\r\n0\r\n\r\n",
        b"hunter2 Bearer sk-hunter2\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_not_quoted(said, url, form, request_bytes):
    said(form)
    logging.getLogger("aiohttp.server").setLevel(logging.DEBUG)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request_bytes)
    assert b" 400 " in await reader.readline()
    writer.close()
    logging.getLogger("aiohttp.server").setLevel(logging.NOTSET)
    text = [line for line in map(str, said()) if "Error handling request from 127.0.0.1: it is no HTTP" in line]
    assert len(text) == 1
    assert "hunter" not in text[0]


@pytest.mark.parametrize("said_id", ["two words", 'a"b', "x" * 129, ""])
async def test_an_id_that_could_mean_something_else_is_replaced(said, url, said_id):
    said(LogFormat.json)
    assert (await ask(f"{url}/healthz", **{REQUEST_ID: said_id}))[1] == SeededIds(1).new()


async def test_health_checks_are_not_logged_and_in_text_no_request_is(said, url):
    said(LogFormat.json)
    await ask(f"{url}/healthz")
    assert [line["logger"] for line in said()] == ["kvstore.there"]
    said(LogFormat.text)
    await ask(f"{url}/v1/sessions/x", Authorization=TOKEN)
    [line] = said()
    assert line.endswith(" INFO kvstore.there: at work for kvt_0123456789abcdef_***")
