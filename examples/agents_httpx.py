"""A chat with any OpenAI-compatible engine, whose session goes along with every request and is warm when the engine looks for it.

    python examples/agents_httpx.py

Runs without a network against examples/stub_engine.py; needs kvtier[node,agents], and `openai` where that is installed.
OPENAI_BASE_URL names a real engine instead, and KVTIER_URL the node beside it.
"""

import os
from contextlib import nullcontext

import httpx
import stub_engine

from kvstore.connectors.agents import AgentSessions, session

URL = os.environ.get("KVTIER_URL", "memory://agents-httpx?dram=64MiB")


def main(engine: str) -> None:
    """Three turns, and a fork of the conversation."""
    with AgentSessions(URL) as agents, httpx.Client(transport=agents.transport(), base_url=engine) as client:
        messages = [{"role": "system", "content": "You are a patient teacher of marine biology."}]
        with session("chat-42"):
            for words in ("What is a whale?", "And a dolphin?", "Which of them is larger?"):
                messages.append({"role": "user", "content": words})
                messages.append({"role": "assistant", "content": ask(client, messages)})
                print(messages[-1]["content"])
        with session("chat-42-b", parent="chat-42"):
            print(ask(client, [*messages, {"role": "user", "content": "Say it for a child."}]))


def ask(client: httpx.Client, messages: list[dict[str, str]]) -> str:
    """One request; through the OpenAI client where that is installed."""
    model = os.environ.get("OPENAI_MODEL", "stub")
    try:
        import openai  # noqa: PLC0415  shown where it is installed, and done without where not
    except ImportError:
        said = client.post("chat/completions", json={"model": model, "messages": messages}).raise_for_status().json()
        return said["choices"][0]["message"]["content"]
    sdk = openai.OpenAI(base_url=str(client.base_url), api_key=os.environ.get("OPENAI_API_KEY", "none"), http_client=client)
    return sdk.chat.completions.create(model=model, messages=messages).choices[0].message.content or ""


if __name__ == "__main__":
    given = os.environ.get("OPENAI_BASE_URL")
    with nullcontext(given) if given else stub_engine.running(URL) as engine:
        main(engine)
