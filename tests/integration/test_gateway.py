"""A gateway before engines: what goes through, where it goes, and what a client sees when an engine fails."""

import asyncio
import json

import pytest

from kvstore.errors import AlreadyExists, Invalid
from kvstore.gateway.app import Gateway
from kvstore.gateway.engines import EngineSettings
from kvstore.gateway.proxy import Bounds
from kvstore.gateway.settings import GatewaySettings, load
from tests.integration.gateway_fleet import CHAT, open_fleet

TEXT = "".join(f"{number} bottles of beer on the wall, " for number in range(200))


@pytest.fixture
async def fleet(request):
    async with open_fleet(**getattr(request, "param", {})) as fleet:
        yield fleet


async def test_an_answer_comes_through_whole_and_in_pieces(fleet):
    status, headers, body = await fleet.ask()
    assert (status, json.loads(body)["usage"]) == (200, {"prompt_tokens": 3})
    assert json.loads(body)["by"] == headers["X-KVTier-Engine"]
    status, headers, body = await fleet.ask(stream=True)
    assert (status, headers["Content-Type"]) == (200, "text/event-stream")
    assert body == b'data: {"word": "one"}\n\ndata: {"word": "two"}\n\ndata: [DONE]\n\n'


async def test_what_an_engine_gets_is_what_was_sent(fleet):
    body = b'{"model":"m",  "messages":[{"role":"user","content":"\\u00e9"}]}'
    headers = {"Authorization": "Bearer key", "X-Custom": "1", "Content-Type": "application/json"}
    async with fleet.client.post(fleet.gateway.url + CHAT, data=body, headers=headers) as answer:
        seen = fleet.engines[answer.headers["X-KVTier-Engine"]].seen
    assert seen[0][:2] == (CHAT, body)
    assert {name: seen[0][2][name] for name in headers} == headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("said", "kept"), [({}, False), ({"X-Request-ID": "mine-7"}, True), ({"X-Request-ID": "no id"}, False)])
async def test_an_engine_is_told_what_the_gateway_calls_a_request(fleet, said, kept, stream):
    for engine in fleet.engines.values():
        engine.headers["X-Request-ID"] = "an engine's own"
    _, headers, _ = await fleet.ask(headers=said, stream=stream)
    ((_, _, got),) = fleet.engines[headers["X-KVTier-Engine"]].seen
    assert got["X-Request-ID"] == headers["X-Request-ID"]
    assert (got["X-Request-ID"] == said.get("X-Request-ID")) == kept


async def test_a_session_that_only_a_header_names_is_in_the_body_too(fleet):
    for headers in ({"X-Session-ID": "s-1"}, {"x-claude-code-session-id": "s-1", "X-Parent-Session-ID": "p"}):
        by = await fleet.by(headers=headers)
        said = json.loads(fleet.engines[by].seen[-1][1])["vllm_xargs"]
        assert said["session_id"] == "s-1"
        assert said.get("parent_session_id", "") == headers.get("X-Parent-Session-ID", "")
    by = await fleet.by(headers={"X-Session-ID": "s-1"}, session_id="mine")
    assert "vllm_xargs" not in json.loads(fleet.engines[by].seen[-1][1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["503", "refuse", "before"])
async def test_until_the_first_byte_another_engine_is_asked(fleet, fault, stream):
    first = await fleet.by(TEXT)
    other = ({"a", "b"} - {first}).pop()
    fleet.engines[first].fault = fault
    status, headers, body = await fleet.ask(TEXT, stream=stream)
    assert (status, headers["X-KVTier-Engine"]) == (200, other)
    assert body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body)["by"] == other
    fleet.engines[first].well = False
    assert len(fleet.engines[first].seen) == 2
    await fleet.ask(TEXT)
    assert len(fleet.engines[first].seen) == 2  # it is down until it says that it is well


