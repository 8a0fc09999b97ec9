"""What agent frameworks do to a session reaches its KV: ids travel along, reading warms, taking back rewinds, clearing deletes."""

import asyncio
import contextlib
import json
import threading

import httpx
import numpy as np
import pytest

from kvstore.connectors import agents as module
from kvstore.connectors.agents import AgentSessions, KVSession, session
from kvstore.errors import Invalid, KVTierError
from kvstore.ids import Namespace, Shard, chain

NS = Namespace(model="m", revision="1", layers=1, page_bytes=512, layout="test/1", block_tokens=4)


@pytest.fixture
def agents(request):
    with AgentSessions(f"memory://{request.node.originalname}?dram=64MiB", model="m") as made:
        assert made.bridge.wait_connected(30)
        yield made


def settle(agents):
    """Wait for what was asked before: calls are done in order."""
    agents.bridge.call("settle", lambda kv: None).result(30)


def commit(agents, name, blocks):
    kv = agents.bridge._kv
    links = chain(NS, np.arange(4 * blocks))
    kv.put(NS, Shard(), links, lambda i, room: room.__setitem__(slice(None), bytes(room.nbytes)))
    version = 0
    with contextlib.suppress(KVTierError):
        version = kv.get_session(name, namespace=NS).version
    return kv.commit(name, namespace=NS, base_version=version, blocks=links, durability="bucket").version


@pytest.fixture
def seen():
    return []


@pytest.fixture
def server(seen):
    def answer(request):
        seen.append(request)
        return httpx.Response(200, json={})

    return httpx.MockTransport(answer)


@pytest.fixture
def restored(agents, monkeypatch):
    calls = []
    monkeypatch.setattr(agents.bridge._kv, "restore", lambda name, **how: calls.append((name, how["model"], how["tier"])))
    return calls


def test_the_id_travels_along_and_its_kv_is_warmed_once(agents, server, seen, restored):
    with httpx.Client(transport=agents.transport(server), base_url="http://engine") as client:
        with session("chat-1", parent="mother"):
            client.post("/v1/chat/completions", json={"messages": []})
            client.post("/v1/chat/completions", json={"messages": []})
        client.post("/v1/chat/completions", json={})
        with session("chat-1"):
            client.get("/v1/models")
    settle(agents)
    assert [request.headers.get("X-Session-ID") for request in seen] == ["chat-1", "chat-1", None, None]
    assert seen[0].headers["X-Parent-Session-ID"] == "mother"
    assert json.loads(seen[0].content) == {"messages": []}
    assert restored == [("chat-1", "m", "dram")]


async def test_an_async_client_and_two_tasks_that_have_sessions_of_their_own(agents, server, seen, restored):
    async with httpx.AsyncClient(transport=agents.transport(server), base_url="http://engine") as client:

        async def ask(name):
            with session(name):
                await asyncio.sleep(0)
                await client.post("/", json={"who": name})

        await asyncio.gather(ask("a"), ask("b"))
    await asyncio.to_thread(settle, agents)
    assert {request.headers["X-Session-ID"]: json.loads(request.content)["who"] for request in seen} == {"a": "a", "b": "b"}
    assert sorted(name for name, *_ in restored) == ["a", "b"]


def test_who_named_the_session_already_is_left_alone(agents, server, seen, restored):
    with httpx.Client(transport=agents.transport(server, session_id="default")) as client, session("other"):
        client.post("http://engine/", json={}, headers={"x-session-id": "mine"})
    with httpx.Client(transport=agents.transport(server, session_id="default")) as client:
        client.post("http://engine/", json={})
    assert [request.headers["X-Session-ID"] for request in seen] == ["mine", "default"]


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (b'{"a": 1}', {"a": 1, "vllm_xargs": {"session_id": "s", "parent_session_id": "p"}}),
        (b'{"vllm_xargs": {"session_id": "own", "x": 1}}', {"vllm_xargs": {"session_id": "own", "parent_session_id": "p", "x": 1}}),
        (b"[1]", [1]),
    ],
)
def test_the_id_goes_into_json_bodies_where_asked(agents, server, seen, restored, sent, found):
    with httpx.Client(transport=agents.transport(server, in_body=True)) as client, session("s", parent="p"):
        client.post("http://engine/", content=sent)
    assert json.loads(seen[0].content) == found
    assert int(seen[0].headers["Content-Length"]) == len(seen[0].content)
    assert seen[0].headers["X-Session-ID"] == "s"


def test_a_body_that_is_no_json_passes_as_it_is(agents, server, seen, restored):
    with httpx.Client(transport=agents.transport(server, in_body=True)) as client, session("s"):
        client.post("http://engine/", content=b"\xff\x00")
    assert seen[0].content == b"\xff\x00"


def test_a_body_that_is_too_deep_to_be_looked_into_passes_as_it_is(agents, server, seen, restored):
    body = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    with httpx.Client(transport=agents.transport(server, session_id="s", in_body=True)) as client:
        client.post("http://engine/", content=body)
    assert seen[0].content == body


def test_what_a_body_says_stays_as_it_was_written(agents, server, seen, restored):
    with httpx.Client(transport=agents.transport(server, session_id="s", in_body=True)) as client:
        client.post("http://engine/", content=b'{"a": 1e999,  "b": 1.0}')
    assert seen[0].content == b'{"a": 1e999,  "b": 1.0, "vllm_xargs": {"session_id": "s"}}'


