"""LangGraph threads whose KV follows their checkpoints.

It is on its way when a thread is resumed, at the version of that checkpoint, and is deleted with the thread.

    pip install langgraph
    python examples/langgraph_checkpointer.py

Runs without a network against examples/stub_engine.py; needs kvtier[node,agents] and langgraph. `KVCheckpointer` is yours to copy.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypedDict

import httpx
import stub_engine

from kvstore.connectors.agents import AgentSessions, session

try:
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import BaseCheckpointSaver
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import END, START, StateGraph
except ImportError:
    sys.exit("langgraph is not installed: pip install langgraph")

URL = os.environ.get("KVTIER_URL", "memory://langgraph?dram=64MiB")
VERSION = "kvtier_version"
PATIENCE_S = 0.1  # a checkpoint does not wait longer for the number of its version


class KVCheckpointer(BaseCheckpointSaver):
    """Any checkpointer, with the KV of its threads: a thread is a session of the same id.

    Args:
        inner: What keeps the checkpoints.
        sessions: The way to the KV.
        namespace: Id of the sessions' namespace, where they have several.
    """

    def __init__(self, inner: BaseCheckpointSaver, sessions: AgentSessions, *, namespace: str = "") -> None:
        super().__init__(serde=inner.serde)
        self._inner, self._sessions, self._namespace = inner, sessions, namespace

    # --- reading a checkpoint: its KV is on its way ---

    def get_tuple(self, config: Any) -> Any:
        """See BaseCheckpointSaver."""
        return self._warmed(config, self._inner.get_tuple(config))

    async def aget_tuple(self, config: Any) -> Any:
        """See BaseCheckpointSaver."""
        return self._warmed(config, await self._inner.aget_tuple(config))

    def _warmed(self, config: Any, found: Any) -> Any:
        if found is not None:
            given = config["configurable"]
            chosen = found.metadata.get(VERSION) if given.get("checkpoint_id") else None  # by default the session's last
            self._sessions.warm(given["thread_id"], version=chosen)
        return found

    # --- writing one: which version the KV has is kept with it ---

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        """See BaseCheckpointSaver."""
        asked = self._sessions.version(config["configurable"]["thread_id"], namespace=self._namespace)
        try:
            version = asked.result(PATIENCE_S) if asked else 0
        except Exception:  # noqa: BLE001  a checkpoint never fails for its KV
            version = 0
        return self._inner.put(config, checkpoint, self._noted(metadata, version), new_versions)

    async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        """See BaseCheckpointSaver."""
        asked = self._sessions.version(config["configurable"]["thread_id"], namespace=self._namespace)
        try:
            version = await asyncio.wait_for(asyncio.wrap_future(asked), PATIENCE_S) if asked else 0
        except Exception:  # noqa: BLE001  as above
            version = 0
        return await self._inner.aput(config, checkpoint, self._noted(metadata, version), new_versions)

    @staticmethod
    def _noted(metadata: Any, version: int) -> Any:
        return {**metadata, VERSION: version} if version else metadata

    # --- deleting a thread: its KV too ---

    def delete_thread(self, thread_id: str) -> None:
        """See BaseCheckpointSaver."""
        self._inner.delete_thread(thread_id)
        self._forget(thread_id)

    async def adelete_thread(self, thread_id: str) -> None:
        """See BaseCheckpointSaver."""
        await self._inner.adelete_thread(thread_id)
        self._forget(thread_id)

    def _forget(self, thread_id: str) -> None:
        self._sessions.forget(thread_id, namespace=self._namespace)

    # --- the rest is the inner one's ---

    def list(self, config: Any, **how: Any) -> Iterator[Any]:
        """See BaseCheckpointSaver."""
        return self._inner.list(config, **how)

    def alist(self, config: Any, **how: Any) -> AsyncIterator[Any]:
        """See BaseCheckpointSaver."""
        return self._inner.alist(config, **how)

    def put_writes(self, *arguments: Any, **named: Any) -> None:
        """See BaseCheckpointSaver."""
        self._inner.put_writes(*arguments, **named)

    async def aput_writes(self, *arguments: Any, **named: Any) -> None:
        """See BaseCheckpointSaver."""
        await self._inner.aput_writes(*arguments, **named)

    def get_next_version(self, current: Any, channel: None) -> Any:
        """See BaseCheckpointSaver."""
        return self._inner.get_next_version(current, channel)

    @property
    def config_specs(self) -> Any:
        """See BaseCheckpointSaver."""
        return self._inner.config_specs


class State(TypedDict):
    """A conversation."""

    messages: list[dict[str, str]]


def graph(client: httpx.Client, checkpointer: BaseCheckpointSaver) -> Any:
    """One node that asks the engine."""

    def ask(state: State, config: RunnableConfig) -> State:
        with session(config["configurable"]["thread_id"]):
            said = client.post("chat/completions", json={"model": "stub", "messages": state["messages"]}).json()
        return {"messages": [*state["messages"], said["choices"][0]["message"]]}

    made = StateGraph(State)
    made.add_node("ask", ask)
    made.add_edge(START, "ask")
    made.add_edge("ask", END)
    return made.compile(checkpointer=checkpointer)


def main(engine: str) -> None:
    """Two turns, a return to the first one, and the end of the thread."""
    with AgentSessions(URL) as sessions, httpx.Client(transport=sessions.transport(), base_url=engine) as client:
        sessions.bridge.wait_connected(10)
        checkpointer = KVCheckpointer(InMemorySaver(), sessions, namespace=stub_engine.NAMESPACE.id)
        app, thread = graph(client, checkpointer), {"configurable": {"thread_id": "thread-1"}}
        messages = [{"role": "user", "content": "What is a whale?"}]
        first = app.invoke({"messages": messages}, thread)
        print(first["messages"][-1]["content"])
        after_first = app.get_state(thread).config
        second = app.invoke({"messages": [*first["messages"], {"role": "user", "content": "And a shark?"}]}, thread)
        print(second["messages"][-1]["content"])
        for state in app.get_state_history(thread):
            print(state.config["configurable"]["checkpoint_id"], "KV version", state.metadata.get(VERSION, "-"))
        other = app.invoke({"messages": [*first["messages"], {"role": "user", "content": "And a dolphin?"}]}, after_first)
        print(other["messages"][-1]["content"])
        checkpointer.delete_thread("thread-1")


if __name__ == "__main__":
    with stub_engine.running(URL) as engine:
        main(engine)
