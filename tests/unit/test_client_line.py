"""The blocking connection beside a node that is late, lies, or goes away in the middle of an answer."""

import mmap
import os
import socket
import threading
import time

import pytest

from kvstore import wire
from kvstore.client.handshake import Met
from kvstore.client.line import Line
from kvstore.errors import Unavailable
from kvstore.ids import Shard

PAGES = 1 << 16


class Node:
    """The other end of a line."""

    def __init__(self, far):
        self.far = far
        far.settimeout(5)

    def say(self, *messages):
        self.far.sendall(b"".join(map(wire.frame, messages)))

    def hear(self):
        length = wire.body_length(self.far.recv(4, socket.MSG_WAITALL))
        return wire.parse_to_node(self.far.recv(length, socket.MSG_WAITALL))


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    welcome = wire.Welcome(wire.PROTOCOL, "0.1.0", "n", PAGES, PAGES)
    line = Line(Met(near, welcome, mmap.mmap(-1, PAGES), mmap.mmap(-1, PAGES)), lambda *_: None)
    yield line, Node(far)
    line.close()
    far.close()


def get(number):
    return wire.Get(number, "ns", str(Shard()), b"\0" * 32, [1], 0, "dram", wait=False)


def test_leases_that_come_too_late_are_given_back_with_the_next_request(pair):
    line, node = pair
    with pytest.raises(TimeoutError):
        line.ask(get, 0.01)
    late = node.hear()
    node.say(wire.Leased(late.id, 7, [0, 4096], [4096, 4096], ""), wire.Later(late.id + 1))
    assert line.ask(get, 5) == wire.Later(late.id + 1)  # not the late one
    assert node.hear().id == late.id + 1
    node.say(wire.Later(late.id + 2))
    line.ask(get, 5)
    assert node.hear().id == late.id + 2
    assert node.hear() == wire.Release([(7, 2)])
    assert line.alive


def test_a_line_that_breaks_in_the_middle_of_an_answer_is_lost_for_good(pair):
    line, node = pair
    node.far.sendall(wire.frame(wire.Leased(1, 1, [0], [4096], ""))[:-3])
    node.far.shutdown(socket.SHUT_WR)
    for _ in range(2):
        with pytest.raises(Unavailable):
            line.ask(get, 5)
    assert not line.alive


def test_a_forked_child_cannot_speak_for_its_parent(pair):
    line, node = pair
    child = os.fork()
    if not child:
        try:
            line.ask(get, 0.2)
        except BaseException:  # noqa: BLE001  whatever it is: it did not get through
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    node.say(wire.Later(1))
    assert line.ask(get, 5) == wire.Later(1)
    assert node.hear().id == 1
    node.far.setblocking(False)
    with pytest.raises(BlockingIOError):
        node.far.recv(1)


def test_a_publication_that_was_not_answered_in_time_keeps_its_place_in_the_window(pair):
    line, node = pair
    extents = line.take_room([PAGES], PAGES)
    number = line.publish(
        lambda number: wire.Publish(number, "ns", str(Shard()), b"\0" * 32, [(1, 0, PAGES)], filled=False), extents
    )
    with pytest.raises(TimeoutError):
        line.filled(number, good=True, patience_s=0.01)
    assert line.take_room([4096], 4096) == []  # the node may be reading it
    node.say(wire.Published(number, [True], False))
    line.listen()
    assert line.take_room([4096], 4096) == []
    node.say(wire.Drained(number))
    line.listen()
    assert line.take_room([4096], 4096) == [(0, 4096)]


def test_a_late_answer_to_what_was_given_up_frees_its_place_in_the_window(pair):
    line, node = pair
    extents = line.take_room([PAGES], PAGES)
    number = line.publish(
        lambda number: wire.Publish(number, "ns", str(Shard()), b"\0" * 32, [(1, 0, PAGES)], filled=False), extents
    )
    with pytest.raises(TimeoutError):
        line.filled(number, good=True, patience_s=0.01)
    node.say(wire.Published(number, [False], True))
    line.listen()
    assert line.take_room([4096], 4096) == [(0, 4096)]


