"""Bytes on the disk that are not what they were: a miss, never a wrong value."""

import errno
import os

from fakes.disk import damage, disk, flip, get, place_of, put, raising
from fakes.sealed import either_disk

from tiering import Miss


@either_disk
async def test_b30_one_flipped_bit_is_a_corrupt_miss_once_and_then_the_key_can_be_stored_again(folder, seals):
    async with disk(folder, seals=seals) as tier:
        assert await put(tier, 1, 2) == [True, True]
        damage(folder, place_of(tier, 1).offset + 4096 + 5000, flip)
        assert await get(tier, 1) is Miss.CORRUPT
        assert await get(tier, 1) is Miss.ABSENT
        assert (tier.stats.corruptions, tier.used, await get(tier, 2)) == (1, 10_000, 2)
        assert await put(tier, 1) == [True]
        assert await get(tier, 1) == 1


@either_disk
async def test_b29_a_slab_cut_in_half_gives_misses_and_goes_on(folder, seals):
    async with disk(folder, seals=seals) as tier:
        await put(tier, *range(8))
        cut = place_of(tier, 4).offset + 4096 + 3000
        os.truncate(folder / "slab", cut)
        assert [await get(tier, n) for n in range(4)] == [0, 1, 2, 3]
        assert [await get(tier, n) for n in range(4, 8)] == [Miss.CORRUPT] * 4
        assert (tier.stats.corruptions, tier.used) == (4, 40_000)
        assert await put(tier, *range(4, 8)) == [True] * 4
        assert [await get(tier, n) for n in range(8)] == list(range(8))


async def test_b29_a_read_that_ends_within_a_page_met_the_end_of_the_file(folder, monkeypatch):
    """Whatever grew there since: asking for the rest would be an unaligned read."""
    real = os.preadv
    async with disk(folder) as tier:
        await put(tier, 1)
        with monkeypatch.context() as patched:
            patched.setattr("tiering.slab.os.preadv", lambda fd, parts, at: min(5000, real(fd, parts, at)))
            assert await get(tier, 1) is Miss.CORRUPT
        assert tier.count == 0


async def test_b29_an_io_error_drops_the_value_and_any_other_error_keeps_it(folder, monkeypatch):
    async with disk(folder) as tier:
        await put(tier, 1)
        for code, miss in [(errno.ENOMEM, Miss.UNAVAILABLE), (errno.EIO, Miss.CORRUPT)]:
            with monkeypatch.context() as patched:
                patched.setattr("tiering.slab.os.preadv", raising(code))
                assert await get(tier, 1) is miss
        assert await get(tier, 1) is Miss.ABSENT
        assert (tier.stats.errors, tier.stats.corruptions, tier.used) == (2, 1, 0)