def test_a_stream_that_was_read_before_it_was_sent_has_one_length(agents, server, seen, restored):
    with httpx.Client(transport=agents.transport(server, session_id="s", in_body=True)) as client:
        request = client.build_request("POST", "http://engine/", content=iter([b'{"a":', b" 1}"]))
        request.read()
        client.send(request)
    assert json.loads(seen[0].content)["vllm_xargs"] == {"session_id": "s"}
    assert seen[0].headers["Content-Length"] == str(len(seen[0].content))
    assert "Transfer-Encoding" not in seen[0].headers


@pytest.mark.parametrize("name", ["a\r\nX-Evil: 1", "a\0", "\ud800", "\u00e9", " a", "x" * 10_000, "../a"])
def test_an_id_that_cannot_travel_is_said_where_it_is_given(agents, name):
    with pytest.raises(Invalid, match="session id"), session(name):
        pass
    with pytest.raises(Invalid, match="session id"), session("s", parent=name):
        pass
    with pytest.raises(Invalid, match="session id"):
        agents.transport(session_id=name)


def test_a_session_that_rested_is_warmed_again(agents, restored, monkeypatch):
    assert agents.warm("s")
    assert not agents.warm("s")
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    assert agents.warm("s")
    assert agents.warm("s", version=3)
    settle(agents)
    assert len(restored) == 3


def test_without_a_node_requests_go_through(tmp_path, server, seen):
    with (
        AgentSessions(f"kvtier+unix://{tmp_path}/nobody.sock") as agents,
        httpx.Client(transport=agents.transport(server)) as client,
        session("s"),
    ):
        assert client.post("http://engine/", json={}).status_code == 200
    assert seen[0].headers["X-Session-ID"] == "s"


class Kept:
    """As the SDK's own sessions."""

    def __init__(self, session_id):
        self.session_id, self.items, self.extra = session_id, [], "more"

    async def get_items(self, limit=None):
        return self.items if limit is None else self.items[-limit:]

    async def add_items(self, items):
        self.items += items

    async def pop_item(self):
        return self.items.pop() if self.items else None

    async def clear_session(self):
        self.items.clear()


async def test_the_kv_goes_back_with_the_conversation_and_is_deleted_with_it(agents):
    kv = agents.bridge._kv
    mine = KVSession(Kept("s"), agents, namespace=NS.id)
    kv.put_namespace(NS.id, fields=NS)
    assert (mine.session_id, mine.extra) == ("s", "more")

    def tokens():
        settle(agents)
        return kv.get_session("s", namespace=NS).tokens

    await mine.add_items(["question 1"])
    commit(agents, "s", 1)
    await mine.add_items(["answer 1", "question 2"])
    commit(agents, "s", 2)
    await mine.add_items(["answer 2"])
    assert await mine.get_items() == ["question 1", "answer 1", "question 2", "answer 2"]
    assert await asyncio.to_thread(tokens) == 8
    assert await mine.pop_item() == "answer 2"
    assert await asyncio.to_thread(tokens) == 8  # that version knew no more than the questions
    assert await mine.pop_item() == "question 2"
    assert await asyncio.to_thread(tokens) == 4
    assert await mine.pop_item() == "answer 1"
    assert await asyncio.to_thread(tokens) == 4
    await mine.clear_session()
    settle(agents)
    with pytest.raises(KVTierError):
        kv.get_session("s", namespace=NS)
    assert await mine.pop_item() is None
    assert await mine.get_items() == []


async def test_a_conversation_is_kept_whatever_becomes_of_its_kv(tmp_path):
    with AgentSessions(f"kvtier+unix://{tmp_path}/nobody.sock") as agents:
        mine = KVSession(Kept("s"), agents)
        await mine.add_items([1, 2])
        assert await mine.pop_item() == 2
        assert await mine.get_items(limit=1) == [1]
        await mine.clear_session()
        assert await mine.get_items() == []


def test_a_session_that_was_deleted_is_no_trouble_and_one_deleted_at_the_end_is_gone(request):
    url = f"memory://{request.node.originalname}?dram=64MiB"
    with AgentSessions(url, model="m") as agents:
        assert agents.bridge.wait_connected(30)
        assert agents.version("s").result(30) == 0
        commit(agents, "s", 1)
        agents.forget("nobody")
        assert agents.version("s").result(30) == 1
        agents.forget("s", namespace=NS.id)  # and the program ends
        counts = agents.bridge.counts
    with AgentSessions(url) as agents:
        assert agents.bridge.wait_connected(30)
        assert agents.version("s", namespace=NS.id).result(30) == 0
    assert set(counts.calls) == {"ok"}


async def test_a_rewind_that_cannot_come_in_time_never_comes(agents, monkeypatch):
    """It would take away the turn that came after it."""
    kv = agents.bridge._kv
    mine = KVSession(Kept("s"), agents, namespace=NS.id)
    kv.put_namespace(NS.id, fields=NS)
    await mine.add_items(["question 1"])
    commit(agents, "s", 1)
    await mine.add_items(["answer 1", "question 2"])
    commit(agents, "s", 2)
    await mine.add_items(["answer 2"])
    monkeypatch.setattr(module, "_SOON_S", 0.05)
    gate = threading.Event()
    agents.bridge.call("slow", lambda kv: gate.wait(30))
    assert await mine.pop_item() == "answer 2"
    assert await mine.pop_item() == "question 2"
    commit(agents, "s", 3)
    gate.set()
    await asyncio.to_thread(settle, agents)
    assert kv.get_session("s", namespace=NS).tokens == 12
