"""What a reader gets when tiers and origins fail: another place's bytes, or a miss, and never wrong ones."""

import os

from fakes.stack import SIZE

from tiering import Miss
from tiering.testing import key_of, value_of, want_of


async def test_b29_torn_slot_is_served_from_the_origin(rig):
    async with rig() as r:
        await r.on_disk(1)
        r.in_origin(1)
        os.truncate(r.folder / "slab", r.disk._catalog._entries[key_of(1)].placed.offset + 4096 + SIZE // 2)
        assert await r.sources(1) == ["bucket"]
        await r.settle()
        r.forget_memory(1)
        assert await r.sources(1) == ["nvme"]  # written anew
        assert r.disk.stats.corruptions == 1


async def test_b30_bit_rot_is_refetched_and_a_bad_copy_in_the_bucket_too_is_a_miss(rig):
    async with rig() as r:
        await r.on_disk(1, 2)
        r.in_origin(1)
        r.spoil_disk(1)
        r.spoil_disk(2)
        r.origin.answer[key_of(2)] = Miss.CORRUPT
        assert await r.get(1) == [1]
        assert await r.get(2) == [Miss.CORRUPT]
        assert (r.disk.stats.corruptions, r.stack.stats["bucket"].corruptions) == (2, 1)
        assert r.stack.locate([key_of(2)]) == [None]


async def test_b34_an_origin_with_wrong_bytes_is_passed_over(rig):
    async with rig(origins=2) as r:
        peer, bucket = r.origins
        peer.answer[key_of(1)] = Miss.CORRUPT
        bucket.values[key_of(1)] = value_of(1, SIZE)
        assert await r.sources(1) == ["origin1"]
        assert (len(peer.fetched), len(bucket.fetched)) == (1, 1)


async def test_an_origin_that_raises_is_unavailable_and_the_next_is_asked(rig):
    async with rig(origins=2) as r:
        first, second = r.origins

        async def down(_):
            raise ConnectionError("no route")

        first.before = down
        second.values[key_of(1)] = value_of(1, SIZE)
        assert await r.get(1) == [1]
        assert await r.get(2) == [Miss.UNAVAILABLE]  # the second has it not, and the first did not say
        assert (r.stack.stats["bucket"].errors, r.stack.stats["bucket"].misses[Miss.UNAVAILABLE]) == (2, 2)
        assert r.dram.used == SIZE


async def test_b38_what_was_discarded_is_fetched_again_and_gone_is_gone(rig):
    async with rig() as r:
        r.in_origin(1)
        assert await r.get(1) == [1]
        await r.settle()
        r.origin.values.clear()  # deleted behind our back
        assert r.stack.discard_many([key_of(1)]) == 2
        assert r.stack.locate([key_of(1)]) == [None]
        assert await r.get(1) == [Miss.ABSENT]
        assert len(r.origin.fetched) == 2
        r.publish(1).release()  # the next put brings it everywhere again
        await r.settle()
        assert r.origin.values == {key_of(1): value_of(1, SIZE)}
        assert r.stack.locate([key_of(1)]) == ["dram"]


async def test_without_a_disk_nothing_is_durable_and_origins_still_serve(rig):
    async with rig(disk=None) as r:
        r.in_origin(1)
        assert await r.sources(1) == ["bucket"]
        assert await r.stack.flush([want_of(1, SIZE)]) == [False]
        assert r.stack.locate([key_of(1), key_of(2)]) == ["dram", None]
        r.forget_memory(1)
        assert await r.sources(1) == ["bucket"]


async def test_b40_a_disk_that_refuses_leaves_reads_to_the_bucket(rig, monkeypatch):
    async with rig() as r:
        r.in_origin(1)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("tiering.slab.os.pwritev", full)
            assert await r.sources(1) == ["bucket"]
            await r.settle()
            r.forget_memory(1)
            assert await r.sources(1) == ["bucket"]
            await r.settle()
        assert r.disk.stats.errors >= 2
        r.forget_memory(1)
        assert await r.sources(1) == ["bucket"]
        await r.settle()
        r.forget_memory(1)
        assert await r.sources(1) == ["nvme"]
