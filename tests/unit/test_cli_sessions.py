"""Commands about sessions, against a node inside this process: what they print, and how they end."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

import kvstore
from kvstore import api
from kvstore.cli.commands import app
from kvstore.cli.cost import _money, _signed
from kvstore.ids import Namespace, Shard

NAMESPACE = Namespace(model="tiny/model", revision="r1", layers=1, kv_heads=1, head_dim=16, dtype="F32", block_tokens=16)


@pytest.fixture
def url(root):
    return f"memory://{root}?dram=16MiB"


@pytest.fixture
def kvtier(url):
    def run(*arguments, code=0):
        result = CliRunner().invoke(app, [*arguments, "--url", url], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def chat(url):
    """A session with two versions of 16 and 40 tokens."""
    links = kvstore.chain(NAMESPACE, range(40), partial=True)
    with kvstore.open_sync(url) as kv:
        assert kv.put(NAMESPACE, Shard(), links, lambda _, room: room.__setitem__(slice(None), bytes(len(room)))) == [True] * 3
        kv.commit("chat", namespace=NAMESPACE, base_version=0, blocks=links[:1])
        kv.commit("chat", namespace=NAMESPACE, base_version=1, blocks=links, labels={"team": "[red]search"})
    return "chat"


def lines(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def rows(result):
    return [line.split() for line in result.stdout.splitlines()]


def test_a_session_as_a_table_and_as_json(kvtier, chat):
    shown = dict(row[:2] for row in rows(kvtier("sessions", "show", chat)))
    assert (shown["id"], shown["version"], shown["tokens"], shown["blocks"]) == ("chat", "2", "40", "3")
    assert shown["labels"] == "team=[red]search"  # markup of others is text
    [found] = lines(kvtier("sessions", "show", chat, "--format", "json"))
    assert (found["id"], found["version"], found["tokens"], found["namespace"]) == ("chat", 2, 40, NAMESPACE.id)


def test_a_namespace_is_named_by_what_the_tables_show_of_it(kvtier, chat):
    [header, row] = rows(kvtier("sessions", "ls"))
    shown = row[header.index("namespace") - len(header)]
    assert shown == NAMESPACE.id[: len(shown)]
    [found] = lines(kvtier("sessions", "show", chat, "--namespace", shown, "--format", "json"))
    [made] = lines(kvtier("sessions", "create", "other", "--namespace", shown, "--format", "json"))
    assert (found["namespace"], made["namespace"]) == (NAMESPACE.id, NAMESPACE.id)
    assert "there is no namespace" in kvtier("sessions", "show", chat, "--namespace", "0" * 12, code=3).stderr


def test_the_list_is_complete_over_pages_and_says_when_there_is_more(kvtier, url):
    with kvstore.open_sync(url) as kv:
        for number in range(7):
            kv.create_session(f"s{number}", namespace=NAMESPACE)
    assert [line["id"] for line in lines(kvtier("sessions", "ls", "--format", "json"))] == [f"s{n}" for n in range(7)]
    some = kvtier("sessions", "ls", "s", "--limit", "3")
    assert [row[0] for row in rows(some)] == ["id", "s0", "s1", "s2"]
    assert "there are more" in some.stderr
    assert kvtier("sessions", "ls", "nobody").stderr == "no sessions\n"


def test_versions_and_rewind(kvtier, chat):
    assert [row[:2] for row in rows(kvtier("sessions", "versions", chat))[1:]] == [["2", "40"], ["1", "16"]]
    [back] = lines(kvtier("sessions", "rewind", chat, "--version", "1", "--format", "json"))
    assert (back["version"], back["tokens"]) == (3, 16)
    current = [row for row in rows(kvtier("sessions", "versions", chat)) if row[-1] == "current"]
    assert [row[0] for row in current] == ["3"]


def test_rm_goes_on_behind_one_that_is_not_there_and_says_so(kvtier, url):
    with kvstore.open_sync(url) as kv:
        for name in ("a", "b", "c", "d"):
            kv.create_session(name, namespace=NAMESPACE)
    done = kvtier("sessions", "rm", "a", "missing", "b", code=3)
    assert done.stdout == "deleted a\ndeleted b\n"
    assert done.stderr.startswith("error: there is no session 'missing'")
    told = lines(kvtier("sessions", "rm", "c", "../x", "missing", "d", "--format", "json", code=2))  # that of the first
    assert [line["deleted"] for line in told] == [True, False, False, True]
    assert [line.get("kind") for line in told] == [None, "invalid", "not_found", None]
    assert rows(kvtier("sessions", "ls")) == []


def test_a_failed_restore_says_what_kind_of_failure_it_was(kvtier, chat):
    [status] = lines(kvtier("sessions", "restore", chat, "--version", "9", "--format", "json", code=3))
    assert (status["state"], status["kind"]) == ("failed", "not_found")


def test_restore_tells_what_is_where(kvtier, chat):
    table = kvtier("sessions", "restore", chat).stdout
    assert "40 of 40 in dram" in table
    [status] = lines(kvtier("sessions", "restore", chat, "--version", "1", "--deadline", "10s", "--format", "json"))
    assert (status["state"], status["staged_tokens"], status["tier"]) == ("ready", 16, "dram")
    [status] = lines(kvtier("sessions", "restore", chat, "--no-wait", "--format", "json"))
    assert status["state"] in {"resolving", "staging", "ready"}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["sessions", "show", "nobody"], 3, "nobody"),
        (["sessions", "rm", "nobody"], 3, "nobody"),
        (["sessions", "fork", "chat", "chat"], 1, "chat"),
        (["sessions", "create", "x", "--namespace", "/nowhere.json"], 3, "neither a file nor the id"),
        (["sessions", "create", "x", "--namespace", "0" * 64], 3, "0" * 64),
        (["sessions", "create", "x", "--namespace", "README.md"], 2, "does not hold a namespace's fields"),
        (["sessions", "create", "x", "--namespace", "0" * 64, "--label", "team"], 2, "team=search"),
        (["sessions", "touch", "chat", "--ttl", "soon"], 2, "30s, 12h or 7d"),
        (["sessions", "rewind", "chat"], 2, "exactly one of --version and --tokens"),
        (["sessions", "rewind", "chat", "3"], 2, "exactly one of --version and --tokens"),
        (["sessions", "restore", "chat", "--tier", "tape"], 2, "dram, nvme or bucket"),
        (["sessions", "restore", "chat", "--version", "9"], 3, "9"),
        (["sessions", "show", "../x"], 2, "path part"),
    ],
)
def test_what_cannot_be_done_ends_with_a_status_and_a_remedy(kvtier, chat, arguments, code, says):
    result = kvtier(*arguments, code=code)
    first, second = result.stderr.splitlines()
    assert first.startswith("error: ")
    assert says in first
    assert second.startswith("  ")
    assert result.stdout == ""


def test_removed_sessions_are_gone_and_the_next_collection_frees_them(kvtier, chat):
    assert kvtier("sessions", "rm", chat).stdout == "deleted chat\n"
    kvtier("sessions", "show", chat, code=3)
    counted = kvtier("collect", "--dry-run").stdout
    assert "to delete" in counted
    [done] = lines(kvtier("collect", "--now", "--format", "json"))
    assert (done["blocks_kept"], done["blocks_deleted"], done["manifests_kept"]) == (0, 3, 0)
    assert "0 kept" in kvtier("collect").stdout


def test_namespaces_and_stats(url, kvtier, chat):
    assert rows(kvtier("namespaces", "ls"))[1][:3] == [NAMESPACE.id[:12], "tiny/model", "r1"]
    assert rows(kvtier("namespaces", "ls"))[1][-2:] == ["unknown", "unknown"]  # no collection has told
    kvtier("collect", "--now")
    with kvstore.open_sync(url) as kv:  # the node that collects knows, and only it so soon
        kv.collect()
        assert rows(kvtier("namespaces", "ls"))[1][-3] == "3"
    table = kvtier("stats").stdout
    [bucket] = [line for line in table.splitlines() if line.startswith("bucket ")]
    assert bucket.count("0 B") == 3  # in, out and queued: no limit is shown where there is none
    assert bucket.split()[1] == "-"  # what it holds is counted by nobody
    assert "dram" in table
    assert "store requests" in table
    [found] = lines(kvtier("stats", "--format", "json"))
    assert found["tiers"]["dram"]["limit"] == 16 << 20


def test_cost_shows_what_was_counted_and_no_sums_without_prices(url, kvtier, monkeypatch):
    shown = kvtier("cost")
    assert [row[0] for row in rows(shown)] == ["tenant", "(shared)"]  # a node of this command's own has only looked at its store
    assert "USD" not in shown.stdout
    assert "no sums" in shown.stderr
    [found] = lines(kvtier("cost", "--format", "json"))
    assert (found["tenant"], found["source"]) == ("", "")
    assert found["requests"]["put"] >= 1
    row = api.Cost(
        tenant="ann", namespace=NAMESPACE.id, model="m", stored=-1, requests_cost=1234.5, avoided_s=-5.0, recompute_s=1.0
    )
    with kvstore.open_sync(url) as kv:
        stats = msgspec.structs.replace(kv.stats(), cost=[row], prices=api.Prices(currency="EUR", source="a list", put_1000=1))
    monkeypatch.setattr("kvstore.cli.cost.open_sync", lambda _: nullcontext(SimpleNamespace(stats=lambda: stats)))
    shown = kvtier("cost")
    assert "requests, EUR" in shown.stdout
    assert "egress" not in shown.stdout
    assert rows(shown)[1][:3] == ["ann", NAMESPACE.id[:12], "m"]
    assert "-5 s" in shown.stdout
    assert "unknown" in rows(shown)[1]  # nothing was collected: what is stored is not known
    assert "1,234.50" in shown.stdout
    assert "estimates by a list" in shown.stderr


def test_no_zero_of_cost_has_a_sign():
    assert (_signed(-0.4), _signed(-1.0), _signed(0.4)) == ("0 s", "-1 s", "0 s")
    assert (_money(-0.00001), _money(-0.5)) == ("0.0000", "-0.5000")


def test_a_node_that_is_not_there_is_unavailable():
    result = CliRunner().invoke(app, ["sessions", "ls", "--url", "kvtier://127.0.0.1:9"], catch_exceptions=False)
    assert result.exit_code == 4
    assert "kvtier up" in result.stderr


def test_a_session_made_now_lives_as_long_as_was_asked(kvtier, chat):
    said = dict(line.split(maxsplit=1) for line in kvtier("sessions", "touch", chat, "--ttl", "7d").stdout.splitlines())
    assert said["expires"].strip() == "in 7 d"
    said = dict(line.split(maxsplit=1) for line in kvtier("sessions", "fork", chat, "copy", "--ttl", "36h").stdout.splitlines())
    assert said["expires"].strip() == "in 1 d 12 h"


@pytest.mark.parametrize(("store", "shown"), [("s3://bucket/x", True), ("", False)])
def test_stats_of_a_node_without_a_bucket_are_silent_about_it(url, kvtier, store, shown, monkeypatch):
    with kvstore.open_sync(url) as kv:
        found, health = msgspec.structs.replace(kv.stats(), store=store), kv.ready()
    node = SimpleNamespace(stats=lambda: found, ready=lambda: health)
    monkeypatch.setattr("kvstore.cli.stats.open_sync", lambda _: nullcontext(node))
    said = {line.split("  ")[0] for line in kvtier("stats").stdout.splitlines()}
    assert {"node", "reads", "damaged reads"} <= said
    assert all((line in said) is shown for line in ("breaker", "store requests", "codec", "collections", "live in the bucket"))
