"""vLLM's own server, and clients that name a session in a header only: it outlives the server, with the same answers."""

import pydoc_data.topics

import httpx
import pytest
from openai_server import Server
from test_vllm_connector import connector

import kvstore
from kvstore.connectors.agents import AgentSessions, session

CHAT = "/v1/chat/completions"
CLAUDE = {"X-Claude-Code-Session-Id": "chat"}
WHOLE = 768  # of the first turn: three blocks of 256, and a rest
STORED = {WHOLE, WHOLE + 256}  # without or with what a second turn has just saved itself


def said(answer):
    return answer["choices"][0]["message"]["content"]


def cached(answer):
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def in_time(server, body, headers=None, client=httpx):
    """The answer to a request whose look-up was answered in time: on a busy machine one may be late, which is a miss."""
    for _ in range(5):
        late = server.late()
        answer = server.ask(CHAT, body, headers, client)
        if server.late() == late:
            return answer
        server.forget()
    pytest.fail("five look-ups were late")


def question(topic, length=3800):
    return {"role": "user", "content": pydoc_data.topics.topics[topic][:length] + "\nSay in a sentence what this is about."}


@pytest.fixture
def server(tmp_path, model):
    def start(name, url):
        return Server(name, tmp_path, model, connector=connector(url))

    return start


@pytest.mark.more_engines
def test_a_header_is_enough_for_a_session_that_outlives_the_server(server, node):
    first_turn = [question("objects")]
    asked = {"max_tokens": 12}
    with server("server-first", node.url) as first:
        cold = first.ask(CHAT, {"messages": first_turn, **asked}, CLAUDE)
        assert cached(cold) == 0
        assert cold["kv_transfer_params"]["kvtier"]["session"] == "chat"
        second_turn = [*first_turn, {"role": "assistant", "content": said(cold)}, question("yield", 900)]
        expected = first.ask(CHAT, {"messages": second_turn, "cache_salt": "computes all of it", **asked})
        assert cached(expected) == 0
        anthropic = {"messages": [question("try")], "max_tokens": 4}
        first.ask("/v1/messages", anthropic, {"x-claude-code-session-id": "claude"})
        in_body = {"messages": [question("with")], "session_id": "body", "vllm_xargs": {"mine": 1}, "max_tokens": 4}
        first.ask(CHAT, in_body, CLAUDE | {"X-Parent-Session-ID": "chat"})
        first.stop()
    node.settled()
    with kvstore.open_sync(node.url) as kv:
        found = {each.id: each.tokens for each in kv.list_sessions().sessions}
    assert set(found) == {"chat", "claude", "body"}
    assert found["chat"] == WHOLE
    node.wipe()

    with server("server-second", node.url) as second, AgentSessions(node.url) as agents:
        assert agents.bridge.wait_connected(30)
        warm = in_time(second, {"messages": second_turn, **asked}, CLAUDE)
        assert (cached(warm) in STORED, said(warm)) == (True, said(expected))
        assert warm["kv_transfer_params"]["kvtier"]["session"] == "chat"
        second.forget()
        with httpx.Client(transport=agents.transport()) as client, session("child", parent="chat"):
            child = in_time(second, {"messages": second_turn, "vllm_xargs": {"mine": 1}, **asked}, client=client)
        assert (cached(child) in STORED, said(child)) == (True, said(expected))
        second.stop()
    node.settled()
    with kvstore.open_sync(node.url) as kv:
        chat, child = kv.get_session("chat"), kv.get_session("child")
    assert (chat.version, chat.tokens, child.tokens) == (2, WHOLE + 256, WHOLE + 256)
    assert child.family == chat.family  # a fork, as the parent's header says
