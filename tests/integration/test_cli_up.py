"""`kvtier up`, as a person uses it: in one terminal the node, in another the sessions; and kill -9 in between."""

import json
import signal
import subprocess
import sys
from array import array

import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.cli.commands import app
from kvstore.ids import Namespace, Shard

NAMESPACE = Namespace(model="tiny", revision="r1", layers=2, kv_heads=1, head_dim=32, dtype="F32", block_tokens=16)
KV_BYTES = 2 * 2 * 16 * 32 * 4
COMMAND = [sys.executable, "-c", "from kvstore.cli.main import main; main()"]


def kvtier(url, *arguments, code=0):
    """One command against the node; its JSON lines."""
    result = CliRunner().invoke(app, [*arguments, "--url", url, "--format", "json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def text(session, blocks):
    return [sum(map(ord, session)) + 31 * n for n in range(16 * blocks)]


def commit(url, session, blocks):
    """Publishes the session's first blocks and commits them, one version each; the receipts."""
    tokens = text(session, blocks)
    links = kvstore.chain(NAMESPACE, tokens)

    def fill(index, room):
        room[:KV_BYTES] = bytes([index + 1]) * KV_BYTES
        room[KV_BYTES:] = array("I", tokens[16 * index :][:16]).tobytes()

    with kvstore.open_sync(url) as kv:
        assert kv.put(NAMESPACE, Shard(), links, fill) == [True] * blocks
        return [
            kv.commit(session, namespace=NAMESPACE, base_version=n, blocks=links[: n + 1], durability="bucket")
            for n in range(blocks)
        ]


@pytest.fixture
def namespace_file(tmp_path):
    path = tmp_path / "namespace.json"
    path.write_bytes(NAMESPACE.canonical_json())
    return path


@pytest.mark.slow
@pytest.mark.seaweed
def test_sessions_live_through_commands_kill_9_and_the_next_up(tmp_path, namespace_file, up):
    data = tmp_path / "data"
    with up(data) as (process, ready):
        url = ready["http"]
        assert ready["event"] == "ready"
        assert ready["url"] == f"kvtier+unix://{data}/node.sock"
        assert ready["store"].startswith("s3://kvtier/kv?endpoint=http://127.0.0.1:")

        [created] = kvtier(url, "sessions", "create", "empty", "--namespace", str(namespace_file), "--label", "team=search")
        assert (created["id"], created["version"], created["labels"]) == ("empty", 0, {"team": "search"})
        assert created["namespace"] == NAMESPACE.id
        kvtier(url, "sessions", "create", "empty", "--namespace", NAMESPACE.id, code=1)  # it lives

        receipts = commit(ready["url"], "chat", 4)
        assert [receipt.version for receipt in receipts] == [1, 2, 3, 4]
        [shown] = kvtier(url, "sessions", "show", "chat")
        assert (shown["version"], shown["tokens"], shown["blocks"]) == (4, 64, 4)

        [forked] = kvtier(url, "sessions", "fork", "chat", "other", "--version", "2")
        assert (forked["tokens"], forked["family"]) == (32, shown["family"])
        [rewound] = kvtier(url, "sessions", "rewind", "chat", "--tokens", "33")
        assert (rewound["version"], rewound["tokens"]) == (5, 32)
        [touched] = kvtier(url, "sessions", "touch", "chat", "--ttl", "2h")
        assert touched["ttl_s"] == 7200
        assert 7000 < touched["expires"] - touched["updated"] < 7300
        assert kvtier(url, "sessions", "pin", "chat")[0]["pinned"] is True
        assert kvtier(url, "sessions", "unpin", "chat")[0]["pinned"] is False
        assert [line["version"] for line in kvtier(url, "sessions", "versions", "chat")] == [5, 4, 3, 2, 1]
        assert [line["id"] for line in kvtier(url, "sessions", "ls")] == ["chat", "empty", "other"]
        assert [line["id"] for line in kvtier(url, "sessions", "ls", "o")] == ["other"]
        assert kvtier(url, "namespaces", "ls")[0]["fields"]["model"] == "tiny"
        [restored] = kvtier(url, "sessions", "restore", "chat", "--version", "4", "--tier", "nvme")
        assert (restored["state"], restored["staged_tokens"]) == ("ready", 64)
        assert kvtier(url, "stats")[0]["tiers"]["nvme"]["used"] > 0

        process.send_signal(signal.SIGKILL)
        process.wait()

    with up(data) as (process, ready):
        url = ready["http"]
        found = {line["id"]: line for line in kvtier(url, "sessions", "ls")}
        assert {name: (line["version"], line["tokens"]) for name, line in found.items()} == {
            "chat": (5, 32),
            "empty": (0, 0),
            "other": (forked["version"], 32),
        }
        assert [line["version"] for line in kvtier(url, "sessions", "versions", "chat")] == [5, 4, 3, 2, 1]
        links = kvstore.chain(NAMESPACE, text("chat", 4))
        with kvstore.open_sync(ready["url"]) as kv, kv.get(NAMESPACE, Shard(), links, deadline_ms=20_000) as blocks:
            kv_bytes = [bytes(lease.view[-KV_BYTES - 64 : -64]) for lease in blocks.leases]
        assert kv_bytes == [bytes([n + 1]) * KV_BYTES for n in range(4)]
        assert kvtier(url, "sessions", "rm", "other", "empty") == [
            {"id": "other", "deleted": True},
            {"id": "empty", "deleted": True},
        ]
        kvtier(url, "sessions", "show", "other", code=3)
        [collected] = kvtier(url, "collect", "--now")
        assert (collected["dry_run"], collected["failed"]) == (False, 0)

        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "stopping" in err
        assert not (data / "store.json").exists()
        assert not (data / "node.sock").exists()

    # The folder's server is down now: doctor and fsck start it for themselves.
    for command in (["doctor"], ["fsck", "--deep"]):
        done = subprocess.run([*COMMAND, *command, "--data", str(data)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.seaweed
def test_up_says_what_is_wrong_with_the_data_folder(tmp_path):
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [*COMMAND, "up", "--data", str(tmp_path / "file")], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: data folder {tmp_path / 'file'}")
    assert "Traceback" not in done.stderr
