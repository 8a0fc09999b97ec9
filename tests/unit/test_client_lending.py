"""Blocks of an arena: views on demand, and leases that go back as runs of numbers, each once."""

import numpy as np
import pytest

from kvstore import wire
from kvstore.client.lending import lend, releases, runs
from kvstore.errors import Corrupt

ARENA = memoryview(bytes(range(256)) * 64)


class Lender:
    def __init__(self):
        self.alive, self.given = True, []

    def give_back(self, leases):
        self.given += leases


def lent(count=4, size=16, first=7):
    lender = Lender()
    answer = wire.Leased(1, first, [index * size for index in range(count)], [size] * count, "")
    return lend(ARENA, answer, lender), lender


def test_all_go_back_as_one_run_whether_they_were_looked_at_or_not():
    for look in (False, True):
        blocks, lender = lent()
        assert len(blocks) == 4
        if look:
            assert [bytes(lease.view) for lease in blocks.leases] == [bytes(ARENA[at : at + 16]) for at in (0, 16, 32, 48)]
        blocks.release()
        blocks.release()
        assert lender.given == [(7, 4)]


def test_a_block_that_was_given_back_alone_is_not_given_back_again():
    blocks, lender = lent()
    blocks.leases[1].release()
    blocks.leases[1].release()
    blocks.release()
    blocks.leases[3].release()
    assert lender.given == [(8, 1), (7, 1), (9, 2)]


def test_nothing_is_given_back_of_nothing():
    blocks, lender = lent(count=0)
    blocks.release()
    assert lender.given == []


@pytest.mark.parametrize(
    ("offsets", "sizes"), [([-1], [4]), ([0], [0]), ([0], [-4]), ([16380], [8]), ([1 << 62], [1]), ([0, 4], [4]), ([0], [1 << 40])]
)
def test_extents_outside_the_arena_are_refused_before_a_view_is_made(offsets, sizes):
    with pytest.raises(Corrupt):
        lend(ARENA, wire.Leased(1, 1, offsets, sizes, ""), Lender())


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], []),
        ([5], [(5, 1)]),
        ([1, 2, 3], [(1, 3)]),
        ([3, 2, 1], [(3, 1), (2, 1), (1, 1)]),
        ([1, 2, 9, 10, 4], [(1, 2), (9, 2), (4, 1)]),
    ],
)
def test_numbers_as_runs(numbers, expected):
    assert runs(iter(numbers)) == expected


def test_no_message_gives_back_more_than_a_node_takes():
    frames, found = releases([(1, 40_000), (50_000, 40_000), (100_000, 3)]), []
    while frames:
        end = 4 + wire.body_length(frames[:4])
        found.append(wire.parse_to_node(frames[4:end]))
        frames = frames[end:]
    assert found == [wire.Release([(1, 40_000)]), wire.Release([(50_000, 40_000), (100_000, 3)])]


@pytest.mark.parametrize("size", [16, 9 << 20])
def test_copies_land_whole_in_the_callers_buffers(size):
    source = np.random.default_rng(1).integers(0, 256, 2 * size, dtype=np.uint8)
    lender = Lender()
    blocks = lend(memoryview(source), wire.Leased(1, 1, [0, size], [size, size], ""), lender)
    target = np.zeros(2 * size - 6, np.uint8)
    assert blocks.copy_into([target[: size - 3], memoryview(target)[size - 3 :]], skip=3) == 2
    assert np.array_equal(target, np.concatenate([source[3:size], source[size + 3 :]]))
    with pytest.raises(ValueError, match="buffer"):
        blocks.copy_into([target])
    lender.alive = False
    assert blocks.copy_into([target[:size], target[:size]][:1]) == 0
