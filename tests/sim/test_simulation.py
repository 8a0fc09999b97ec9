"""The real code, simulated: whatever the seed, every invariant holds; the same seed is the same run; and broken code is caught."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.mutants import MUTANTS, broken
from simulation.rounds import setup_of
from simulation.wire import Rates
from simulation.world import Setup, simulate

RUN = Path(__file__).with_name("run.py")
SEEDS = range(1, 25)
SEALED = (15, 22)  # rounds that are short
BOUND = 25  # seeds within which each mutant has to be caught
REAPING = 5  # a round of those in which dead heads are deleted


@pytest.mark.parametrize("seed", SEEDS)
def test_i1_to_i7_i9_i12_hold_whatever_fails(seed):
    """See `simulation.truth`, `history` and `world`: i1 i2 i3 i4 i5 i6 i7 i9 i12, with clocks off by up to an hour."""
    result = simulate(seed, setup_of(seed))
    assert result.violations == [], "\n".join([*result.tail[-40:], *result.violations])


@pytest.mark.parametrize("seed", SEALED)
def test_they_hold_in_a_sealed_bucket(seed):
    result = simulate(seed, setup_of(seed, sealed=True))
    assert result.violations == [], "\n".join([*result.tail[-40:], *result.violations])
    assert result.counts["acknowledged"] > 0


@pytest.mark.parametrize("name", ["no_seal", "epoch_first", "blind_swap"])
def test_what_is_wrong_in_a_sealed_bucket_is_seen(name):
    """By judges who read what is in its objects."""
    with broken(name) as mutant:
        violations = simulate(SEALED[0], setup_of(SEALED[0], sealed=True)).violations
    assert violations[0].split(":")[0] in mutant.rules, violations


def test_much_happens_in_these_runs():
    """What the runs above are made of; a simulation in which nothing goes wrong shows nothing."""
    counts = simulate(SEEDS[0], setup_of(SEEDS[0])).counts
    for what in ("acknowledged", "failed", "unknown", "crashes", "pauses", "stalls", "lost", "late", "collections", "deleted"):
        assert counts[what] > 0, what
    assert simulate(REAPING, setup_of(REAPING)).counts["reaped"] > 0


def test_the_same_seed_is_the_same_run():
    """To the last request and answer, in another process, whatever the order of its hash tables."""

    def digest(seed, hashes):
        command = [sys.executable, RUN, "--round", str(seed), "--digest"]
        return subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": hashes}, capture_output=True, text=True, check=True
        ).stdout.strip()

    first = digest(5, "1")
    assert first == digest(5, "2") == simulate(5, setup_of(5)).digest
    assert first != digest(6, "1")


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_code_is_caught(name):
    with broken(name) as mutant:
        usual = Setup(seconds=60.0, rates=Rates.lossy() if mutant.lossy else Rates())
        setup = setup_of(mutant.round) if mutant.round else usual
        for seed in range(1, BOUND + 1):
            violations = simulate(seed, setup).violations
            if violations:
                assert violations[0].split(":")[0] in mutant.rules, violations
                return
    pytest.fail(f"{name} ({mutant.about}) was not noticed in {BOUND} runs")
