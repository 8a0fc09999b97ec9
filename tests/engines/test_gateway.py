"""A gateway before two of vLLM's own servers: turns go where their KV is, and a dead server's go where it can be loaded."""

import json
import os
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import aiohttp
import httpx
import msgspec
import pytest
from harness import Node
from multidict import CIMultiDict, CIMultiDictProxy
from openai_server import Server
from test_openai_server import CHAT, cached, question, said
from test_vllm_connector import connector

from kvstore.demo.processes import Process
from kvstore.gateway.asked import COMPLETIONS, asked
from kvstore.gateway.words import EngineTokenizer, OwnTokenizer

pytestmark = pytest.mark.more_engines
BLOCK = 256
WAIT_S = 60.0
# The model's own, and tools and their calls in what it says.
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}
{{ call.function.arguments | tojson }}
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if thoughtful %}Let me think.{% endif %}{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "description": "Tells the weather.",
        "name": "weather",
    },
}
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'}}
USER = {"role": "user", "content": "How is the weather in Köln?"}
PROMPTS = {
    "chat": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
    "tools": {"messages": [USER], "tools": [TOOL, {"type": "function", "function": {"name": "bare"}}], "tool_choice": "none"},
    "calls": {
        "tools": [TOOL],
        "tool_choice": "none",
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {
                "role": "tool",
                "tool_call_id": "call-1",
                "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}],
            },
            {"role": "assistant", "content": "It rains.", "tool_calls": []},
            USER,
        ],
    },
    "kwargs": {"messages": [USER], "chat_template_kwargs": {"thoughtful": True}},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "It is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "special": {"messages": [USER], "add_special_tokens": True},
    "text": {"prompt": "Once upon a time"},
    "plain text": {"prompt": "Once upon a time", "add_special_tokens": False},
    "ids": {"prompt": [504, 17, 99]},
}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def eventually(what, says):
    """Polls until `what()` is true; what it said last."""
    ends = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < ends, says
        time.sleep(0.2)
    return found


class Gateway:
    """`kvtier gateway` as a process."""

    def __init__(self, name, folder, *arguments):
        self.url, self._log = f"http://127.0.0.1:{(port := free_port())}", folder / f"{name}.log"
        code = "from kvstore.cli.main import main; main()"
        words = ("gateway", "--listen", f"127.0.0.1:{port}", *arguments)
        self.process = Process(name, code, *words, folder=folder, environment={"HF_HUB_OFFLINE": "1"})
        eventually(self._ready, f"{name} did not come up: {self._log.read_text()}")

    def _ready(self):
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).is_success
        except httpx.TransportError:
            return False

    @property
    def log(self):
        return self._log.read_text()

    def ask(self, body, path=CHAT):
        """The engine that answered, what was predicted for it, and the answer."""
        answer = httpx.post(f"{self.url}{path}", json={"model": "m", "temperature": 0.0, **body}, timeout=120)
        assert answer.is_success, answer.text
        return answer.headers["X-KVTier-Engine"], json.loads(answer.headers["X-KVTier-Route"]), answer.json()

    def routes(self, ids):
        """What is predicted of a prompt, by engine."""
        answer = httpx.post(f"{self.url}/v1/route", json={"token_ids": ids}, timeout=30).raise_for_status()
        return {each["engine"]: each["predicted"] for each in answer.json()["candidates"]}

    def engines(self):
        return {each["engine"]: each for each in httpx.get(f"{self.url}/v1/engines", timeout=30).json()}


