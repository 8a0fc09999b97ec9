"""A tier tells one listener of every value that comes and goes."""

from tiering import DiskTier, DramTier, Movers
from tiering.testing import key_of, value_of, want_of

SIZE = 4096


async def test_memory_tells_of_commits_evictions_and_discards():
    told = []
    async with Movers.open() as movers, DramTier.open("dram", 4 * SIZE, movers) as tier:
        await tier.put_many([(want_of(0, SIZE), memoryview(value_of(0, SIZE)))])
        tier.watch(lambda key, by, _: told.append((key, by)))
        await tier.put_many([(want_of(i, SIZE), memoryview(value_of(i, SIZE))) for i in range(5)])
        assert set(tier.keys()) == {key for key in map(key_of, range(5)) if tier.contains_many([key])[0]}
        came = [key for key, by in told if by == 1]
        assert set(came) == set(map(key_of, range(1, 5)))
        assert len([key for key, by in told if by == -1]) == 1  # five do not fit
        assert tier.discard_many(tier.keys()) == 4
        assert sum(by for _, by in told) == -1  # the first was here before anybody listened
        tier.watch(None)
        heard = len(told)
        await tier.put_many([(want_of(9, SIZE), memoryview(value_of(9, SIZE)))])
        assert len(told) == heard


async def test_memory_tells_of_a_value_that_replaces_one_of_another_size():
    told = []
    async with Movers.open() as movers, DramTier.open("dram", 16 * SIZE, movers) as tier:
        tier.watch(lambda key, by, _: told.append((key, by)))
        for size in (SIZE, 2 * SIZE, 2 * SIZE):
            await tier.put_many([(want_of(1, size), memoryview(value_of(1, size)))])
    assert told == [(key_of(1), 1), (key_of(1), -1), (key_of(1), 1)]


async def test_disk_tells_of_what_is_durable_and_what_goes(tmp_path):
    told = []
    async with Movers.open() as movers:
        async with DiskTier.open(tmp_path, 4 * SIZE, movers) as tier:
            tier.watch(lambda key, by, _: told.append((key, by)))
            await tier.put_many([(want_of(i, SIZE), memoryview(value_of(i, SIZE))) for i in range(4)])
            assert sorted(told) == sorted((key_of(i), 1) for i in range(4))
            told.clear()
            await tier.evict(SIZE)
            assert [by for _, by in told] == [-1]
            tier.discard_many([key_of(i) for i in range(4)])
            assert {key for key, _ in told} == set(map(key_of, range(4)))
            assert tier.keys() == []
            await tier.put_many([(want_of(7, SIZE), memoryview(value_of(7, SIZE)))])
        async with DiskTier.open(tmp_path, 4 * SIZE, movers) as tier:
            assert tier.keys() == [key_of(7)]  # what survived a restart is not told, and found by asking
