"""Work behind an engine's back: in order, with an end to what waits, and nothing left behind."""

import gc
import threading
import weakref

import pytest

from kvstore.connectors.bounded import Bounded


@pytest.fixture
def held():
    """One thread that is busy until the second is set."""
    workers, begun, go = Bounded("busy", 1, 4), threading.Event(), threading.Event()
    first = workers.submit(lambda: begun.set() or go.wait(30))
    assert begun.wait(30)
    yield workers, go
    go.set()
    assert first.result(30)
    workers.close()
    workers.join(30)


def test_in_order_and_no_more_than_may_wait(held):
    workers, go = held
    done = []
    futures = [workers.submit(lambda number=number: done.append(number)) for number in range(5)]
    assert [future is None for future in futures] == [False, False, False, True, True]
    go.set()
    for future in futures[:3]:
        future.result(30)
    assert done == [0, 1, 2]


def test_what_was_cancelled_keeps_no_place_and_no_memory(held):
    workers, _ = held
    seen = []

    class Memory:
        pass

    for _ in range(100):
        memory = Memory()
        seen.append(weakref.ref(memory))
        future = workers.submit(lambda memory=memory: memory)
        assert future is not None
        assert future.cancel()
    del memory, future
    gc.collect()
    assert sum(each() is not None for each in seen) <= 4


def test_an_error_is_the_callers_and_the_thread_goes_on():
    workers = Bounded("errors", 1, 4)
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 // 0).result(30)
    with pytest.raises(SystemExit):
        workers.submit(lambda: exec("raise SystemExit")).result(30)
    assert workers.submit(lambda: 3).result(30) == 3
    workers.close()


def test_what_is_done_is_held_by_nobody():
    workers = Bounded("done", 1, 4)

    class Memory:
        def fails(self):
            raise ValueError(self)

    memory = Memory()
    seen = weakref.ref(memory)
    gc.disable()  # without its help
    try:
        assert isinstance(workers.submit(memory.fails).exception(30), ValueError)
        workers.submit(lambda: None).result(30)
        del memory
        assert seen() is None
    finally:
        gc.enable()
        workers.close()


def test_close_cancels_what_waits_and_takes_nothing_more(held):
    workers, _ = held
    waiting = workers.submit(lambda: None)
    workers.close()
    assert waiting.cancelled()
    assert workers.submit(lambda: None) is None


def test_threads_are_as_many_as_are_needed_and_end_with_it():
    workers, gate = Bounded("few", 3, 16), threading.Event()

    def named():
        return {thread for thread in threading.enumerate() if thread.name.startswith("few_")}

    assert not named()
    workers.submit(lambda: None).result(30)
    assert len(named()) == 1
    futures = [workers.submit(lambda: gate.wait(30)) for _ in range(8)]
    assert len(named()) == 3
    gate.set()
    assert all(future.result(30) for future in futures)
    threads = named()
    del workers  # nobody holds it any more
    gc.collect()
    for thread in threads:
        thread.join(30)
    assert not named()
