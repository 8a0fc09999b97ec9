"""Errors are named by what the caller should do; each kind keeps its meaning across processes."""

import msgspec
import pytest

from kvstore import errors
from kvstore.errors import KINDS, Conflict, Invalid, KVTierError, Problem, TooManyBranches, Unavailable

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KVTierError)]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_class_is_drawn_in_the_tree_and_has_a_kind_of_its_own(error):
    assert error.__name__ in errors.__doc__
    assert KINDS[error.default_kind].error is error


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_a_problem_document(kind):
    raised = KINDS[kind].error("what happened", kind=kind, current=7)
    document = msgspec.json.decode(msgspec.json.encode(raised.problem()), type=Problem)
    again = document.error()
    assert type(again) is KINDS[kind].error
    assert (again.kind, again.message, again.facts, again.remedy) == (kind, "what happened", {"current": 7}, KINDS[kind].remedy)
    assert document.status == KINDS[kind].http
    assert 400 <= KINDS[kind].http <= 599
    assert 1 <= KINDS[kind].exit <= 4
    assert KINDS[kind].remedy


def test_the_kinds_a_program_may_match_on_are_never_renamed():
    """Only ever add to this list."""
    assert set(KINDS) >= {
        *("internal", "conflict", "unavailable", "timeout", "outcome_unknown", "store_busy", "store_conflict", "clock_skew"),
        *("store_not_initialised", "overloaded", "not_found", "gone", "already_exists", "denied", "bad_credentials"),
        *("expired_credentials", "no_credentials", "access_denied", "invalid", "too_many_branches", "corrupt", "unknown_format"),
        *("closed", "forked", "unsupported", "unsafe_store", "version_mismatch"),
    }


def test_a_newer_peers_kind_falls_back_on_the_status():
    problem = Problem(type="x", title="x", status=409, detail="d", kind="brand_new", remedy="do this")
    assert isinstance(problem.error(), Conflict)
    assert problem.error().remedy == "do this"
    assert type(Problem(type="x", title="x", status=418, detail="d", kind="brand_new").error()) is KVTierError


def test_a_remedy_can_be_more_precise_than_its_kind():
    assert Unavailable("x", remedy="wait a minute").problem().remedy == "wait a minute"
    assert issubclass(TooManyBranches, Invalid)
