"""docs/ordering.md says what the model has, and names only tests that exist."""

import re
from pathlib import Path

import pytest
from protocol_model.mutants import MUTANTS
from protocol_model.scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ordering.md").read_text()


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`((?:tests|tiering)/[\w/]+\.py)::(\w+)`", PAGE))), ids="::".join)
def test_every_test_named_exists(named):
    path, name = named
    assert re.search(rf"def {name}\(", (ROOT / path).read_text())


def test_every_invariant_has_a_test():
    rows = re.findall(r"^\| (I\d+) \|.*\|$", PAGE, re.MULTILINE)
    assert rows == [f"I{n}" for n in range(1, 13)]
    for number, row in enumerate(re.findall(r"^\| I\d+ \|.*\|$", PAGE, re.MULTILINE), 1):
        named = re.findall(r"`((?:tests|tiering)/[\w/]+\.py)::(\w+)`", row.split("|")[-2])
        assert any(re.search(rf"\bi{number}\b", said_by(*test)) for test in named), f"no test of I{number} names it"


def said_by(path, name):
    """A test's name and docstring, as words."""
    definition = re.search(rf'def {name}\([^\n]*\n(\s+"""(.*?)""")?', (ROOT / path).read_text(), re.DOTALL)
    return f"{name} {definition[2] or ''}".replace("_", " ").lower()


def test_the_models_tables_are_those_of_the_code():
    scenarios = re.findall(r"^\| `(\w+)` \| (.*?) \| [\d,]+ \| [\d,]+ \|$", PAGE, re.MULTILINE)
    assert scenarios == [(name, scenario.full.about) for name, scenario in SCENARIOS.items()]
    mutants = re.findall(r"^\| ([\w ]+) \| `(\w+)` in `(\w+)` \| (.*?) \|$", PAGE, re.MULTILINE)
    assert mutants == [(m.rule, name, m.scenario, m.broken) for name, m in MUTANTS.items()]


def test_parameters_named_on_the_page_exist():
    for kind, known in (("model", SCENARIOS), ("mutant", MUTANTS)):
        for listed in re.findall(rf"`{kind}\[([\w, ]+)\]`", PAGE):
            assert set(listed.split(", ")) - {"x"} <= set(known)
