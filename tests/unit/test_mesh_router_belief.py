"""What is believed to be where: runs, places that are forgotten at once, and bounds."""

import random  # noqa: TID251  seeded

import pytest

from kvstore.mesh import belief as module
from kvstore.mesh.belief import Belief


def key(number):
    return number.to_bytes(8, "little") + bytes(24)


def keys(*numbers):
    return [key(number) for number in numbers]


@pytest.fixture
def belief():
    return Belief(1000)


def where(belief, numbers, *places):
    runs = belief.runs(keys(*numbers))
    return runs.bounds, [[bool(row[place]) for place in places] for row in runs.places]


def test_runs_have_the_same_places_and_end_at_the_first_that_is_nowhere(belief):
    a, b = belief.place(), belief.place()
    belief.add(a, keys(1, 2, 3, 5))
    belief.add(b, keys(3))
    assert where(belief, [1, 2, 3, 4, 5], a, b) == ([0, 2, 3], [[True, False], [True, True]])
    assert where(belief, [4, 1], a, b) == ([0], [])
    assert where(belief, [], a, b) == ([0], [])


def test_what_is_dropped_is_gone_there_only(belief):
    a, b = belief.place(), belief.place()
    for place in (a, b):
        belief.add(place, keys(1, 2))
    belief.drop([a], keys(1, 9))
    assert where(belief, [1, 2], a, b) == ([0, 1, 2], [[False, True], [True, True]])
    belief.drop([a, b], keys(1, 2))
    assert len(belief) == 0


def test_a_forgotten_place_has_nothing_and_its_successor_neither(belief):
    kept, gone = belief.place(), belief.place()
    belief.add(kept, keys(1))
    for _ in range(700):  # past the point where bits are used again
        belief.add(gone, keys(1, 2))
        belief.forget(gone)
        gone = belief.place()
        assert where(belief, [1, 2], kept, gone) == ([0, 1], [[True, False]])
    assert belief.width <= 8 + 2 * 256 + 8


def test_places_of_a_block_that_went_together_part_nothing(belief):
    a, b = belief.place(), belief.place()
    belief.add(a, keys(1, 2))
    belief.add(b, keys(2))
    belief.forget(b)
    assert where(belief, [1, 2], a) == ([0, 2], [[True]])


def test_it_is_bounded_and_remembers_what_is_told_again():
    belief = Belief(100)
    place = belief.place()
    for number in range(10, 1000):
        belief.add(place, keys(1, number))
        assert len(belief) <= 100
    assert where(belief, [1, 999], place) == ([0, 2], [[True]])
    assert where(belief, [10], place) == ([0], [])


def test_bits_are_used_again_only_when_no_belief_has_them(monkeypatch):
    monkeypatch.setattr(module, "_STEP", 7)
    monkeypatch.setattr(module, "_RETIRED", 4)
    belief, rng = Belief(10_000), random.Random(1)
    places = [belief.place() for _ in range(5)]
    has = {place: set() for place in places}
    for _ in range(3000):
        at = rng.randrange(5)
        some = [rng.randrange(300) for _ in range(3)]
        if rng.random() < 0.1:
            belief.forget(places[at])
            del has[places[at]]
            places[at] = belief.place()
            assert places[at] not in has
            has[places[at]] = set()
        elif rng.random() < 0.3:
            belief.drop([places[at]], keys(*some))
            has[places[at]] -= set(some)
        else:
            belief.add(places[at], keys(*some))
            has[places[at]] |= set(some)
        number = rng.randrange(300)
        believed = list(belief.runs(keys(number)).places) or [[False] * belief.width]
        assert [place for place in sorted(places) if believed[0][place]] == [
            place for place in sorted(places) if number in has[place]
        ]
    assert belief.width < 200
