"""A little of scripts/fuzz in every run of the tests, and whatever it found before."""

from pathlib import Path

import pytest
from parsers import TARGETS
from parsers.mutation import tried

FOUND = Path(__file__).parent / "found"
INPUTS = sorted(path for path in FOUND.glob("*/*"))


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_refuses_by_name_and_reads_what_it_wrote(name):
    target = TARGETS[name]
    for seed in target.seeds:
        target.run(seed)
    assert tried(target, seed=1, examples=40) is None


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name[:12]}")
def test_what_was_found_once_stays_mended(path):
    TARGETS[path.parent.name].run(path.read_bytes())


def test_a_parser_that_breaks_is_noticed():
    """Or none of the others says anything."""
    broken = TARGETS["names"]
    found = tried(type(broken)("broken", lambda data: data.index(b"t"), (b"attt", b"of"), (b"t",)), seed=1, examples=40)
    assert found is not None
    assert isinstance(found[1], ValueError)
