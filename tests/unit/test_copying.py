"""Copies by two threads end with every byte in its place, whoever is late."""

import threading

import numpy as np
import pytest

from kvstore import copying
from kvstore.copying import copy

SIZES = [0, 1, 4096, (1 << 20) - 1, 1 << 20, (2 << 20) - 8192, (3 << 20) + 5, 9 << 20]


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_byte_arrives_and_none_beyond(nbytes):
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    target = np.zeros(nbytes + 2, np.uint8)
    copy(target[1:-1], memoryview(source))
    assert np.array_equal(target[1:-1], source)
    assert target[0] == target[-1] == 0


def test_many_threads_at_once():
    sources = [np.random.default_rng(i).integers(0, 256, 2 << 20, np.uint8) for i in range(4)]
    targets = [np.zeros(2 << 20, np.uint8) for _ in sources]

    def often(target, source):
        for _ in range(20):
            target[:] = 0
            copy(target, source)
            if not np.array_equal(target, source):
                return

    threads = [threading.Thread(target=often, args=pair) for pair in zip(targets, sources, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(np.array_equal, targets, sources))


def test_a_helper_that_never_comes_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(copying._Second, "_help", lambda self: None)
    second = copying._Second()
    source, target = np.arange(1 << 20, dtype=np.uint8), np.zeros(1 << 20, np.uint8)
    assert second.copy(target, source)
    assert second.copy(target, source)
    assert np.array_equal(target, source)


def test_other_lengths_and_read_only_targets_are_refused():
    source, target = np.ones(2 << 20, np.uint8), np.zeros(2 << 20, np.uint8)
    with pytest.raises(ValueError, match="a buffer of 2097151 bytes for 2097152"):
        copy(target[1:], source)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy(target, source)
    assert not target.any()
