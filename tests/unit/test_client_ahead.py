"""What a client may count on before the node has answered."""

from kvstore import wire
from kvstore.client.ahead import Ahead

KIND = ("ns", "t0of1.p0of1.g0", 16)
OTHER = ("ns", "t0of1.p0of1.g0", 8)
MIB = 1 << 20


def answered(ready, *, at=10.0):
    """After one publication that was answered so."""
    ahead = Ahead()
    assert not ahead.sent(1, KIND, 1, at, claimed=False)
    ahead.answered(1, ready)
    return ahead


def test_only_a_burst_asks_for_room_ahead_and_for_a_bounded_amount():
    ahead = Ahead()
    wishes = [ahead.wanted(1, 2 * MIB, now) for now in (10.0, 10.01, 10.02, 10.03)]
    assert wishes == [0, 1, 2, 3]
    assert [ahead.wanted(1, 2 * MIB, 10.04) for _ in range(20)][-1] == 8
    assert ahead.wanted(1, 64 * MIB, 10.05) == 1
    assert ahead.wanted(1, 2 * MIB, 11.0) == 0


def test_no_more_is_claimed_than_was_promised():
    ahead = answered(2)
    assert ahead.claim(KIND, 1, 10.1)
    assert not ahead.claim(KIND, 2, 10.1)
    assert ahead.claim(KIND, 1, 10.1)
    assert not ahead.claim(KIND, 1, 10.1)
    ahead.waive(1)
    assert ahead.claim(KIND, 1, 10.1)


def test_blocks_of_another_kind_or_of_mixed_kinds_are_not_promised():
    ahead = answered(2)
    assert not ahead.claim(OTHER, 1, 10.1)
    assert not ahead.claim(None, 1, 10.1)


def test_a_promise_ends_before_the_node_takes_the_room_back():
    ahead = answered(4)
    assert not ahead.claim(KIND, 1, 10.01 + wire.AHEAD_S)
    assert ahead.claim(KIND, 1, 10.1)
    assert not ahead.sent(2, KIND, 1, 10.01 + wire.AHEAD_S, claimed=True)  # filling it took too long


def test_an_answer_counts_what_was_sent_behind_its_question():
    ahead = answered(4)
    for number in (2, 3):
        assert ahead.claim(KIND, 1, 10.1)
        assert ahead.sent(number, KIND, 1, 10.1, claimed=True)
    assert ahead.claim(KIND, 1, 10.1)
    ahead.answered(2, 3)  # of which 3 takes one, and what is being filled another
    assert ahead.claim(KIND, 1, 10.2)
    assert not ahead.claim(KIND, 1, 10.2)


def test_a_claim_that_the_newest_answer_does_not_cover_does_not_hold():
    ahead = answered(4)
    assert ahead.claim(KIND, 1, 10.1)
    assert not ahead.sent(2, KIND, 1, 10.1, claimed=False)
    ahead.answered(2, 0)  # the node has taken it back
    assert not ahead.sent(3, KIND, 1, 10.2, claimed=True)


def test_what_is_sent_of_another_kind_ends_the_promise():
    ahead = answered(4)
    ahead.sent(2, KIND, 1, 10.1, claimed=False)
    ahead.sent(3, OTHER, 1, 10.1, claimed=False)
    ahead.answered(2, 4)  # the node gives that back when it comes to 3
    assert not ahead.claim(KIND, 1, 10.1)
    ahead.answered(3, 1)
    assert ahead.claim(OTHER, 1, 10.2)


def test_a_node_that_promises_nothing_is_waited_for():
    assert not answered(wire.Published(1, [True], False).ready).claim(KIND, 1, 10.1)
