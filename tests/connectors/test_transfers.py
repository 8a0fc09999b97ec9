"""Questions that a node answers at once, later, or never; and counters that several threads add to."""

import sys
import threading
import time
from concurrent.futures import Future

import pytest

from kvstore import api
from kvstore.connectors import transfers
from kvstore.connectors.transfers import Counts, Look
from kvstore.errors import Unavailable

FOUND = api.Found(run=3, tiers=["dram"] * 3)


class Asked:
    """What a node says each time that it is polled; the last again and again."""

    def __init__(self, *said):
        self._said, self.dropped = list(said), False

    def poll(self):
        said = self._said.pop(0) if len(self._said) > 1 else self._said[0]
        if isinstance(said, Exception):
            raise said
        return said

    def wait(self, seconds):
        time.sleep(seconds)

    def drop(self):
        self.dropped = True


def never():
    pytest.fail("the node has the answer: no thread is asked")


def test_an_answer_that_the_node_has_takes_no_thread():
    counts = Counts()
    assert Look(Asked(None, None, FOUND), never, 3, counts).poll(5) == FOUND
    assert counts.looks == {"hit": 1}


def test_who_has_no_time_gets_none_and_asks_again():
    look = Look(Asked(None, None, FOUND), never, 4, counts := Counts())
    assert look.poll(0) is None
    assert look.poll(0) is None
    assert look.poll(0) == FOUND
    assert counts.looks == {"partial": 1}


@pytest.mark.parametrize("said", [Unavailable("it takes longer", kind="timeout"), Unavailable("gone")])
def test_what_the_node_does_not_know_at_once_is_asked_on_a_thread(said):
    future = Future()
    look = Look(Asked(None, said), lambda: future, 3, counts := Counts())
    assert look.poll(5) is None
    future.set_result(FOUND)
    assert look.poll(5) == FOUND
    assert counts.looks == {"hit": 1}


def test_where_too_many_wait_it_is_a_miss():
    look = Look(Asked(Unavailable("later", kind="timeout")), lambda: None, 3, counts := Counts())
    assert look.poll(5) is None
    assert look.poll(5).run == 0
    assert counts.looks == {"busy": 1}


def test_a_node_that_stands_still_is_a_miss_and_its_answer_not_wanted(monkeypatch):
    monkeypatch.setattr(transfers, "LOOK_S", 0.02)
    look = Look(asked := Asked(None), never, 3, counts := Counts())
    while (found := look.poll(0.001)) is None:
        assert not asked.dropped
    assert (found.run, asked.dropped) == (0, True)
    assert counts.looks == {"late": 1}


def test_no_count_is_lost_between_threads():
    counts, each, before = Counts(), 20_000, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adding = [threading.Thread(target=lambda: [counts.add("blocks", "saved", 2) for _ in range(each)]) for _ in range(4)]
        for thread in adding:
            thread.start()
        told = 0
        while any(thread.is_alive() for thread in adding):
            told += counts.news().get("blocks", {}).get("saved", 0)
        for thread in adding:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert counts.all()["blocks"] == {"saved": 8 * each}
    assert told + counts.news().get("blocks", {}).get("saved", 0) == 8 * each
