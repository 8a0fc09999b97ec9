"""The protocol is safe in every small instance, and stops being safe as soon as any one rule is broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from protocol_model.explore import explore, walk
from protocol_model.mutants import MUTANTS
from protocol_model.rules import Rules
from protocol_model.scenarios import SCENARIOS, WALK, machine


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_interleaving_is_safe(name):
    verdict = explore(machine(SCENARIOS[name].small))
    assert not verdict.violation, "\n".join(verdict.trace)
    assert verdict.complete
    idle = SCENARIOS[name].does - verdict.verbs
    assert not idle, "the instance never does what it is there to check"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_caught(name):
    mutant = MUTANTS[name]
    verdict = explore(machine(SCENARIOS[mutant.scenario].small.but(rules=mutant.rules)))
    assert mutant.caught_by in verdict.violation


def test_every_rule_has_a_mutant():
    protocol = Rules()
    broken = {f for f in Rules.__struct_fields__ for m in MUTANTS.values() if getattr(m.rules, f) != getattr(protocol, f)}
    assert broken == set(Rules.__struct_fields__)
    assert {m.rule for m in MUTANTS.values()} >= {f"R{n}" for n in range(1, 12)}


def test_a_mutant_breaks_one_rule():
    protocol = Rules()
    for name, mutant in MUTANTS.items():
        assert sum(getattr(mutant.rules, f) != getattr(protocol, f) for f in Rules.__struct_fields__) == 1, name


def test_random_walks_through_a_large_instance_are_safe():
    verdict = walk(machine(WALK), seed=1, steps=10_000)
    assert not verdict.violation, "\n".join(verdict.trace)
    assert verdict == walk(machine(WALK), seed=1, steps=10_000)


def test_exploration_does_not_depend_on_the_process():
    script = (
        "from protocol_model.explore import explore; from protocol_model.mutants import MUTANTS;"
        "from protocol_model.scenarios import SCENARIOS, machine;"
        "v = explore(machine(SCENARIOS['manifests'].small.but(rules=MUTANTS['skip_404'].rules)));"
        "print(v.states, *v.trace, sep='\\n')"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert "GET manifest, 404" in runs.pop()
