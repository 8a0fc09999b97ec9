"""Nodes on a trace: every prompt is answered, adds up, and the product's router and sharing do what they are for."""

import random  # noqa: TID251  seeded

import msgspec
import pytest

from kvstore.errors import Invalid
from kvstore.mesh.replay import Replay
from kvstore.mesh.replay_costs import MACHINES
from kvstore.mesh.replay_nodes import Change, Setup, Store
from kvstore.mesh.replay_report import halves, pool, summary
from kvstore.mesh.replay_routers import ROUTERS
from kvstore.mesh.replay_trace import BLOCK_TOKENS, Request, read
from tiering.policy import Lru
from tiering.policy_reuse import Reuse

MACHINE = MACHINES["8b-h100"]


def key(number):
    return number.to_bytes(32, "little")


def chats(count=250, users=24, seed=2):
    """Conversations that all begin with the same block, some of them long; a turn about every 250 ms."""
    rng = random.Random(seed)
    fresh, chains, at, out = iter(range(1, 1 << 30)), {}, 0.0, []
    for _ in range(count):
        at += rng.expovariate(4)
        user = rng.randrange(users)
        chain = chains.get(user)
        if chain is None or len(chain) > 60:
            chain = [key(0), *(key(next(fresh)) for _ in range(40 if rng.random() < 0.2 else 4))]
        chains[user] = [*chain, *(key(next(fresh)) for _ in range(rng.randrange(1, 5)))]
        out.append(Request(at, len(chains[user]) * BLOCK_TOKENS - 100, chains[user]))
    return out


def run(requests, router="kvtier", **more):
    setup = Setup(machine=MACHINE, router=router, **{"nodes": 4, "dram": 300} | more)
    return Replay(setup, requests).run()


@pytest.mark.parametrize("router", ROUTERS)
def test_every_prompt_is_answered_once_and_its_tokens_add_up(router):
    requests = chats()
    found = run(requests, router)
    assert [one.at_s for one in found] == pytest.approx([one.at_s - requests[0].at_s for one in requests])
    for one, request in zip(found, requests, strict=True):
        assert one.found.split + one.found.tokens.computed == request.tokens
        assert one.hits <= one.blocks == len(request.keys)
        assert one.ttft_s > 0.999 * (one.load_s + one.compute_s) > 0
    assert run(requests, router) == found  # and the same again


def test_one_node_alone_hits_what_one_cache_hits():
    requests = [Request(at * 100.0, one.tokens, one.keys) for at, one in enumerate(chats())]  # one after the other
    setup = Setup(machine=MACHINE, router="round-robin", nodes=1, dram=300)
    found = Replay(setup, requests).run()
    assert sum(one.hits for one in found) / sum(one.blocks for one in found) == pytest.approx(pool(setup, requests), abs=0.002)


def test_without_sharing_nothing_comes_from_peers_and_with_it_little_is_lost():
    requests = chats()
    alone, shared = run(requests, "round-robin", sharing=False), run(requests, "round-robin")
    assert all(one.found.tokens.peer == 0 for one in alone)
    whole = pool(Setup(machine=MACHINE, router="", nodes=4, dram=300), requests)
    rates = [summary(found, MACHINE).hit_rate for found in (alone, shared)]
    assert rates[0] < 0.5 * whole
    assert rates[1] > 0.9 * whole


@pytest.mark.parametrize("other", ["round-robin", "session-hash", "longest-prefix"])
def test_the_price_answers_sooner_than_rules_and_keeps_the_balance(other):
    requests = chats(600)
    ours, theirs = (summary(run(requests, name, speed=3.0), MACHINE) for name in ("kvtier", other))
    assert ours.mean_s < theirs.mean_s
    assert ours.p95_s < theirs.p95_s
    assert ours.imbalance < 1.3


def test_its_router_foresees_what_happens():
    found = run(chats())
    assert all(one.predicted_s > 0 for one in found)
    assert summary(found, MACHINE).off < 0.1