class Fleet:
    """Two servers beside one node, and two gateways before them: one asks them for tokens, the other tokenises itself."""

    def __init__(self, servers, node, asks, own):
        self.servers, self.node, self.asks, self.own = servers, node, asks, own
        self._steps = 0

    def tokens(self, messages):
        """As a server cuts a conversation."""
        answer = httpx.post(f"{self.servers['b'].url}/tokenize", json={"messages": messages}, timeout=30).raise_for_status()
        return answer.json()["tokens"]

    def hears(self, gateway, name, ids, tokens):
        """Waits until a gateway believes that a server's device has so much of a prompt."""

        def heard():
            # A step that fills a block: vLLM publishes with it what its cache did before, and a gateway that has just begun to
            # listen asks then for what it missed.
            self._steps += 1
            self.servers[name].ask("/v1/completions", {"prompt": [1000 + self._steps] * 300, "max_tokens": 1})
            return gateway.routes(ids)[name]["tokens"]["gpu"] == tokens

        eventually(heard, f"{name} was not believed to hold {tokens} tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("fleet")
    shutil.copytree(model, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def shared_node(folder, store):
    (folder / "node").mkdir()
    with Node(folder / "node", {"KVTIER_STORE_URL": store.url("gateway"), **store.environment}) as node:
        node.start()
        yield node


def server(name, folder, node):
    """One that publishes its events at its own `events` and `replay`."""
    events, replay = free_port(), free_port()
    published = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",  # vLLM listens only where there is a star
        "replay_endpoint": f"tcp://*:{replay}",
    }
    made = Server(
        f"gateway-{name}", folder, folder / "model", connector=connector(node.url), kv_events_config=json.dumps(published)
    )
    made.events, made.replay = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
    return made


@pytest.fixture(scope="module")
def first_server(folder, shared_node):
    with server("a", folder, shared_node) as running:
        yield running


@pytest.fixture(scope="module")
def fleet(folder, shared_node, first_server):
    with ExitStack() as running:
        servers = {"a": first_server, "b": running.enter_context(server("b", folder, shared_node))}
        engines = [
            f"--engine={name}={one.url},node={shared_node.url},events={one.events},replay={one.replay}"
            for name, one in servers.items()
        ]
        model = folder / "model"
        asks = Gateway("asks", folder, *engines, f"--model={model}")
        running.enter_context(asks.process)
        own = Gateway("own", folder, *engines, f"--model={model}", f"--tokenizer={model}")
        running.enter_context(own.process)
        yield Fleet(servers, shared_node, asks, own)


@pytest.mark.parametrize("name", PROMPTS)
async def test_a_gateway_sees_the_tokens_that_the_engine_sees(first_server, folder, name):
    path = COMPLETIONS if "prompt" in PROMPTS[name] else CHAT
    body = {"model": "m", "max_tokens": 1, "return_token_ids": True, **PROMPTS[name]}
    request = asked(path, msgspec.json.encode(body), CIMultiDictProxy(CIMultiDict()))
    url = first_server.url
    async with aiohttp.ClientSession() as session:
        async with session.post(url + path, json=body) as answer:
            found = await answer.json()
        theirs = found.get("prompt_token_ids") or found["choices"][0]["prompt_token_ids"]
        assert list(await EngineTokenizer(session).tokens(request, url)) == theirs
    assert list(await OwnTokenizer(str(folder / "model")).tokens(request, "")) == theirs


def test_turns_go_where_their_kv_is(fleet):
    first = [question("objects")]
    name, route, cold = fleet.asks.ask({"messages": first, "max_tokens": 12})
    assert route["found"] == 0
    fleet.node.settled()
    for gateway in (fleet.asks, fleet.own):
        eventually(lambda gateway=gateway: "prompts are cut as namespace" in gateway.log, "no namespace was found")
    ids = fleet.tokens(first)
    whole = len(ids) // BLOCK * BLOCK
    for gateway in (fleet.asks, fleet.own):
        fleet.hears(gateway, name, ids, whole)
    other = ({"a", "b"} - {name}).pop()
    eventually(lambda: fleet.asks.routes(ids)[other]["tokens"]["dram"] == whole, "the node did not say what it has")

    second = [*first, {"role": "assistant", "content": said(cold)}, question("yield", 900)]
    for gateway in (fleet.asks, fleet.own):
        by, route, warm = gateway.ask({"messages": second, "max_tokens": 4})
        assert (by, route["tokens"]["gpu"] >= whole, cached(warm) >= whole) == (name, True, True)

    with ThreadPoolExecutor(4) as clients:  # what has nothing in common goes where less waits
        topics = ("try", "with", "class", "import")
        answers = list(clients.map(lambda topic: fleet.own.ask({"messages": [question(topic)], "max_tokens": 4}), topics))
    assert {by for by, _, _ in answers} == {"a", "b"}

    fleet.servers[name].forget()
    fleet.hears(fleet.asks, name, ids, 0)
    assert fleet.asks.routes(ids)[name]["tokens"]["dram"] == whole


def test_a_server_dies_and_its_conversations_go_on(fleet):
    first = [question("exceptions")]
    name, _, cold = fleet.own.ask({"messages": first, "max_tokens": 12})
    other = ({"a", "b"} - {name}).pop()
    second = [*first, {"role": "assistant", "content": said(cold)}, question("lambda", 900)]
    expected = fleet.servers[other].ask(CHAT, {"messages": second, "cache_salt": "computes all of it", "max_tokens": 12})
    assert cached(expected) == 0
    fleet.node.settled()
    ids = fleet.tokens(second)
    whole = len(fleet.tokens(first)) // BLOCK * BLOCK
    eventually(lambda: fleet.own.routes(ids)[other]["tokens"]["dram"] >= whole, "the node did not say what it has")
    fleet.hears(fleet.own, name, fleet.tokens(first), whole)

    group = fleet.servers[name]._process.child.pid
    streamed = {"model": "m", "messages": first, "stream": True, "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(1) as client, httpx.stream("POST", fleet.own.url + CHAT, json=streamed, timeout=120) as stream:
        assert stream.headers["X-KVTier-Engine"] == name
        pieces = stream.iter_bytes()
        begun = next(pieces)
        os.killpg(group, signal.SIGSTOP)  # it takes one more request, and does not answer it
        waiting = client.submit(fleet.own.ask, {"messages": second, "max_tokens": 12})
        eventually(lambda: fleet.own.engines()[name]["running"] == 2, "it was sent to the other engine at once")
        os.killpg(group, signal.SIGKILL)
        rest = begun + b"".join(pieces)
        by, route, warm = waiting.result()
    lines = [line[6:] for line in rest.decode().splitlines() if line.startswith("data: ")]
    assert json.loads(lines[-1])["error"]["type"] == "engine_broke_off"
    assert "[DONE]" not in lines
    assert by == other
    assert route["tokens"]["dram"] + route["tokens"]["nvme"] + route["tokens"]["bucket"] >= whole
    assert said(warm) == said(expected)
    for _ in range(5):  # on a busy machine a look-up of the engine may be late, which is a miss
        if cached(warm) >= whole:
            break
        fleet.servers[other].forget()
        by, route, warm = fleet.own.ask({"messages": second, "max_tokens": 12})
        assert (by, said(warm)) == (other, said(expected))
    assert cached(warm) >= whole
    assert not fleet.own.engines()[name]["up"]
    assert fleet.own.engines()[name]["failed"] > 0