async def test_an_answer_that_broke_off_says_so_and_is_not_repeated(fleet):
    for engine in fleet.engines.values():
        engine.fault = "middle"
    status, _, body = await fleet.ask(stream=True)
    first, error = [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: ")]
    assert (status, first) == (200, {"word": "one"})
    assert error["error"]["type"] == "engine_broke_off"
    assert b"[DONE]" not in body
    assert sum(len(engine.seen) for engine in fleet.engines.values()) == 1


async def test_no_engine_is_left(fleet):
    for engine in fleet.engines.values():
        engine.fault, engine.well = "refuse", False
    status, headers, body = await fleet.ask()
    problem = json.loads(body)
    assert (status, headers["Content-Type"], problem["kind"]) == (503, "application/problem+json", "unavailable")
    (last,) = [name for name in fleet.engines if f"the last one tried was {name}: " in problem["detail"]]
    words = f"{last}: closed the connection without an answer"
    assert problem["detail"] == f"no engine answered; the last one tried was {words}"
    assert "GET /v1/engines" in problem["remedy"]
    assert {len(engine.seen) for engine in fleet.engines.values()} == {1}
    status, headers, body = await fleet.ask()
    assert (status, headers["Retry-After"], "GET /v1/engines" in json.loads(body)["remedy"]) == (503, "1", True)
    assert json.loads(body)["detail"].count("is down") == 2
    for path, asked in (("/v1/route", {"token_ids": [1]}), ("/readyz", None)):
        async with fleet.client.request("POST" if asked else "GET", fleet.gateway.url + path, json=asked) as answer:
            assert answer.status == 503, path


async def test_of_one_prompt_no_more_than_two_engines_die():
    async with open_fleet(names="abcd", bounds={"tries": 4}) as fleet:
        for engine in fleet.engines.values():
            engine.fault = "refuse"
        assert (await fleet.ask())[0] == 503
        assert sum(len(engine.seen) for engine in fleet.engines.values()) == 2
    async with open_fleet(names="abcd", bounds={"tries": 4}) as fleet:
        for engine in fleet.engines.values():
            engine.fault = "503"
        assert (await fleet.ask())[0] == 503
        assert sum(len(engine.seen) for engine in fleet.engines.values()) == 4  # these did not


@pytest.mark.parametrize("fleet", [{"bounds": {"whole_s": 1.0, "first_s": 0.5}}], indirect=True)
async def test_an_answer_that_takes_too_long_is_not_asked_for_again(fleet):
    for engine in fleet.engines.values():
        engine.release.clear()
    status, _, body = await fleet.ask()
    assert (status, json.loads(body)["kind"]) == (504, "timeout")
    assert sum(len(engine.seen) for engine in fleet.engines.values()) == 1
    assert {each["up"] for each in await fleet.states()} == {True}  # it may well be at work


async def test_what_an_engine_refuses_is_the_clients_business(fleet):
    for engine in fleet.engines.values():
        engine.fault = "400"
    status, _, body = await fleet.ask()
    assert (status, json.loads(body)) == (400, {"error": {"message": "no such model"}})
    assert sum(len(engine.seen) for engine in fleet.engines.values()) == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"a":' * 3000])
async def test_a_body_that_is_no_object_is_refused(fleet, body):
    async with fleet.client.post(fleet.gateway.url + CHAT, data=body) as answer:
        assert answer.status == 400
        assert (await answer.json(content_type=None))["detail"].startswith("the body must be a JSON object: ")


async def test_a_prompt_goes_where_its_beginning_was_read(fleet):
    first = await fleet.by(TEXT)
    other = ({"a", "b"} - {first}).pop()
    assert [await fleet.by(TEXT + str(turn)) for turn in range(5)] == [first] * 5
    _, headers, _ = await fleet.ask(TEXT + "again")
    reasons = json.loads(headers["X-KVTier-Route"])
    assert reasons["split"] == len(TEXT) // 256 * 256 == reasons["tokens"]["dram"]
    assert all(value == round(value, 1) for value in reasons.values() if isinstance(value, float))
    assert reasons["compute_ms"] > 0
    fleet.engines[first].fault = "503"
    assert await fleet.by(TEXT + "more") == other


async def test_salts_keep_prompts_apart(fleet):
    def found(headers):
        return json.loads(headers["X-KVTier-Route"])["found"]

    assert [found((await fleet.ask(TEXT, cache_salt=salt))[1]) for salt in ("x", "x", "y")] == [0, len(TEXT) // 256 * 256, 0]


@pytest.mark.parametrize("fleet", [{"engine": {"requests": 1}}], indirect=True)
async def test_full_engines_get_no_more(fleet):
    for engine in fleet.engines.values():
        engine.release.clear()
    running = [asyncio.create_task(fleet.ask()) for _ in range(2)]
    async with asyncio.timeout(20):
        while sum(len(engine.seen) for engine in fleet.engines.values()) < 2:  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.01)
    status, headers, body = await fleet.ask()
    assert (status, json.loads(body)["kind"], headers["Retry-After"]) == (429, "overloaded", "1")
    for engine in fleet.engines.values():
        engine.release.set()
    assert [(await task)[0] for task in running] == [200, 200]


async def test_a_drained_engine_finishes_and_gets_no_more(fleet):
    async with fleet.client.post(f"{fleet.gateway.url}/v1/engines/a/drain") as answer:
        assert (await answer.json())["draining"] is True
    assert {await fleet.by(f"prompt {each}") for each in range(6)} == {"b"}
    async with (
        fleet.client.post(f"{fleet.gateway.url}/v1/engines/a/resume"),
        fleet.client.post(f"{fleet.gateway.url}/v1/engines/b/drain"),
    ):
        assert await fleet.by() == "a"
    async with fleet.client.post(f"{fleet.gateway.url}/v1/engines/c/drain") as answer:
        assert (answer.status, (await answer.json(content_type=None))["detail"]) == (404, "no engine 'c'; there are a, b")


async def test_a_client_that_leaves_takes_its_request_along(fleet):
    for engine in fleet.engines.values():
        engine.release.clear()
    task = asyncio.create_task(fleet.ask(stream=True))
    async with asyncio.timeout(20):
        while not any(engine.seen for engine in fleet.engines.values()):  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.01)
        task.cancel()
        while any(each["running"] for each in await fleet.states()):  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.01)


