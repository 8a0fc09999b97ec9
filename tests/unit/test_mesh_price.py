"""Milliseconds to first token: against a plain search over all splits, and where the terms come from."""

import math
import random  # noqa: TID251  seeded

import msgspec
import numpy as np
import pytest

from kvstore.mesh.price import SOURCES, Speed, Speeds, Table, price

KB = 1000
SPEEDS = Speeds(1e-5, 1e-9, Speed(1e-4, 4e10), Speed(1e-3, 6e9), Speed(1e-3, 1e10), Speed(5e-2, 2e9))

SLOW = Speeds(1e-2, 0.0, SPEEDS.dram, SPEEDS.nvme, SPEEDS.peer, SPEEDS.bucket)


def flags(*runs):
    """One candidate: the names of the sources of each run."""
    return np.array([[[name in run] for run in runs] for name in SOURCES], np.bool_).reshape(len(SOURCES), 1, len(runs))


def priced(bounds, tokens, here, speeds=SPEEDS, token_bytes=100 * KB):
    return price(Table(["e"], [speeds]), bounds, tokens, token_bytes, here).of(0)


def computing(start, stop, speeds=SPEEDS):
    return sum(speeds.token_s + speeds.position_s * at for at in range(start, stop)) * 1e3


def test_nothing_stored_is_all_computed():
    found = priced([0], 1000, flags())
    assert found.compute_ms == pytest.approx(computing(0, 1000))
    assert (found.load_ms, found.split, found.found, found.tokens.computed) == (0, 0, 0, 1000)


def test_what_the_gpu_holds_costs_nothing_but_the_last_token():
    found = priced([0, 1000], 1000, flags({"gpu", "dram"}))
    assert found.split == 999
    assert found.load_ms == 0
    assert found.ms == pytest.approx(computing(999, 1000))
    assert found.tokens.gpu == 999


def test_each_run_comes_from_where_it_is_soonest():
    here = flags({"nvme", "dram"}, {"bucket", "peer"}, {"bucket", "nvme"})
    found = priced([0, 100, 200, 300], 1000, here, SLOW)
    assert (found.tokens.dram, found.tokens.peer, found.tokens.nvme, found.tokens.bucket) == (100, 100, 100, 0)
    nbytes = 100 * 100 * KB
    assert found.load_ms == pytest.approx(1e3 * (1e-4 + nbytes / 4e10 + 1e-3 + nbytes / 1e10 + 1e-3 + nbytes / 6e9))


def test_runs_of_one_source_that_follow_each_other_are_one_request():
    apart, whole = priced([0, 100, 200], 1000, flags({"dram"}, {"dram", "bucket"})), priced([0, 200], 1000, flags({"dram"}))
    assert apart.load_ms == pytest.approx(whole.load_ms)


def test_the_first_hole_ends_what_can_be_loaded():
    found = priced([0, 100, 200, 300], 1000, flags({"dram"}, set(), {"gpu"}))
    assert (found.split, found.found) == (100, 100)


def test_the_tail_is_computed_where_loading_it_takes_longer():
    found = priced([0, 800, 900], 1000, flags({"dram"}, {"bucket"}))  # 50 ms for what is computed in 1
    assert (found.split, found.found, found.tokens.bucket) == (800, 900, 0)
    assert priced([0, 800, 900], 1000, flags({"dram"}, {"bucket"}), SLOW).split == 900


def test_queue_and_imbalance_are_added_and_told_apart():
    table = Table(["idle", "busy"], [SPEEDS, SPEEDS])
    table.queue_s[:] = [0.0, 0.25]
    table.busy[:] = [0.0, 0.5]
    both = price(table, [0], 1000, KB, np.zeros((len(SOURCES), 2, 0), np.bool_))
    idle, busy = both.of(0), both.of(1)
    assert (idle.queue_ms, idle.imbalance_ms, busy.queue_ms) == (0, 0, 250)
    assert busy.imbalance_ms == pytest.approx(busy.compute_ms)  # half of the time busy: who comes next waits as long again
    assert busy.ms == pytest.approx(250 + busy.compute_ms)
    assert both.price.tolist() == pytest.approx([idle.price, busy.price])
    assert busy.price == pytest.approx(busy.ms + busy.imbalance_ms)


def test_nobody_is_infinitely_dear():
    table = Table(["e"], [SPEEDS])
    table.busy[:] = 7.0
    assert math.isfinite(price(table, [0], 10, KB, np.zeros((len(SOURCES), 1, 0), np.bool_)).of(0).price)


def plainly(table, row, bounds, tokens, token_bytes, here):
    """The least over all splits, one after the other."""
    loads = [table.queue_s[row] * 1e3]
    last = None
    for run in range(len(bounds) - 1):
        nbytes = (bounds[run + 1] - bounds[run]) * token_bytes
        among = [
            (table.latency_s[at, row] + nbytes * table.byte_s[at, row], at) for at in range(len(SOURCES)) if here[at, row, run]
        ]
        if not among:
            break
        seconds, at = min(among)
        loads.append(loads[-1] + 1e3 * (seconds - (table.latency_s[at, row] if at == last else 0)))
        last = at
    totals = []
    for split, load in enumerate(loads):
        start = min(bounds[split], tokens - 1)
        positions = sum(range(start, tokens))
        totals.append(load + 1e3 * (table.token_s[row] * (tokens - start) + table.position_s[row] * positions))
    return min(totals)


def test_it_finds_what_a_plain_search_finds():
    rng = random.Random(3)
    for _ in range(60):
        speeds = [
            Speeds(
                rng.uniform(1e-6, 1e-4),
                rng.uniform(0, 1e-8),
                *(Speed(rng.uniform(0, 0.02), 10 ** rng.uniform(8, 11)) for _ in range(4)),
            )
            for _ in range(4)
        ]
        table = Table(list("abcd"), speeds)
        table.queue_s[:] = [rng.random() for _ in range(4)]
        runs, tokens = rng.randrange(6), rng.randrange(1, 3000)
        bounds = sorted(rng.sample(range(1, tokens + 1), min(runs, tokens)))
        bounds = [0, *bounds]
        here = np.array([[[rng.random() < 0.5 for _ in bounds[1:]] for _ in range(4)] for _ in SOURCES], np.bool_)
        found = price(table, bounds, tokens, 10_000, here)
        for row in range(4):
            one = found.of(row)
            assert one.ms == pytest.approx(plainly(table, row, bounds, tokens, 10_000, here))
            parts = one.tokens
            assert parts.gpu + parts.dram + parts.nvme + parts.peer + parts.bucket == one.split <= one.found or one.split == 0
            assert parts.computed + one.split == tokens


def test_a_pass_takes_its_time_once_wherever_the_split_is():
    here, slow = flags({"dram"}, {"bucket"}), msgspec.structs.replace(SPEEDS, pass_s=0.05)
    for tokens in (200, 201, 5000):
        bare, found = priced([0, 100, 200], tokens, here), priced([0, 100, 200], tokens, here, slow)
        assert (found.split, found.load_ms) == (bare.split, bare.load_ms)
        assert found.compute_ms == pytest.approx(bare.compute_ms + 50)
