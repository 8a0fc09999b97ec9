"""Objects on their way: whatever the order and the pieces, what is handed over is the raw object, verified."""

import random  # noqa: TID251  seeded
from itertools import pairwise

import pytest

from kvstore import codec
from kvstore.errors import Corrupt
from kvstore.ids import BlockName, Shard, chain
from kvstore.repo.testing import raw_block, tiny

NS = tiny(dtype="BF16", layers=3)


@pytest.fixture
def block():
    [link] = chain(NS, range(NS.block_tokens))
    name = BlockName(NS.id, Shard(), link.prefix_id, link.tokens)
    return name, raw_block(NS, name, range(NS.block_tokens))


def pieces(length, seed, order):
    rng = random.Random(seed)
    cuts = sorted({0, length, *(rng.randrange(length) for _ in range(9))})
    spans = list(pairwise(cuts))
    return {"forward": spans, "backward": spans[::-1], "shuffled": rng.sample(spans, len(spans)), "whole": [(0, length)]}[order]


def arriving(name, body, into, *, in_place):
    stored = into if in_place else memoryview(bytearray(len(body) + 100))
    return stored, codec.Arriving(stored, name, NS, into)


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled", "whole"])
@pytest.mark.parametrize("coding", codec.CODECS)
@pytest.mark.parametrize("seed", range(3))
def test_any_pieces_in_any_order_make_the_raw_object(block, coding, order, seed):
    name, raw = block
    body = bytes(codec.encode(memoryview(raw), name, NS, coding).body)
    into = memoryview(bytearray(len(raw)))
    stored, coming = arriving(name, body, into, in_place=coding == "raw")
    for start, end in pieces(len(body), seed, order):
        assert not coming.complete
        stored[start:end] = body[start:end]
        coming.arrived(start, end)
    assert coming.complete
    coming.finish(len(body))
    assert bytes(into) == raw


@pytest.mark.parametrize("coding", codec.CODECS)
@pytest.mark.parametrize("told", [0, 1])
def test_what_was_not_told_or_was_taken_back_is_done_at_the_end(block, coding, told):
    name, raw = block
    body = bytes(codec.encode(memoryview(raw), name, NS, coding).body)
    into = memoryview(bytearray(len(raw)))
    stored, coming = arriving(name, body, into, in_place=coding == "raw")
    if told:
        stored[: len(body)] = bytes(len(body) - 8) + b"another!"
        coming.arrived(0, len(body))
        coming.arrived(0, 0)
    stored[: len(body)] = body
    coming.arrived(5, len(body))
    assert not coming.complete
    coming.finish(len(body))
    assert bytes(into) == raw


@pytest.mark.parametrize("coding", codec.CODECS)
@pytest.mark.parametrize("where", [3, 70, 500, -1])
def test_a_flipped_bit_is_corrupt_wherever_it_is(block, coding, where):
    name, raw = block
    body = bytearray(codec.encode(memoryview(raw), name, NS, coding).body)
    body[where] ^= 4
    into = memoryview(bytearray(len(raw)))
    stored, coming = arriving(name, body, into, in_place=coding == "raw")
    stored[: len(body)] = body
    for start, end in pieces(len(body), 1, "forward"):
        coming.arrived(start, end)
    assert not coming.complete
    with pytest.raises(Corrupt):
        coming.finish(len(body))


def test_a_coded_object_is_not_taken_for_a_raw_one_nor_a_cut_one_for_a_whole(block):
    name, raw = block
    body = bytes(codec.encode(memoryview(raw), name, NS, "bp-zstd").body)
    into = memoryview(bytearray(len(raw)))
    into[:] = body[: len(raw)]
    coming = codec.Arriving(into, name, NS, into)
    coming.arrived(0, len(raw))
    with pytest.raises(Corrupt, match="codec bp-zstd"):
        coming.finish(len(raw))
    stored, coming = arriving(name, body, into, in_place=False)
    stored[: len(body)] = body
    coming.arrived(0, len(body) - 1)
    with pytest.raises(Corrupt):
        coming.finish(len(body) - 1)


def test_bytes_that_change_after_they_were_told_of_do_not_pass_unless_they_were_checked(block):
    name, raw = block
    into = memoryview(bytearray(raw))
    coming = codec.Arriving(into, name, NS, into)
    coming.arrived(0, len(raw) - 4)
    into[len(raw) - 6] ^= 1  # of the last tensor, which was not complete
    coming.arrived(len(raw) - 4, len(raw))
    with pytest.raises(Corrupt):
        coming.finish(len(raw))
