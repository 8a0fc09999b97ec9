"""The wrappers for agents around the real SDKs: OpenAI's client, its Agents SDK with a real runner, LangGraph with a real graph."""

import importlib
import subprocess
import sys
from itertools import count
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import stub_engine

import kvstore
from kvstore.connectors.agents import AgentSessions, KVSession, session
from kvstore.errors import Gone, NotFound

EXAMPLES = Path(stub_engine.__file__).parent
NUMBERS = count()
SPACE = stub_engine.NAMESPACE


@pytest.fixture
def url():
    return f"memory://agents-{next(NUMBERS)}?dram=64MiB"


@pytest.fixture
def engine(url):
    with stub_engine.running(url) as base:
        yield base


@pytest.fixture
def agents(url):
    with AgentSessions(url) as made:
        assert made.bridge.wait_connected(30)
        yield made


def settle(agents):
    """Wait for what was asked before: calls are done in order."""
    agents.bridge.call("settle", lambda _: None).result(30)


def stored(url, name):
    """Version and tokens of a session's KV; (0, 0) where it has none."""
    with kvstore.open_sync(url) as kv:
        try:
            found = kv.get_session(name, namespace=SPACE)
        except (NotFound, Gone):
            return 0, 0
        return found.version, found.tokens


def version(url, name):
    return stored(url, name)[0]


@pytest.mark.parametrize("name", ["agents_httpx", "openai_agents_session", "langgraph_checkpointer"])
def test_an_example_runs_offline_and_finds_the_last_turn_again(name):
    if name == "langgraph_checkpointer":
        pytest.importorskip("langgraph")
    run = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, check=True, timeout=120)
    said = [line for line in run.stdout.splitlines() if "tokens were known" in line]
    assert said[0].startswith("0 of ")
    assert not any(line.startswith("0 of ") for line in said[1:])
    assert "failed" not in run.stderr


async def test_openais_clients_blocking_and_async(agents, engine, url):
    openai = pytest.importorskip("openai")
    messages = [{"role": "user", "content": "a question that is longer than a block"}]
    with httpx.Client(transport=agents.transport(in_body=True)) as client, session("blocking"):
        sdk = openai.OpenAI(base_url=engine, api_key="none", http_client=client)
        assert "version 1" in sdk.chat.completions.create(model="m", messages=messages).choices[0].message.content
    async with httpx.AsyncClient(transport=agents.transport()) as client:
        with session("async"):
            sdk = openai.AsyncOpenAI(base_url=engine, api_key="none", http_client=client)
            answer = await sdk.chat.completions.create(model="m", messages=messages)
    assert "session async, version 1" in answer.choices[0].message.content
    assert (version(url, "blocking"), version(url, "async")) == (1, 1)


def agent(sdk, client, engine):
    openai = pytest.importorskip("openai")
    sdk.set_tracing_disabled(True)
    model = sdk.OpenAIChatCompletionsModel("m", openai.AsyncOpenAI(base_url=engine, api_key="none", http_client=client))
    return sdk.Agent(name="a", instructions="Answer briefly, and in the words of the question.", model=model)


async def test_a_real_runner_with_a_session_that_has_kv(agents, engine, url):
    sdk = pytest.importorskip("agents")
    memory = KVSession(sdk.SQLiteSession("chat"), agents, namespace=SPACE.id)
    assert isinstance(memory, sdk.Session)
    tokens = []
    async with httpx.AsyncClient(transport=agents.transport()) as client:
        with session("chat"):
            for turn in (1, 2):
                answer = await sdk.Runner.run(agent(sdk, client, engine), f"question {turn}, which is long enough", session=memory)
                assert f"session chat, version {turn}." in answer.final_output
                tokens.append(stored(url, "chat")[1])
    assert len(await memory.get_items()) == 4
    await memory.pop_item()
    await memory.pop_item()
    settle(agents)
    assert tokens[0] < tokens[1]
    assert stored(url, "chat") == (3, tokens[0])  # gone back to what the first turn had
    await memory.clear_session()
    settle(agents)
    assert version(url, "chat") == 0


def test_a_blocking_runner(agents, engine, url):
    sdk = pytest.importorskip("agents")
    memory = KVSession(sdk.SQLiteSession("chat"), agents, namespace=SPACE.id)
    client = httpx.AsyncClient(transport=agents.transport())
    with session("chat"):
        answer = sdk.Runner.run_sync(agent(sdk, client, engine), "a question, which is long enough", session=memory)
    assert "session chat, version 1." in answer.final_output
    assert version(url, "chat") == 1


def test_what_is_deleted_last_is_deleted_although_the_program_ends(engine, url):
    with AgentSessions(url) as agents, httpx.Client(transport=agents.transport()) as client:
        assert agents.bridge.wait_connected(30)
        with session("chat"):
            client.post(f"{engine}/chat/completions", json={"messages": [{"role": "user", "content": "long enough for a block"}]})
        assert version(url, "chat") == 1
        agents.forget("chat", namespace=SPACE.id)
    assert version(url, "chat") == 0


@pytest.fixture
def langgraph(agents, engine, monkeypatch):
    """An application of one node, its thread, its checkpointer, and what was warmed."""
    pytest.importorskip("langgraph")
    example = importlib.import_module("langgraph_checkpointer")
    warmed, warm = [], agents.warm
    monkeypatch.setattr(agents, "warm", lambda name, version=None: (warmed.append((name, version)), warm(name, version=version))[1])
    checkpointer = example.KVCheckpointer(example.InMemorySaver(), agents, namespace=SPACE.id)
    with httpx.Client(transport=agents.transport(), base_url=engine) as client:
        yield example.graph(client, checkpointer), {"configurable": {"thread_id": "t"}}, checkpointer, warmed


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_a_real_graph_resumes_with_the_version_of_its_checkpoint(langgraph, agents, url, way):
    app, thread, checkpointer, warmed = langgraph

    async def run(messages, config):
        given = {"messages": messages}
        return (app.invoke(given, config) if way == "invoke" else await app.ainvoke(given, config))["messages"]

    first = await run([{"role": "user", "content": "a question that is long enough"}], thread)
    at_first = app.get_state(thread).config
    await run([*first, {"role": "user", "content": "and another one, long enough as well"}], thread)
    assert app.get_state(thread).metadata["kvtier_version"] == 2
    assert app.get_state(at_first).metadata["kvtier_version"] == 1
    warmed.clear()
    await run([*first, {"role": "user", "content": "something else instead"}], at_first)
    assert ("t", 1) in warmed
    if way == "invoke":
        checkpointer.delete_thread("t")
    else:
        await checkpointer.adelete_thread("t")
    settle(agents)
    assert version(url, "t") == 0
    assert app.get_state(thread).values == {}
