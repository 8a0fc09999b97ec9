"""`kvtier plan`: its formulas against what a store really holds and was asked, and its sums against arithmetic by hand."""

import json

import msgspec
import pytest
from typer.testing import CliRunner

import kvstore
from kvstore import api
from kvstore.cli.commands import app
from kvstore.cli.planning import _RESUME_GETS, DAY, Load, capacity, month
from kvstore.errors import Invalid
from kvstore.ids import Group, Namespace, Shard

NS = Namespace(model="tiny", revision="r1", layers=4, kv_heads=2, head_dim=16, dtype="F16", block_tokens=16)
GROUPS = msgspec.structs.replace(NS, groups=(Group(layers=(0, 1)), Group(kind="window", window=32, layers=(2, 3))))


def load(**more):
    return Load(
        **{"namespace": NS, "tokens": 112, "turns": 3, "sessions": 1.0, "lasts": 0, "dram_for": 0, "nvme_for": 0, "ttl": 1} | more
    )


def converse(kv, namespace, shards, lengths):
    """One session, a turn for each length; the last one ends in a partial block where it is not whole."""
    version, have = 0, 0
    for length in lengths:
        links = kvstore.chain(namespace, range(length), partial=length == lengths[-1])
        for shard in shards:
            assert all(kv.put(namespace, shard, links[have:], lambda _, room: room.__setitem__(slice(None), bytes(len(room)))))
        receipt = kv.commit(
            "s", namespace=namespace, base_version=version, blocks=links, shards=[str(each) for each in shards], durability="bucket"
        )  # fmt: skip
        version, have = receipt.version, length // namespace.block_tokens
    return receipt


@pytest.mark.parametrize(
    ("namespace", "ranks", "lengths"),
    [(NS, 1, (40, 80, 112)), (NS, 1, (40, 80, 120)), (NS, 2, (40, 80, 120)), (GROUPS, 1, (40, 120)), (NS, 1, (64,))],
    ids=["whole", "partial", "ranks", "groups", "once"],
)
def test_a_stored_session_is_as_large_as_planned_and_took_as_many_requests(namespace, ranks, lengths, request):
    planned = load(namespace=namespace, ranks=ranks, tokens=lengths[-1], turns=len(lengths))
    objects = planned.blocks * len(planned.shards())
    url = f"memory://{request.node.callspec.id}"  # stays while this process lives
    with kvstore.open_sync(url) as kv:
        receipt = converse(kv, namespace, planned.shards(), lengths)
        assert receipt.blocks == planned.blocks
        assert kv.collect(dry_run=True).live_bytes == planned.session_bytes
        mine = next(each.requests for each in kv.stats().cost if each.namespace == namespace.id)
        naming = sum(each.requests.get("put", 0) for each in kv.stats().cost if each.tenant and not each.namespace)
    assert mine["put"] + naming - 1 == planned.requests()["put"]  # the namespace's own fields are stored once
    assert mine["head"] <= planned.requests()["head"]
    with kvstore.open_sync(url) as kv:  # another node: it has nothing but the bucket
        status = kv.wait(kv.restore("s", tier="dram"))
        assert (status.state, status.staged_bytes) == ("ready", planned.session_bytes)
        rows = [each for each in kv.stats().cost if each.tenant]
        assert sum(each.requests.get("get", 0) for each in rows) - 1 == _RESUME_GETS + objects  # and those fields, once


def test_each_tier_holds_what_arrives_while_it_stays():
    planned = load(sessions=2.0, lasts=100, dram_for=400, nvme_for=900, ttl=9900, nodes=4, ratio=2.0, cold=0.25, collect_every=1000)
    session = planned.session_bytes
    found = {line.name: line.value for line in capacity(planned, beside=7)}
    assert found["dram.size"] == 2 * 500 * session / 4
    assert found["memory limit"] == found["dram.size"] + 7
    assert found["nvme.size"] == 2 * 1000 * session / 4
    assert found["bucket"] == 2 * 11_000 * session / 2
    assert found["to bucket"] == 2 * session / 2
    assert found["from bucket"] == 0.25 * 2 * session * (0 + 1 + 2) / 3 / 2  # turns begin with 0, 1 and 2 thirds


def test_sums_are_those_of_the_prices_and_what_is_unknown_is_left_out():
    planned = load(sessions=1000 / DAY, ttl=DAY, collect_every=DAY, cold=0.0)
    prices = api.Prices(currency="USD", put_1000=5.0, gb_month=10.0, gpu_hour=3600.0)
    found = {line.name: (line.value, line.unit) for line in month(planned, prices, prefill=112.0)}
    puts = 30_000 * (7 + 4 + 2 * 2 + 1)
    assert found["put"] == (pytest.approx(puts), "requests")
    assert found["requests"] == (pytest.approx(puts / 1000 * 5), "USD")
    assert found["storage"] == (pytest.approx(1000 * 2 * planned.session_bytes / 1e9 * 10), "USD")
    assert found["GPU time"] == (pytest.approx(30_000 / 3600), "hours")  # a second each: 112 tokens of later turns were there
    assert found["avoided"] == (pytest.approx(30_000), "USD")
    assert "egress" not in found
    assert not {"requests", "storage", "avoided", "GPU time"} & {line.name for line in month(planned, api.Prices(), prefill=0.0)}


def test_a_size_without_an_end_is_refused():
    with pytest.raises(Invalid, match="time to live"):
        list(capacity(load(ttl=0), beside=0))


def test_the_command_takes_a_shape_a_file_and_the_settings_of_the_node(tmp_path):
    file = tmp_path / "ns.json"
    file.write_bytes(msgspec.json.encode(NS))

    def lines(*more):
        result = CliRunner().invoke(app, ["plan", "--sessions", "100", "--tokens", "112", "--format", "json", *more])
        assert result.exit_code == 0, result.output
        return {each["name"]: each["value"] for each in map(json.loads, result.stdout.splitlines())}

    assert lines("--namespace", str(file))["session"] == load().session_bytes
    assert lines("--model", "32x8x128")["token"] > 32 * 8 * 128 * 2 * 2
    short, long = lines("--set", "lifecycle.session_ttl=1d"), lines("--set", "lifecycle.session_ttl=11d")
    assert long["bucket"] - short["bucket"] == pytest.approx(1000 * short["session"])
    refused = CliRunner().invoke(app, ["plan", "--sessions", "1", "--tokens", "1", "--namespace", str(tmp_path / "none.json")])
    assert refused.exit_code == 2


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(Invalid, match="do not divide"):
        list(capacity(load(ranks=3), beside=0))


def test_shards_of_ranks_and_groups_are_each_an_object():
    assert load(namespace=GROUPS, ranks=2).shards() == [Shard(rank=r, ranks=2, group=g) for g in (0, 1) for r in (0, 1)]
