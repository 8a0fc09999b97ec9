"""Bytes, extents and pages written in advance: the accounting every tier rests on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiering.budget import Budget
from tiering.extents import PAGE, Extents, rounded, with_slack
from tiering.space import Space

LIMIT = 1000


class BudgetMachine(RuleBasedStateMachine):
    """I8: used + reserved never exceeds the limit, and equals what a plain list of holders says."""

    def __init__(self):
        super().__init__()
        self.budget = Budget(LIMIT)
        self.reserved = []
        self.used = []

    @rule(nbytes=st.integers(0, 1200))
    def reserve(self, nbytes):
        fits = sum(self.reserved) + sum(self.used) + nbytes <= LIMIT
        assert self.budget.reserve(nbytes) is fits
        if fits:
            self.reserved.append(nbytes)

    @precondition(lambda self: self.reserved)
    @rule(keep=st.booleans())
    def end_reservation(self, keep):
        nbytes = self.reserved.pop()
        if keep:
            self.budget.commit(nbytes)
            self.used.append(nbytes)
        else:
            self.budget.cancel(nbytes)

    @precondition(lambda self: self.used)
    @rule()
    def free(self):
        self.budget.free(self.used.pop(0))

    @rule(extra=st.integers(1, 50))
    def giving_back_more_than_was_taken_is_refused(self, extra):
        with pytest.raises(ValueError, match="never used"):
            self.budget.free(sum(self.used) + extra)
        with pytest.raises(ValueError, match="never reserved"):
            self.budget.commit(sum(self.reserved) + extra)
        with pytest.raises(ValueError, match="cannot reserve"):
            self.budget.reserve(-extra)

    @invariant()
    def agrees(self):
        assert (self.budget.used, self.budget.reserved) == (sum(self.used), sum(self.reserved))
        assert self.budget.held + self.budget.room == LIMIT
        assert self.budget.held <= LIMIT


class ExtentsMachine(RuleBasedStateMachine):
    """Against a list of pages: no overlap, best fit, and everything coalesces."""

    PAGES = 64

    def __init__(self):
        super().__init__()
        self.extents = Extents(self.PAGES * PAGE)
        self.owner = [0] * self.PAGES  # who has each page; 0: free
        self.taken = {}
        self.next = 1

    def runs(self):
        """Free runs as (length, start) in pages."""
        text = "".join("." if not owner else "#" for owner in self.owner) + "#"
        found, start = [], None
        for i, mark in enumerate(text):
            if mark == "." and start is None:
                start = i
            elif mark == "#" and start is not None:
                found.append((i - start, start))
                start = None
        return found

    def mark(self, offset, length, owner):
        pages = range(offset // PAGE, (offset + length) // PAGE)
        assert all((self.owner[page] == 0) is (owner != 0) for page in pages)
        for page in pages:
            self.owner[page] = owner

    @rule(nbytes=st.integers(1, 12 * PAGE))
    def allocate(self, nbytes):
        pages = -(-nbytes // PAGE)
        fitting = sorted(length for length, _ in self.runs() if length >= pages)
        offset = self.extents.allocate(nbytes)
        if not fitting:
            assert offset is None
            return
        assert (fitting[0], offset // PAGE) in self.runs()  # the start of a smallest run that fits
        self.mark(offset, pages * PAGE, self.next)
        self.taken[self.next] = (offset, nbytes)
        self.next += 1

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data):
        owner = data.draw(st.sampled_from(sorted(self.taken)))
        offset, nbytes = self.taken.pop(owner)
        self.extents.free(offset, nbytes)
        self.mark(offset, rounded(nbytes), 0)

    @rule(nbytes=st.integers(1, 8 * PAGE))
    def take(self, nbytes):
        largest = max(self.runs(), default=(0, 0))[0]
        taken = self.extents.take(nbytes)
        if not largest:
            assert taken is None
            return
        offset, length = taken
        assert length == min(largest * PAGE, rounded(nbytes))
        assert (largest, (offset + length) // PAGE - largest) in self.runs()  # the end of a largest one
        self.mark(offset, length, self.next)
        self.taken[self.next] = (offset, length)
        self.next += 1

    @invariant()
    def agrees(self):
        assert self.extents.free_bytes == self.owner.count(0) * PAGE
        assert sorted((length // PAGE, start // PAGE) for start, length in self.extents._length_of.items()) == sorted(self.runs())
        assert self.extents._lengths == sorted(set(self.extents._length_of.values()))


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.sets(st.integers(0, 31)), st.integers(0, 4))
def test_extents_around_what_is_used(pages, extra):
    extents = Extents((32 + extra) * PAGE, [(page * PAGE, PAGE) for page in pages])
    assert extents.free_bytes == (32 + extra - len(pages)) * PAGE
    for page in pages:
        extents.free(page * PAGE, PAGE)
    assert extents.allocate((32 + extra) * PAGE) == 0


@pytest.mark.parametrize(
    ("size", "used"),
    [(4097, []), (-4096, []), (8192, [(0, 8192), (4096, 4096)]), (8192, [(4096, 8192)]), (8192, [(1, 4096)]), (8192, [(0, 0)])],
)
def test_extents_refuse_what_cannot_be(size, used):
    with pytest.raises(ValueError, match=r"extent|size"):
        Extents(size, used)


@pytest.mark.parametrize("bad", [(0, 4096), (12288, 4096), (-4096, 4096), (1, 4096), (8192, 0), (8192, 8193)])
def test_extents_refuse_to_take_back_what_they_never_gave(bad):
    extents = Extents(4 * PAGE, [(8192, 4096)])
    with pytest.raises(ValueError, match="extent"):
        extents.free(*bad)
    assert extents.free_bytes == 3 * PAGE


def test_a_limit_is_reached_exactly_by_values_that_are_no_whole_pages():
    size = 1_000_001
    limit = 97 * size
    extents = Extents(with_slack(limit))
    assert [extents.allocate(PAGE + rounded(size)) is not None for _ in range(97)] == [True] * 97


def test_pages_are_written_once_while_slots_come_and_go():
    space = Space(16 * PAGE, [], written=False)
    assert space.allocate(3 * PAGE) == 0  # from the holes: nothing is real yet
    written = []
    while (piece := space.borrow(4 * PAGE)) is not None:
        offset, length = piece
        written += range(offset // PAGE, (offset + length) // PAGE)
        space.free(*piece)
    assert sorted(written) == list(range(3, 16))
    assert written[:4] == [12, 13, 14, 15]  # from the far end, while slots take the near one
    assert space.allocate(13 * PAGE) == 3 * PAGE  # real now, and one extent
    space.free(0, 3 * PAGE)
    assert space.borrow(PAGE) is None
    assert space.free_bytes == 3 * PAGE


def test_slots_take_real_pages_first_and_holes_when_they_must():
    space = Space(16 * PAGE, [], written=False)
    space.free(*space.borrow(4 * PAGE))
    failed = space.borrow(2 * PAGE)
    space.free_unwritten(*failed)
    assert space.allocate(4 * PAGE) == 12 * PAGE
    assert space.allocate(2 * PAGE) == 0  # the near end of the holes
    space.free(12 * PAGE, 4 * PAGE)
    assert space.allocate(10 * PAGE) == 2 * PAGE
    assert space.allocate(5 * PAGE) is None


def test_what_is_left_while_pages_become_real_stays_in_one_piece():
    space = Space(64 * PAGE, [], written=False)
    taken = 0
    while (piece := space.borrow(4 * PAGE)) is not None:  # pieces that do not divide into slots of three
        space.free(*piece)
        taken += space.allocate(3 * PAGE) is not None
    while space.allocate(3 * PAGE) is not None:
        taken += 1
    assert taken == 64 // 3


def test_a_slot_may_lie_across_real_pages_and_holes():
    space = Space(16 * PAGE, [], written=False)
    space.free(*space.borrow(6 * PAGE))
    lent = space.borrow(2 * PAGE)
    assert space.allocate(9 * PAGE) is None  # two pages in between are being written
    space.free(*lent)
    assert space.allocate(16 * PAGE) == 0


def test_an_old_slab_has_no_holes():
    space = Space(8 * PAGE, [(4 * PAGE, 2 * PAGE)], written=True)
    assert space.borrow(PAGE) is None
    assert (space.allocate(2 * PAGE), space.allocate(4 * PAGE), space.allocate(PAGE)) == (6 * PAGE, 0, None)
