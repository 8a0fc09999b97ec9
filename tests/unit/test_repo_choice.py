"""`auto`: raw on a fast link, coded on a slow one, and no back and forth between."""

from contextlib import suppress

import pytest

from kvstore.clock import VirtualClock
from kvstore.objects import MemoryStore
from kvstore.repo import want
from kvstore.repo.choice import CodecChoice
from kvstore.repo.testing import Shelf, bodies, opened, tiny

MIB = 1 << 20
BLOCK = 4 * MIB


class Link:
    """Uploads of one node: a link and a codec of given speeds, bytes a second."""

    def __init__(self, link, codec=300 * MIB, setting="auto", ratio=0.69):
        self.clock = VirtualClock()
        self.choice = CodecChoice(setting, self.clock)
        self.link, self.codec, self.ratio = link, codec, ratio

    def send(self, count):
        picked = []
        for _ in range(count):
            coding = self.choice.pick()
            nbytes = BLOCK
            if coding != "raw":
                with self.choice.coding.moving(BLOCK):
                    self.clock.advance(BLOCK / self.codec)
                nbytes = int(BLOCK * self.ratio)
                self.choice.coded(BLOCK, nbytes)
            with self.choice.link.moving(nbytes):
                self.clock.advance(nbytes / self.link)
            picked.append(coding)
        return picked


def test_a_fast_link_gets_raw_objects_but_for_a_few_that_measure_the_codec():
    node = Link(1000 * MIB)
    picked = node.send(1000)
    assert picked.count("bp-zstd") < 40
    assert node.choice.current == "raw"
    assert node.choice.switched == 0
    assert node.choice.reason == "faster"
    assert "1049 MB/s" in node.choice.why
    assert "raw is 3.33x as fast" in node.choice.why


def test_a_slow_link_gets_coded_ones():
    node = Link(50 * MIB)
    assert node.choice.reason == "unmeasured"
    picked = node.send(200)
    assert picked[0] == "raw"
    assert set(picked[50:]) == {"bp-zstd"}
    assert node.choice.switched == 1
    assert "bp-zstd is 1.45x as fast" in node.choice.why


def test_it_follows_the_link_both_ways():
    node = Link(50 * MIB)
    node.send(200)
    node.link = 2000 * MIB
    assert node.send(200)[-1] == "raw"
    node.link = 20 * MIB
    assert node.send(200)[-1] == "bp-zstd"
    assert node.choice.switched == 3


def test_near_the_balance_it_stays_what_it_is():
    node, said = Link(300 * MIB), set()
    for turn in range(100):
        node.link = (300 + (30 if turn % 2 else -45)) * MIB
        node.send(20)
        said.add((node.choice.reason, node.choice.why.rpartition(", ")[2]))
    assert node.choice.switched == 0
    assert ("near", "too little to leave raw") in said


def test_kv_that_does_not_compress_is_left_raw():
    node = Link(50 * MIB, ratio=1.0)
    node.send(300)
    assert node.choice.current == "raw"


@pytest.mark.parametrize("setting", ["raw", "zstd", "bp-zstd"])
def test_what_is_set_is_what_is_used(setting):
    node = Link(50 * MIB, setting=setting)
    assert set(node.send(300)) == {setting}
    assert node.choice.why == node.choice.reason == "set"


def test_time_in_which_nobody_sends_does_not_count_and_sharing_counts_once():
    clock = VirtualClock()
    rate = CodecChoice("auto", clock).link
    for _ in range(20):
        with rate.moving(2 * MIB), rate.moving(2 * MIB):
            clock.advance(0.04)
        clock.advance(100.0)
    assert rate.value == pytest.approx(100 * MIB)


def test_what_fails_carries_nothing():
    clock = VirtualClock()
    rate = CodecChoice("auto", clock).link
    for _ in range(20):
        with suppress(OSError), rate.moving(2 * MIB):
            clock.advance(0.02)
            raise OSError
        with rate.moving(2 * MIB):
            clock.advance(0.02)
    assert rate.value == pytest.approx(50 * MIB)


@pytest.mark.parametrize(("per_second", "last"), [(20 * MIB, "coded"), (5000 * MIB, "raw")])
async def test_auto_in_a_repository_on_a_throttled_store(per_second, last):
    clock = VirtualClock()
    namespace = tiny(dtype="BF16", layers=16, block_tokens=256, kv_heads=2, head_dim=64)
    shelf, body = Shelf(), None

    class Throttled(MemoryStore):
        async def put(self, key, body, mode):
            clock.advance(len(body) / per_second)
            return await super().put(key, body, mode)

    async def run(work, *args):
        if work.__name__ == "encode" and args[3] != "raw":
            clock.advance(len(args[0]) / (300 * MIB))
        return work(*args)

    store = Throttled(clock)
    async with opened(store, clock, run=run, codec="auto") as repo:
        for name in [block for link in [shelf.fill(namespace, range(256 * 30))] for block in shelf.held]:
            lease = shelf.lease(name, shelf.held[name])
            assert await repo.origin.offer(want(namespace, name), lease)
            lease.release()
            body = bodies(store)[repo.uploads.key(name, 1)]
            into = memoryview(bytearray(len(shelf.held[name])))
            assert await repo.origin.fetch(want(namespace, name), into) is None
            assert into == shelf.held[name]
        assert repo.uploads.choice.current == ("raw" if last == "raw" else "bp-zstd")
    assert (b'"codec":"raw"' in bytes(body[:400])) == (last == "raw")
