"""A session of the OpenAI Agents SDK whose KV lives as the conversation does: warmed, gone back with it, deleted with it.

    pip install openai-agents
    python examples/openai_agents_session.py

Runs without a network against examples/stub_engine.py; needs kvtier[node,agents]. Where the SDK is not installed, a little stand-in
with the same protocol takes its place.
"""

import asyncio
import os
from typing import Any

import httpx
import stub_engine

from kvstore.connectors.agents import AgentSessions, KVSession, session

URL = os.environ.get("KVTIER_URL", "memory://openai-agents?dram=64MiB")

try:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, set_tracing_disabled
    from openai import AsyncOpenAI
except ImportError:
    Agent = None


async def main(engine: str) -> None:
    """Two turns, one taken back and said differently; then all is deleted."""
    with AgentSessions(URL) as sessions:
        sessions.bridge.wait_connected(10)  # a program that goes on at once starts cold, nothing more
        memory = KVSession(
            Kept("chat-7") if Agent is None else SQLiteSession("chat-7"), sessions, namespace=stub_engine.NAMESPACE.id
        )
        async with httpx.AsyncClient(transport=sessions.transport(), base_url=engine) as client:
            with session(memory.session_id):
                print(await turn(client, memory, "What is a whale?"))
                print(await turn(client, memory, "And a shark?"))
                await memory.pop_item()  # the answer
                await memory.pop_item()  # the question: the KV goes back to before it
                print(await turn(client, memory, "And a dolphin?"))
        await memory.clear_session()
        print(sessions.bridge.counts.calls)


async def turn(client: httpx.AsyncClient, memory: KVSession, words: str) -> str:
    """One run of an agent."""
    if Agent is None:
        await memory.add_items([{"role": "user", "content": words}])  # as the SDK: before it asks
        messages = await memory.get_items()
        answer = (await client.post("chat/completions", json={"model": "stub", "messages": messages})).json()["choices"][0][
            "message"
        ]
        await memory.add_items([answer])
        return str(answer["content"])
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("stub", AsyncOpenAI(base_url=str(client.base_url), api_key="none", http_client=client))
    agent = Agent(name="teacher", instructions="You are a patient teacher of marine biology.", model=model)
    return str((await Runner.run(agent, words, session=memory)).final_output)


class Kept:
    """In place of one of the SDK's own sessions."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self._items: list[Any] = []

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """The last ones."""
        return list(self._items if limit is None else self._items[-limit:])

    async def add_items(self, items: list[Any]) -> None:
        """Append."""
        self._items += items

    async def pop_item(self) -> Any:
        """Take the last one away."""
        return self._items.pop() if self._items else None

    async def clear_session(self) -> None:
        """Take all away."""
        self._items.clear()


if __name__ == "__main__":
    if Agent is None:
        print("openai-agents is not installed (pip install openai-agents): a stand-in takes its place")
    with stub_engine.running(URL) as engine:
        asyncio.run(main(engine))
