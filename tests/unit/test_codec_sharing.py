"""One block on several threads: the same bytes, each tensor once, and nobody at work when it is over."""

import threading

import pytest

from kvstore import codec
from kvstore.codec.sharing import each
from kvstore.errors import Corrupt
from kvstore.ids import BlockName, Shard, chain
from kvstore.repo.testing import raw_block, tiny

NS = tiny(dtype="BF16", layers=8)


class Helpers:
    """So many threads for whoever shares; `late` ones begin only when they are let."""

    def __init__(self, count, *, late=False):
        self.count, self.threads = count, []
        self.go = threading.Event()
        if not late:
            self.go.set()

    def share(self, step):
        more = [threading.Thread(target=self._help, args=(step,)) for _ in range(self.count)]
        for thread in more:
            thread.start()
        self.threads += more

    def _help(self, step):
        self.go.wait()
        while step():
            pass

    def join(self):
        self.go.set()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def block():
    [link] = chain(NS, range(NS.block_tokens))
    name = BlockName(NS.id, Shard(), link.prefix_id, link.tokens)
    return name, raw_block(NS, name, range(NS.block_tokens))


def test_each_is_done_once_and_by_all_who_help():
    """The first three wait for each other: one thread alone would never come past them."""
    meeting, done, helpers = threading.Barrier(3), [], Helpers(2)

    def work(index):
        if index < 3:
            meeting.wait(30)
        done.append(index)

    each(work, 40, helpers.share)
    assert sorted(done) == list(range(40))
    helpers.join()
    assert len(done) == 40


def test_whoever_comes_late_finds_nothing_and_is_not_waited_for():
    done, helpers = [], Helpers(2, late=True)
    each(done.append, 5, helpers.share)
    assert done == [0, 1, 2, 3, 4]
    helpers.join()
    assert done == [0, 1, 2, 3, 4]


def test_it_is_over_only_when_a_helper_has_ended():
    """The helper takes one and is slow; who asked does the rest meanwhile, and then waits."""
    taken, rest, done, helpers = threading.Event(), threading.Event(), [], Helpers(1)
    asking = threading.current_thread()

    def work(index):
        if threading.current_thread() is asking:
            taken.wait(30)
            if index == 9 or len(done) == 8:
                rest.set()
        else:
            taken.set()
            rest.wait(30)
        done.append(index)

    each(work, 10, helpers.share)
    assert sorted(done) == list(range(10))
    helpers.join()


@pytest.mark.parametrize("helping", [0, 2])
def test_what_one_of_them_raises_is_raised_and_nothing_more_is_begun(helping):
    done, helpers = [], Helpers(helping)

    def work(index):
        done.append(index)
        if index == 3:
            raise Corrupt("three")

    with pytest.raises(Corrupt, match="three"):
        each(work, 10_000, helpers.share)
    count = len(done)
    helpers.join()
    assert len(done) == count < 10_000


@pytest.mark.parametrize("coding", codec.CODECS)
def test_shared_work_makes_the_same_bytes(block, coding):
    name, raw = block
    helpers = Helpers(3)
    alone = codec.encode(memoryview(raw), name, NS, coding)
    shared = codec.encode(memoryview(raw), name, NS, coding, helpers.share)
    assert bytes(shared.body) == bytes(alone.body)
    assert shared.header_bytes == alone.header_bytes
    into = memoryview(bytearray(len(raw)))
    codec.decode(memoryview(shared.body), name, NS, into, helpers.share)
    assert into == raw
    codec.verify(into, name, NS, helpers.share)
    helpers.join()


@pytest.mark.parametrize("coding", codec.CODECS)
def test_a_flipped_bit_is_found_whoever_meets_it(block, coding):
    name, raw = block
    helpers = Helpers(2)
    body = bytearray(codec.encode(memoryview(raw), name, NS, coding).body)
    body[-1] ^= 1
    with pytest.raises(Corrupt):
        codec.decode(memoryview(body), name, NS, memoryview(bytearray(len(raw))), helpers.share)
    rotten = bytearray(raw)
    rotten[-1] ^= 1
    with pytest.raises(Corrupt):
        codec.encode(memoryview(rotten), name, NS, coding, helpers.share)
    helpers.join()