def test_room_that_comes_free_together_with_another_answer_is_seen(pair):
    """Nothing more may come: whoever waits for room would wait for ever, and every write after it."""
    line, node = pair
    numbers = []
    for offset in (0, PAGES // 2):
        extents = line.take_room([PAGES // 2], PAGES)
        blocks = [(1, offset, PAGES // 2)]
        numbers.append(
            line.publish(lambda number, b=blocks: wire.Publish(number, "ns", str(Shard()), b"\0" * 32, b, filled=False), extents)
        )
    node.say(*(wire.Published(number, [True], False) for number in numbers), *(wire.Drained(number) for number in numbers))
    for number in numbers:
        assert line.filled(number, good=True, patience_s=5) == [True]
    line.listen()
    assert line.take_room([PAGES], PAGES) == [(0, PAGES)]


def test_a_question_is_asked_and_come_back_for_while_others_exchange(pair):
    line, node = pair
    number = line.begin(get)
    assert line.answer(number) is None
    assert node.hear().id == number
    node.say(wire.Later(number), wire.Later(number + 1))
    assert line.ask(get, 5) == wire.Later(number + 1)  # which hears the other answer as well
    assert line.answer(number) == wire.Later(number)


def test_a_question_that_the_node_refuses_raises_what_it_said(pair):
    line, node = pair
    number = line.begin(get)
    node.say(wire.Fault(number, Unavailable("no").problem()))
    with pytest.raises(Unavailable, match="no"):
        line.answer(number)
    assert line.alive


def test_a_node_that_answers_no_question_is_not_asked_more_until_it_has(pair):
    line, node = pair
    numbers = [number for _ in range(20) if (number := line.begin(get)) is not None]
    assert len(numbers) < 20  # a socket that is full would keep whoever asks
    for number in numbers:
        line.drop(number)
    assert line.begin(get) is None
    node.say(*map(wire.Later, numbers))
    assert line.begin(get) == numbers[-1] + 1
    with pytest.raises(KeyError):
        line.answer(numbers[0])


def test_a_question_is_not_asked_while_another_thread_waits_for_its_answer(pair):
    line, node = pair
    waiting = threading.Thread(target=line.ask, args=(get, 5))
    waiting.start()
    first = node.hear()
    assert line.begin(get) is None
    node.say(wire.Later(first.id))
    waiting.join()
    assert line.begin(get) == first.id + 1


def test_a_question_on_a_line_that_is_lost_says_so(pair):
    line, node = pair
    number = line.begin(get)
    node.far.shutdown(socket.SHUT_RDWR)
    with pytest.raises(Unavailable):
        line.answer(number)
    with pytest.raises(Unavailable):
        line.begin(get)


KIND = ("ns", str(Shard()), 1)


def promised(line, node, ready=2):
    """After a publication behind which the node has promised to take more."""
    extents = line.take_room([4096], 4096)
    number = line.publish(lambda number: publication(number, extents), extents, KIND)
    node.say(wire.Published(number, [True], True, ready))
    assert line.filled(number, good=True, patience_s=5) == [True]
    assert [type(node.hear()) for _ in range(2)] == [wire.Publish, wire.Filled]


def publication(number, extents):
    return wire.Publish(number, "ns", str(Shard()), b"\0" * 32, [(1, *extent) for extent in extents])


def hand_over(line, patience_s=5):
    extents = line.take_room([4096], 4096)
    return line.hand_over(lambda number: publication(number, extents), extents, KIND, patience_s)


def test_what_the_node_promised_to_take_is_handed_over_without_waiting(pair):
    line, node = pair
    promised(line, node)
    for _ in range(2):
        assert line.ahead.claim(KIND, 1, time.monotonic())
        assert hand_over(line) == [True]
    assert not line.ahead.claim(KIND, 1, time.monotonic())
    first, second = node.hear(), node.hear()
    assert (first.extents, second.extents) == ([(1, 0, 4096)], [(1, 4096, 4096)])  # the first is still read
    node.say(wire.Published(first.id, [True], True, 3))
    line.hear()
    assert line.take_room([4096], 4096) == [(0, 4096)]
    assert line.ahead.claim(KIND, 2, time.monotonic())


def test_a_promise_that_ended_while_the_blocks_were_filled_is_waited_for(pair, monkeypatch):
    line, node = pair
    promised(line, node)
    assert line.ahead.claim(KIND, 1, time.monotonic())
    monkeypatch.setattr("kvstore.wire.AHEAD_S", 0.0)
    with pytest.raises(TimeoutError):
        hand_over(line, 0.05)


def test_a_promise_that_was_not_kept_is_in_the_log_and_frees_the_window(pair, caplog):
    line, node = pair
    promised(line, node)
    for answer in (lambda number: wire.Published(number, [False], True), fault):
        assert line.ahead.claim(KIND, 1, time.monotonic())
        assert hand_over(line) == [True]
        node.say(answer(node.hear().id))
        line.hear()
        assert "promised" in caplog.text
        caplog.clear()
        assert line.take_room([PAGES], PAGES) == [(0, PAGES)]
        line.give_room([(0, PAGES)])
        promised(line, node)
    assert line.alive


def fault(number):
    return wire.Fault(number, Unavailable("no").problem())
