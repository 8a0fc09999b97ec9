"""Priorities, budgets and hints on the command line."""

import json

import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.cli.commands import app
from kvstore.ids import Namespace, Shard

NAMESPACE = Namespace(model="tiny/model", revision="r1", layers=1, kv_heads=1, head_dim=16, dtype="F32", block_tokens=16)


@pytest.fixture
def kvtier(root):
    """On a node inside this process, whose store holds the session `chat` of three blocks."""
    url = f"memory://{root}?dram=16MiB"
    links = kvstore.chain(NAMESPACE, range(48))
    with kvstore.open_sync(url) as kv:
        kv.put(NAMESPACE, Shard(), links, lambda _, room: room.__setitem__(slice(None), bytes(len(room))))
        kv.commit("chat", namespace=NAMESPACE, base_version=0, blocks=links)

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, ["sessions", *arguments, "--url", url], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.output if code else result.stdout

    return run


def test_a_restore_by_priority_and_within_a_budget(kvtier):
    restored = json.loads(kvtier("restore", "chat", "--speculative", "--max-bytes", "8KiB", "--hold", "1m", "--format", "json"))
    assert (restored["state"], restored["priority"], restored["staged_tokens"]) == ("partial", "speculative", 16)
    assert "max_bytes" in restored["error"]


def test_hints(kvtier):
    assert kvtier("hint", "chat", "tool_start") == "taken\n"
    hinted = json.loads(kvtier("hint", "chat", "tool_return", "--format", "json"))
    assert hinted["taken"]
    assert len(hinted["restore_id"]) == 32
    assert kvtier("hint", "chat", "resume_at", "--in", "10m") == "taken\n"
    assert "tool_start, tool_return, resume_at or final" in kvtier("hint", "chat", "soon", code=2)
    for times in (["resume_at"], ["resume_at", "--in", "10m", "--at", "1"], ["final", "--in", "10m"]):
        assert "one of --in and --at" in kvtier("hint", "chat", *times, code=2)
