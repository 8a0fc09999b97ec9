"""A gateway among clients and engines that mean it no good: bodies, headers and silences, and what is held for whom."""

import asyncio
import gzip
import json
import socket
import sys
import time

import aiohttp
import msgspec
import pytest
import zmq
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore.errors import Invalid
from kvstore.gateway.app import Gateway
from kvstore.gateway.asked import COMPLETIONS, asked
from kvstore.gateway.choosing import SETTLING_S, Fresh
from kvstore.gateway.engines import EngineSettings
from kvstore.gateway.proxy import Bounds
from kvstore.gateway.settings import GatewaySettings, load
from kvstore.mesh.listening import Listener
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_fleet import CHAT, Fleet, open_fleet

TEXT = "".join(f"{number} bottles of beer on the wall, " for number in range(200))
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def fleet(request):
    async with open_fleet(**getattr(request, "param", {})) as fleet:
        yield fleet


async def until(what):
    async with asyncio.timeout(30):
        while not await what():  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.01)


async def idle(fleet):
    return not any(each["running"] for each in await fleet.states())


async def deaf(url):
    try:
        async with aiohttp.ClientSession() as late, late.get(f"{url}/healthz"):
            return False
    except aiohttp.ClientError:
        return True


async def outcomes(fleet):
    async with fleet.client.get(f"{fleet.gateway.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = [line.split('"') for line in lines if line.startswith("kvtier_gateway_requests_total{")]
    return {outcome: float(count[1:]) for _, outcome, count in found}


async def raw(fleet, request):
    """The first line of what is answered to bytes that no client library would send."""
    host, _, port = fleet.gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(30):
        line = await reader.readline()
    writer.close()
    return line.decode()


def seen(fleet):
    return [each for engine in fleet.engines.values() for each in engine.seen]


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"Content-Length: +2\r\n\r\n{}",
        b"Content-Length: 2\r\nX-Name : 1\r\n\r\n{}",
        b"Content-Length: 2\r\nX-Long: " + b"x" * 20_000 + b"\r\n\r\n{}",
        b"Content-Length: 2\r\nX-Session-ID: \xff\xfe\r\n\r\n{}",
        b'Content-Length: 24\r\n\r\n{"cache_salt": "\\ud800"}',
        b"Content-Length: 3\r\nContent-Encoding: gzip\r\n\r\n{ }",
    ],
)
async def test_what_is_not_plain_http_is_refused_and_goes_no_further(fleet, head):
    assert (await raw(fleet, b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: h\r\n" + head)).split()[1] == "400"
    assert not seen(fleet)


async def test_headers_between_a_client_and_the_gateway_end_there(fleet):
    own = {
        "Connection": "X-Hop, keep-alive",
        "X-Hop": "1",
        "Proxy-Authorization": "Basic x",
        "Accept-Encoding": "gzip, br",
        "Expect": "100-continue",
        "TE": "trailers",
    }
    await fleet.ask(headers={**own, "X-End": "2"})
    (_, _, got), *_ = seen(fleet)
    assert got["X-End"] == "2"
    assert {name.lower() for name in own} & {name.lower() for name in got} == {"accept-encoding"}
    assert got["Accept-Encoding"] == "identity"
    assert {name.lower() for name in got} <= {"host", "accept", "user-agent", "content-type", "content-length"} | {
        "x-end",
        "x-request-id",
        "accept-encoding",
    }


async def test_a_compressed_body_goes_on_as_what_it_says(fleet):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {**JSON, "Content-Encoding": "gzip"}
    async with fleet.client.post(fleet.gateway.url + CHAT, data=gzip.compress(body), headers=headers) as answer:
        assert answer.status == 200
    ((_, got, headers),) = seen(fleet)
    assert (got, "Content-Encoding" in headers) == (body, False)


def test_only_what_matters_of_a_body_becomes_objects():
    body = b'{"messages": [{}, {}], "other": [{}, {}], "stream": true, "vllm_xargs": {"a": "' + b"x" * (1 << 17) + b'"}}'
    found = asked(CHAT, body, CIMultiDictProxy(CIMultiDict({"X-Session-ID": "s"})))
    assert set(found.fields) == {"messages", "stream", "vllm_xargs"}
    assert {type(each) for each in found.fields.values()} == {msgspec.Raw}
    assert (found.stream, found.session, found.body) == (True, "s", body)  # what is that long stays as it is


def test_a_prompt_of_too_many_tokens_is_not_looked_into():
    fits, too_long = ({"prompt": [1] * count} for count in (1000, (16 << 20) // 2))
    found = [asked(COMPLETIONS, msgspec.json.encode(each), CIMultiDictProxy(CIMultiDict())) for each in (fits, too_long)]
    assert [each.tokens and len(each.tokens) for each in found] == [1000, None]


@pytest.mark.parametrize("fleet", [{"host": "localhost"}], indirect=True)  # a client keeps no cookies of an address anyway
async def test_one_clients_cookies_are_not_anothers(fleet):
    for engine in fleet.engines.values():
        engine.headers = {"Set-Cookie": "who=first; Path=/", "X-KVTier-Engine": "mallory", "X-KVTier-Route": "{}"}
    status, headers, _ = await fleet.ask()
    assert (status, headers["Set-Cookie"]) == (200, "who=first; Path=/")
    assert headers.getall("X-KVTier-Engine")[0] in {"a", "b"}
    assert len(headers.getall("X-KVTier-Engine")) == len(headers.getall("X-KVTier-Route")) == 1
    for turn in range(4):
        await fleet.ask(f"{TEXT} {turn}")
    assert not [1 for _, _, headers in seen(fleet) if "Cookie" in headers]


@pytest.mark.parametrize("fault", ["redirect", "huge head"])
async def test_an_engine_that_answers_what_none_should(fleet, fault):
    for engine in fleet.engines.values():
        engine.fault = fault
    status, _, _ = await fleet.ask()
    assert status == (307 if fault == "redirect" else 503)
    assert {path for path, _, _ in seen(fleet)} == {CHAT}


@pytest.mark.parametrize("fleet", [{"bounds": {"whole": 1000}}], indirect=True)
async def test_an_answer_without_an_end_is_cut(fleet):
    for engine in fleet.engines.values():
        engine.fault = "flood"
    status, _, body = await fleet.ask()
    assert (status, json.loads(body)["detail"][-25:]) == (503, "is longer than 1000 bytes")
    await until(lambda: idle(fleet))


@pytest.mark.parametrize("fleet", [{"bounds": {"client_s": 0.3}}], indirect=True)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_holds_no_engine(fleet, stream):
    for engine in fleet.engines.values():
        engine.fault = "flood"
    body = json.dumps({"model": "m", "stream": stream}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(fleet.gateway.url.rpartition(":")[2])))
        client.sendall(b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

        async def left():
            return (await outcomes(fleet)).get("left") == 1 and await idle(fleet)

        await until(left)


@pytest.mark.parametrize("fleet", [{"bounds": {"body_s": 0.2}}], indirect=True)
async def test_a_body_that_never_ends_is_not_waited_for(fleet):
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{"
    assert (await raw(fleet, head)).startswith("HTTP/1.1 408")


@pytest.mark.parametrize("fleet", [{"bounds": {"bodies": 1000}}], indirect=True)
async def test_bodies_are_held_up_to_a_sum(fleet):
    assert (await fleet.ask("x" * 500))[0] == 200
    assert (await fleet.ask("x" * 2000))[0] == 429
    chunks = (chunk async for chunk in pieces(b"{}"))
    async with fleet.client.post(fleet.gateway.url + CHAT, data=chunks, headers=JSON) as answer:
        assert answer.status == 429  # it does not say how long it is
    assert (await outcomes(fleet)) == {"ok": 1, "refused": 2}


async def pieces(*found):
    for piece in found:
        yield piece


async def test_a_body_that_is_too_long_is_refused(fleet):
    async with fleet.client.post(fleet.gateway.url + CHAT, data=b" " * ((64 << 20) + 1), headers=JSON) as answer:
        assert (answer.status, answer.content_type) == (413, "application/problem+json")


@pytest.mark.parametrize("fleet", [{"gateway": {"requests": 50}}], indirect=True)
async def test_two_thousand_at_once_are_answered_or_refused(fleet):
    for engine in fleet.engines.values():
        engine.release.clear()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        many = Fleet(fleet.engines, fleet.gateway, client)
        running = [asyncio.create_task(many.ask(f"prompt {each}")) for each in range(2000)]

        async def all_but_fifty():
            return sum(task.done() for task in running) == 1950

        await until(all_but_fifty)
        for engine in fleet.engines.values():
            engine.release.set()
        statuses = [(await task)[0] for task in running]
    assert (statuses.count(200), statuses.count(429)) == (50, 1950)
    assert (await outcomes(fleet)) == {"ok": 50, "refused": 1950}


@pytest.mark.parametrize(
    "tokens",
    [
        b'{"tokens": [-1, 2]}',
        b'{"tokens": [1.5]}',
        b'{"tokens": "no"}',
        b'{"tokens": [4294967296]}',
        b"[1, 2]",
        b"\xff",
        b"",
        b'{"tokens": []}',
        b'{"tokens": [' + b"1," * 3_000_000 + b"1]}",
    ],
)
async def test_tokens_that_are_none_are_no_reason_to_refuse(fleet, tokens):
    for engine in fleet.engines.values():
        engine.tokens = tokens
    status, headers, _ = await fleet.ask()
    assert (status, "X-KVTier-Route" in headers) == (200, False)


async def garbage(answer):
    """A server that says the same to everyone."""

    async def say(reader, writer):
        await reader.readline()
        writer.write(answer)
        await asyncio.sleep(0.05)
        writer.close()

    return await asyncio.start_server(say, "127.0.0.1", 0)


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\xff\xfe",
        b"HTTP/1.1 999999 what\r\n\r\n",
        b"HTTP/1.1 302 x\r\nLocation: http://[\r\n\r\n",
        b"HTTP/1.1 200 \xff\r\nContent-Length: -1\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    ],
)
async def test_what_is_no_engine_is_down_and_the_others_serve(answer):
    async with FakeEngine("a").running() as engine, await garbage(answer) as other:
        port = other.sockets[0].getsockname()[1]
        table = {"a": EngineSettings(url=engine.url), "b": EngineSettings(url=f"http://127.0.0.1:{port}")}
        settings = GatewaySettings(engines=table, listen="127.0.0.1:0")
        async with Gateway.open(settings) as gateway, aiohttp.ClientSession() as client:
            found = Fleet({"a": engine}, gateway, client)
            assert [await found.by(f"prompt {each}") for each in range(4)] == ["a"] * 4
            assert not [each for each in await found.states() if each["engine"] == "b" and each["up"]]


async def test_a_gateway_that_is_stopped_lets_streams_end():
    async with FakeEngine("a").running() as engine, aiohttp.ClientSession() as client:
        engine.between.clear()
        settings = GatewaySettings(engines={"a": EngineSettings(url=engine.url)}, listen="127.0.0.1:0")
        opening = Gateway.open(settings)
        gateway = await opening.__aenter__()
        answer = await client.post(gateway.url + CHAT, json={"model": "m", "messages": [], "stream": True})
        assert b"one" in await answer.content.readany()
        closing = asyncio.create_task(opening.__aexit__(None, None, None))

        await until(lambda: deaf(gateway.url))
        engine.between.set()
        assert (await answer.read()).endswith(b"[DONE]\n\n")
        await closing


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stream_that_outlasts_the_drain_is_told(stream):
    async with FakeEngine("a").running() as engine, aiohttp.ClientSession() as client:
        (engine.between if stream else engine.release).clear()
        bounds = Bounds(drain_s=0.3)
        async with Gateway.open(
            GatewaySettings(engines={"a": EngineSettings(url=engine.url)}, listen="127.0.0.1:0", bounds=bounds)
        ) as gateway:
            body = {"model": "m", "messages": [], "stream": stream}
            asking = asyncio.create_task(client.post(gateway.url + CHAT, json=body))

            async def begun():
                return bool(engine.seen)

            await until(begun)
            if stream:
                answer = await asking
                assert b"one" in await answer.content.readany()
        if not stream:
            answer = await asking
        said = await answer.read()
    if stream:
        assert json.loads(said.decode().strip().removeprefix("data: "))["error"]["type"] == "gateway_stopped"
    else:
        assert (answer.status, json.loads(said)["kind"]) == (503, "unavailable")


async def test_sigterm_lets_a_stream_end():
    async with FakeEngine("a").running() as engine, aiohttp.ClientSession() as client:
        engine.between.clear()
        code = "from kvstore.cli.main import main; main()"
        words = ("gateway", f"--engine=a={engine.url}", "--listen=127.0.0.1:0", "--format=json")
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *words, stdout=asyncio.subprocess.PIPE)
        try:
            url = json.loads(await process.stdout.readline())["url"]
            async with client.post(url + CHAT, json={"model": "m", "messages": [], "stream": True}) as answer:
                assert b"one" in await answer.content.readany()
                process.terminate()
                await until(lambda: deaf(url))
                engine.between.set()
                assert (await answer.read()).endswith(b"[DONE]\n\n")
            async with asyncio.timeout(30):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize("fleet", [{"bounds": {"first_s": 0.5}}], indirect=True)
async def test_an_engine_that_says_nothing_is_not_waited_for(fleet):
    first = await fleet.by(TEXT)
    fleet.engines[first].release.clear()
    assert await fleet.by(TEXT, stream=True) != first
    fleet.engines[first].release.set()


@pytest.mark.parametrize("fleet", [{"bounds": {"idle_s": 0.3}}], indirect=True)
async def test_a_stream_that_falls_silent_is_broken(fleet):
    for engine in fleet.engines.values():
        engine.between.clear()
    _, _, body = await fleet.ask(stream=True)
    assert b"engine_broke_off" in body
    assert b"[DONE]" not in body
    for engine in fleet.engines.values():
        engine.between.set()


class Slow:
    """A `Residency` that takes its time, so that batches always wait."""

    def apply(self, _):
        time.sleep(0.001)

    def forget(self):
        pass


async def test_a_flood_of_events_leaves_turns_to_others():
    context, turns, batches = zmq.Context(), 0, 500
    publisher = context.socket(zmq.PUB)
    publisher.setsockopt(zmq.SNDHWM, 0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    listener = Listener(f"tcp://127.0.0.1:{port}", "", Slow())
    listening, empty, sent = asyncio.create_task(listener.run()), msgspec.msgpack.encode([0.0, [], 0]), 0

    def send(number):
        publisher.send_multipart([b"", number.to_bytes(8, "big"), empty])

    async with asyncio.timeout(60):
        while not listener.heard.batches:  # until it has subscribed
            send(sent)
            sent += 1
            await asyncio.sleep(0.01)
        for number in range(sent, sent + batches):
            send(number)
        begun = listener.heard.batches
        while listener.heard.batches < begun + batches - 1:
            turns += 1
            await asyncio.sleep(0)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    context.destroy(linger=0)
    assert turns >= batches // 2


def test_what_is_fresh_is_forgotten_when_it_settled():
    now = [0.0]
    fresh = Fresh(lambda: now[0])
    one, two = {b"a", b"b"}, {b"b"}
    fresh.begin("n", one)
    fresh.begin("n", two)
    fresh.end("n", one)
    assert (set(fresh.of("n")), set(fresh.of("m"))) == ({b"a", b"b"}, set())
    now[0] += SETTLING_S + 1
    assert set(fresh.of("n")) == {b"b"}
    fresh.end("n", two)
    now[0] += SETTLING_S + 1
    assert not fresh.of("n")


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("[bounds]\ntries = 0", {}, "tries"),
        ("[bounds]\nidle_s = 0", {}, "idle_s"),
        ("[bounds]\nidle = 1", {}, "idle"),
        ("requests = 0", {}, "requests"),
        ("", {"engines": ["a=http://h,requests=²"]}, "requests"),
    ],
)
def test_bounds_that_bound_nothing_are_named(text, flags, says):
    with pytest.raises(Invalid, match=says):
        load(text, **flags)


@pytest.mark.parametrize("name", ["a b", "a\r\nX-Evil: 1", "é", "x" * 65, ""])
async def test_an_engines_name_fits_into_a_header(name):
    table = {name: EngineSettings(url="http://h")}
    with pytest.raises(Invalid, match="an engine's name is"):
        async with Gateway.open(GatewaySettings(engines=table, listen="127.0.0.1:0")):
            pass
