"""A mesh without a directory server: peers are asked themselves."""

import asyncio
import hashlib

from kvstore.clock import VirtualClock
from kvstore.mesh.members import Member
from kvstore.mesh.static import StaticDirectory

A, B = Member("a", 0, "host-a", 1), Member("b", 0, "host-b", 1)


def key(n):
    return hashlib.sha256(str(n).encode()).digest()


class Peers:
    """What each has; who is silent; what was asked."""

    def __init__(self, **has):
        self.has = has
        self.silent = set()
        self.asked = []

    async def holds(self, member, keys):
        self.asked.append((member.node, list(keys)))
        if member.node in self.silent:
            await asyncio.Event().wait()
        return [one in self.has[member.node] for one in keys]


async def test_peers_say_what_they_hold_and_are_believed_for_a_while():
    clock = VirtualClock()
    peers = Peers(a={key(1), key(2)}, b={key(2)})
    directory = StaticDirectory([A, B], peers.holds, clock)
    assert directory.members() == (A, B)
    assert await directory.locate([key(1), key(2), key(3)]) == [(A,), (A, B), ()]
    assert await directory.locate([key(1), key(2), key(3)]) == [(A,), (A, B), ()]
    assert peers.asked[2:] == [("a", [key(3)]), ("b", [key(3)])]  # what they had not is asked again
    clock.advance(60)
    await directory.locate([key(1)])
    assert peers.asked[-1] == ("b", [key(1)])


async def test_a_wrong_hint_is_forgotten():
    peers = Peers(a={key(1)}, b={key(1)})
    directory = StaticDirectory([A, B], peers.holds, VirtualClock())
    await directory.locate([key(1)])
    directory.wrong(A, [key(1)])
    assert await directory.locate([key(1)]) == [(B,)]
    peers.has = {"a": set(), "b": set()}
    directory.wrong(B, [key(1), key(9)])
    assert await directory.locate([key(1)]) == [()]


async def test_a_silent_peer_has_said_nothing_and_is_left_alone():
    clock = VirtualClock()
    peers = Peers(a={key(1)}, b={key(1)})
    peers.silent = {"b"}
    directory = StaticDirectory([A, B], peers.holds, clock, answer_s=0.01)
    assert await directory.locate([key(1)]) == [(A,)]
    assert await directory.locate([key(2)]) == [()]
    assert [node for node, _ in peers.asked] == ["a", "b", "a"]
    peers.silent = set()
    clock.advance(60)
    assert await directory.locate([key(1)]) == [(A, B)]


async def test_a_peer_that_is_left_alone_is_no_member_and_nothing_it_said_is_believed(caplog):
    clock = VirtualClock()
    peers = Peers(a={key(1)}, b={key(1)})
    directory = StaticDirectory([A, B], peers.holds, clock, answer_s=0.01)
    assert await directory.locate([key(1)]) == [(A, B)]
    peers.silent = {"b"}
    for n in range(2, 9):
        await directory.locate([key(n)])
        clock.advance(0.9)
        assert await directory.locate([key(1)]) == [(A,)]
    assert [record.getMessage() for record in caplog.records] == ["b does not answer: no answer within 10 ms"]
    assert directory.members() == (A,)
    clock.advance(15)
    assert directory.members() == (A, B)  # worth asking again: if nobody were a member, nobody would be asked
    peers.silent = set()
    assert await directory.locate([key(1), key(9)]) == [(A, B), ()]


async def test_a_peer_that_fails_or_answers_too_little_costs_its_own_hints_only():
    async def holds(member, keys):
        if member == A:
            raise ConnectionResetError
        return [True]

    assert await StaticDirectory([A, B], holds, VirtualClock()).locate([key(1), key(2)]) == [(B,), ()]


async def test_no_keys_and_no_peers():
    peers = Peers(a=set(), b=set())
    assert await StaticDirectory([A, B], peers.holds, VirtualClock()).locate([]) == []
    assert await StaticDirectory([], peers.holds, VirtualClock()).locate([key(1)]) == [()]
    assert peers.asked == []
