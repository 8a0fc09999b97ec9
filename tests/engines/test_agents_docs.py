"""What docs/engines/agents.md tells people to type works as written: the real SDKs, and the examples' stand-in for an engine."""

import re
import sys
from itertools import count
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import stub_engine

import kvstore

PAGE = Path(__file__).parents[2] / "docs" / "engines" / "agents.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
NODE, ENGINE, MODEL = "kvtier+unix:///run/kvtier/node.sock", "http://127.0.0.1:8000/v1", "org/model"
NUMBERS = count()


def test_every_snippet_is_run_here():
    assert len(SNIPPETS) == 3
    assert all(snippet.count(NODE) == snippet.count(ENGINE) == 1 for snippet in SNIPPETS)


@pytest.mark.parametrize(
    ("snippet", "needs", "versions"),
    [
        pytest.param(SNIPPETS[0], "openai", {"chat-42": 1, "chat-42-b": 1}, id="httpx"),
        pytest.param(SNIPPETS[1], "agents", {"chat-42": 2}, id="agents-sdk"),
        pytest.param(SNIPPETS[2], "langgraph", {"chat-42": 2}, id="langgraph"),
    ],
)
def test_a_snippet(snippet, needs, versions, monkeypatch, capsys):
    pytest.importorskip(needs)
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")  # which would go to OpenAI
    url = f"memory://agents-docs-{next(NUMBERS)}?dram=64MiB"
    with stub_engine.running(url) as engine:
        code = snippet.replace(NODE, url).replace(ENGINE, engine).replace(MODEL, stub_engine.NAMESPACE.model)
        exec(compile(code, str(PAGE), "exec"), {})
        with kvstore.open_sync(url) as kv:
            found = {name: kv.get_session(name, namespace=stub_engine.NAMESPACE).version for name in versions}
    assert found == versions
    last = [line for line in capsys.readouterr().out.splitlines() if "tokens were known" in line][-1]
    assert not last.startswith("0 of ")
