"""Policies: what every one keeps to, and what the measured one gains where use before tells of use again."""

import json
import os
import random  # noqa: TID251  seeded
from pathlib import Path

import pytest

from tiering.policy import Lru, SecondSight
from tiering.policy_reuse import Reuse


def key(number):
    return number.to_bytes(8, "little")


def replay(requests, capacity, policy):
    """Hits per block asked for."""
    held, hits, asked = set(), 0, 0
    for request in requests:
        policy.asked(request)
        asked += len(request)
        for one in request:
            if one in held:
                hits += 1
                continue
            if len(held) == capacity:
                held.remove(policy.victim())
            held.add(one)
            policy.add(one)
        assert len(held) <= capacity
    return hits / asked


@pytest.mark.parametrize("seed", range(6))
def test_a_policy_ranks_exactly_what_may_go(seed):
    rng, policy = random.Random(seed), Reuse()
    ranked, first = set(), []
    for step in range(3000):
        start, one = rng.randrange(60), key(rng.randrange(80))
        match rng.randrange(6):
            case 0:
                policy.asked([key(start + at) for at in range(rng.randrange(1, 20))], rng.choice([0, 0, 3, 20]))
            case 1:
                policy.add(one)
                ranked.add(one)
                first = [other for other in first if other != one]
            case 2:
                policy.remove(one)
                ranked.discard(one)
                first = [other for other in first if other != one]
            case 3 if step % 3 == 0:
                policy.first(one)
                ranked.add(one)
                first = [one, *(other for other in first if other != one)]
            case 4:
                policy.asked([key(rng.randrange(80)) for _ in range(8)])  # no chain at all, with repeats
            case _:
                victim = policy.victim()
                assert (victim is None) == (not ranked)
                if victim is not None:
                    assert victim in ranked
                    if first:
                        assert victim == first.pop(0)
                    ranked.remove(victim)
    rest = policy.victims(len(ranked) + 5)
    assert len(rest) == len(ranked)
    assert set(rest) == ranked
    assert policy.victim() is None


def test_what_was_given_up_and_is_used_after_all_has_its_place_again():
    policy = Reuse()
    policy.asked([key(1), key(2)])
    policy.add_many([key(1), key(2)])
    policy.first(key(1))
    policy.touch(key(1))
    assert policy.victim() == key(2)


def test_what_was_told_before_is_no_use_and_what_follows_it_is_one_run():
    policy = Reuse()
    chain = [key(number) for number in range(9)]
    policy.asked(chain[:4])  # the fourth is its last block, until it goes on
    policy.add_many(chain)
    policy.asked(chain, 9)
    runs = {id(run): run for run in policy._home.values()}.values()
    assert sorted(len(run.keys) for run in runs) == [1, 3, 5]
    assert all(run.uses == 1 for run in runs)
    assert {run.keys[0]: run.kind for run in runs}[chain[8]] == 0
    assert policy._now == 4 + 6
    assert sorted(policy.victims(20)) == sorted(chain)


def test_a_run_goes_from_its_end():
    policy = Reuse()
    chain = [key(number) for number in range(6)]
    policy.asked(chain)
    for one in chain:
        policy.add(one)
    assert [policy.victim() for _ in range(6)] == [*reversed(chain)]


def test_what_left_is_forgotten_in_the_end():
    policy = Reuse()
    for number in range(0, 400_000, 50):
        chain = [key(number + at) for at in range(50)]
        policy.asked(chain)
        policy.add_many(chain)
        policy.victims(50)
    assert len(policy._home) <= 131_072 + 50


def conversations(seed, requests=2500):
    """Two in three are one question with a long text, that nobody comes back to; the third goes on for turns."""
    rng, fresh, open_ = random.Random(seed), iter(range(1, 1 << 30)), []
    for _ in range(requests):
        if open_ and rng.random() < 0.4:
            chain = open_[rng.randrange(len(open_))]
            chain += [key(next(fresh)) for _ in range(2)]
            if len(chain) > 30:
                open_.remove(chain)
        elif rng.random() < 0.4:
            chain = [key(next(fresh)) for _ in range(8)]
            open_.append(chain)
            open_ = open_[-40:]
        else:
            chain = [key(next(fresh)) for _ in range(24)]
        yield list(chain)


def test_it_beats_recency_where_single_questions_flood_conversations():
    requests = list(conversations(1))
    ours, recency = replay(requests, 400, Reuse()), replay(requests, 400, Lru())
    assert ours > 1.15 * recency


def test_it_is_as_good_as_recency_where_all_is_recency():
    rng = random.Random(2)
    requests = [[key(int(rng.paretovariate(0.9)) % 5000)] for _ in range(30_000)]
    assert replay(requests, 300, Reuse()) > 0.97 * replay(requests, 300, Lru())


@pytest.mark.parametrize(("capacity", "least"), [(3_000, 0.135), (10_000, 0.241), (30_000, 0.336)])
def test_the_conversation_trace(capacity, least):
    path = Path(os.environ.get("KVTIER_TRACE", "mooncake_conversation_trace.jsonl"))
    if not path.is_file():
        pytest.skip("KVTIER_TRACE names no conversation trace")
    with path.open() as lines:
        requests = [[key(block) for block in json.loads(line)["hash_ids"]] for line in lines]
    assert replay(requests, capacity, Reuse()) >= least


def test_second_sight_turns_a_key_away_once():
    policy = SecondSight()
    assert [policy.admit(key(1), 1), policy.admit(key(2), 1), policy.admit(key(1), 1)] == [False, False, True]
    for number in range(3, 140_000):
        policy.admit(key(number), 1)
    assert not policy.admit(key(2), 1)  # so long ago that it is forgotten