async def test_route_says_what_would_be_done_and_does_nothing(fleet):
    first = await fleet.by(TEXT)
    async with fleet.client.post(f"{fleet.gateway.url}/v1/route", json={"token_ids": list(TEXT.encode())}) as answer:
        found = (await answer.json())["candidates"]
    assert [each["engine"] for each in found] == [first, ({"a", "b"} - {first}).pop()]
    assert found[0]["predicted"]["ms"] < found[1]["predicted"]["ms"]
    assert found[1]["predicted"]["tokens"]["computed"] == len(TEXT)
    assert sum(len(engine.seen) for engine in fleet.engines.values()) == 1
    for wrong in ({}, {"token_ids": [1], "prefix_ids": []}, {"token_ids": [-1]}, {"prefix_ids": ["zz"]}, {"token_ids": "no"}):
        async with fleet.client.post(f"{fleet.gateway.url}/v1/route", json=wrong) as answer:
            assert (answer.status, (await answer.json(content_type=None)).get("kind")) == (400, "invalid"), wrong


async def test_models_health_and_metrics(fleet):
    await fleet.ask()
    async with fleet.client.get(f"{fleet.gateway.url}/v1/models") as answer:
        assert await answer.json() == {"data": [{"id": "m"}]}
        assert "Server" not in answer.headers
    async with fleet.client.get(f"{fleet.gateway.url}/readyz") as answer:
        assert answer.status == 200
    async with fleet.client.get(f"{fleet.gateway.url}/metrics") as answer:
        page = await answer.text()
    assert 'kvtier_gateway_requests_total{outcome="ok"} 1.0' in page
    assert 'kvtier_gateway_engine_up{engine="a"} 1.0' in page


async def test_an_address_in_use_is_said(fleet):
    taken = fleet.gateway.url.removeprefix("http://")
    with pytest.raises(AlreadyExists, match=taken):
        async with Gateway.open(GatewaySettings(engines={"a": EngineSettings(url="http://127.0.0.1:1")}, listen=taken)):
            pass


def test_settings_of_a_file_and_flags():
    text = """
    listen = "127.0.0.1:1"
    [engines.a]
    url = "http://h:1/v1"
    events = "tcp://h:2"
    [bounds]
    tries = 2
    """
    found = load(text, engines=["b=http://h:3,node=kvtier://h:4,ranks=2"], listen="127.0.0.1:5", model="")
    assert found == GatewaySettings(
        engines={
            "a": EngineSettings(url="http://h:1/v1", events="tcp://h:2"),
            "b": EngineSettings(url="http://h:3", node="kvtier://h:4", ranks=2),
        },
        listen="127.0.0.1:5",
        bounds=Bounds(tries=2),
    )


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("x", {}, "not valid TOML"),
        ("lissten = 1", {}, "lissten"),
        ("[engines.a]\nurl = 1", {}, "url"),
        ("", {"engines": ["a"]}, "--engine is 'a'"),
        ("", {"engines": ["a=http://h,node"]}, "--engine is"),
        ("", {"engines": ["a=http://h,nod=1"]}, "^--engine a: unknown part nod; known: url, node, ranks, events, replay, topic, "),
        ("", {"engines": ["a=http://h,ranks=x"]}, "^--engine a: .*ranks"),
        ("[engines.a]\nnod = 1", {}, "engines.a: unknown part nod; known: "),
        ("engines = 1", {}, "engines"),
        ("", {"listen": "0.0.0.0:1"}, "without access tokens"),
        ("", {"listen": "here"}, "listen is 'here'"),
    ],
)
def test_settings_that_do_not_fit_are_named(text, flags, says):
    with pytest.raises(Invalid, match=says):
        load(text, **flags)


@pytest.mark.parametrize("url", ["ftp://h", "http://user:pw@h", "h:8000", "http://"])
async def test_an_engine_needs_a_url(url):
    with pytest.raises(Invalid, match=r"engines\.a\.url"):
        async with Gateway.open(GatewaySettings(engines={"a": EngineSettings(url=url)}, listen="127.0.0.1:0")):
            pass
