"""Pages under an engine's own hashes."""

import threading

import numpy as np
import pytest

from kvstore.connectors import pages as module
from kvstore.connectors.bridge import Bridge
from kvstore.connectors.pages import Pages
from kvstore.errors import Invalid
from kvstore.ids import Namespace, Shard

FIELDS = {"model": "m", "revision": "1", "layers": 1, "page_bytes": 6000, "layout": "engine/1", "block_tokens": 16}
NS = Namespace(**FIELDS, dtype="U8", identity="engine-sha256")
KEYS = [bytes([i]) * 32 for i in range(6)]


def content(index):
    return np.random.default_rng(index).integers(0, 256, 6000, np.uint8).tobytes()


def fill(index, room):
    room[:] = content(index)


@pytest.fixture
def bridge(request):
    made = Bridge(f"memory://{request.node.originalname}?dram=64MiB")
    assert made.wait_connected(30)
    yield made
    made.close()


@pytest.fixture
def pages(bridge):
    return Pages(bridge, NS, Shard())


def test_a_page_comes_back_as_it_was(pages):
    assert pages.nbytes == 6000
    assert pages.exists(KEYS) == 0
    assert pages.saved(KEYS[:4], fill) == 4
    assert pages.exists(KEYS) == 4
    got = {}
    assert pages.loaded(KEYS, lambda i, page: got.__setitem__(i, bytes(page))) == 4
    assert got == {i: content(i) for i in range(4)}


def test_nothing_is_asked_for_no_keys(pages, bridge):
    assert pages.exists([]) == 0
    assert bridge.counts.looks == {}


@pytest.mark.parametrize("changed", [{"revision": "2"}, {"layout": "engine/2"}, {"tenant": "other"}, {"identity": "engine-xxh"}])
def test_another_namespace_has_none_of_them(pages, bridge, changed):
    pages.saved(KEYS, fill)
    other = Pages(bridge, Namespace(**FIELDS | {"dtype": "U8", "identity": "engine-sha256"} | changed), Shard())
    assert other.exists(KEYS) == 0


def test_another_rank_has_none_of_them(pages, bridge):
    pages.saved(KEYS, fill)
    assert Pages(bridge, NS, Shard(rank=1, ranks=2)).exists(KEYS) == 0


def test_pages_of_tokens_are_refused(bridge):
    with pytest.raises(Invalid, match="identity"):
        Pages(bridge, Namespace(**FIELDS), Shard())


def test_whoever_waited_long_enough_gets_its_memory_back(pages, monkeypatch):
    monkeypatch.setattr(module, "SAVE_S", 0.05)
    gate, ended = threading.Event(), []

    def slow(index, room):
        gate.wait(0.5)
        ended.append(index)

    assert pages.saved(KEYS, slow) == 0
    assert ended == [0]  # it waited for the one that was being copied, and no other was begun