@pytest.mark.parametrize("router", ROUTERS)
def test_a_death_costs_nobody_the_answer(router):
    requests = chats()
    changes = [Change(20.0, "n1", joins=False), Change(25.0, "n9", joins=True), Change(30.0, "n1", joins=True)]
    changes += [Change(35.0, "n9", joins=False), Change(35.5, "n9", joins=True)]  # before its death is noticed
    found = run(requests, router, changes=changes)
    assert len(found) == len(requests)
    assert not [one for one in found if one.node == "n1" and 20 < one.at_s + one.ttft_s < 30]
    if router != "longest-prefix":  # it stays where it was
        assert {"n1", "n9"} <= {one.node for one in found if one.at_s > 31}


def test_disk_and_bucket_have_what_memory_let_go():
    requests = chats()
    little = run(requests, dram=60)
    disk, bucket = run(requests, dram=60, nvme=4000), run(requests, dram=60, bucket=True)
    hits = [sum(one.hits for one in found) for found in (little, disk, bucket)]
    assert hits[0] < 0.8 * hits[1]
    assert hits[0] < 0.8 * hits[2]
    assert any(one.found.tokens.nvme for one in disk)
    slow = msgspec.structs.replace(MACHINE, speeds=msgspec.structs.replace(MACHINE.speeds, token_s=1e-3))
    far = Replay(Setup(machine=slow, router="kvtier", nodes=4, dram=60, bucket=True), requests).run()
    assert any(one.found.tokens.bucket for one in far)


def test_a_store_never_holds_more_than_it_has_room_for():
    for policy in (Reuse, Lru):
        store = Store(50, policy())
        for request in chats(100):
            store.policy.asked(request.keys)
            before = set(store.held)
            new, gone = store.put(request.keys)
            assert len(store.held) <= 50
            assert store.held == (before - set(gone)) | set(new)


def test_what_came_from_peers_makes_way_first():
    store = Store(4, Reuse())
    store.put([key(1), key(2)])
    store.put([key(8), key(9)], last=True)
    assert store.put([key(3), key(4)])[1] == [key(9), key(8)]
    assert store.held == {key(1), key(2), key(3), key(4)}


def test_figures_of_a_run():
    found = run(chats(100))
    whole = summary(found, MACHINE)
    first, second = (summary(half, MACHINE) for half in halves(found))
    assert whole.computed_tokens == first.computed_tokens + second.computed_tokens
    assert min(first.mean_s, second.mean_s) <= whole.mean_s <= max(first.mean_s, second.mean_s)
    assert whole.p50_s <= whole.p95_s <= whole.p99_s
    figures = {one.name: one for one in whole.figures("x", first, 0.5)}
    assert figures["x.mean_s"].ratio == pytest.approx(whole.mean_s / first.mean_s)
    assert figures["x.hit_rate"].baseline == 0.5
    assert set(msgspec.to_builtins(figures["x.p95_s"])) == {"name", "value", "unit", "baseline", "ratio"}


LINE = '{"timestamp": 27482, "input_length": 1000, "output_length": 52, "hash_ids": [46, 47]}\n'


def test_a_trace_is_read_in_the_order_of_time(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(LINE + "\n" + LINE.replace("27482", "5"))
    found = read(path)
    assert [one.at_s for one in found] == [0.005, 27.482]
    assert found[0].keys == [key(46), key(47)]
    assert found[0].tokens == 1000


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "line 2"),
        (LINE.replace("27482", '"x"'), "timestamp"),
        (LINE.replace("27482", "-1"), "timestamp"),
        (LINE.replace('"input_length": 1000, ', ""), "input_length"),
        (LINE.replace("1000", "99999999999"), "input_length"),
        (LINE.replace("1000", "0"), "input_length"),
        (LINE.replace("47]", "4.5]"), "hash_ids[1]"),
        (LINE.replace("47]", "47, 48]"), "hash_ids"),
        (LINE.replace("46", "9223372036854775808"), "hash_ids[0]"),
        ('"' + "x" * (1 << 20), "longer"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, text, named):
    path = tmp_path / "t.jsonl"
    path.write_text(LINE + text)
    with pytest.raises(Invalid, match="line 2") as caught:
        read(path)
    assert named in caught.value.message


def test_no_trace_is_an_error(tmp_path):
    with pytest.raises(Invalid, match="cannot read"):
        read(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(Invalid, match="no requests"):
        read(tmp_path / "empty")
