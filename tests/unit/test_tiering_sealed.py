"""A sealed disk tier: the same tier, and a folder that tells nothing to whoever takes it away."""

import os
from contextlib import asynccontextmanager

import pytest

from kvstore.errors import Denied
from kvstore.sealing import DiskSeals, MasterKey, MasterKeys
from tiering import DiskTier, Miss, Movers, TierError, Want

OLD, NEW = MasterKey("old", b"o" * 32), MasterKey("new", b"n" * 32)
SIZES = [1, 4095, 4096, 1 << 20, (1 << 20) + 1, (5 << 20) + 12345]


def want(index: int) -> Want:
    return Want(bytes([index]) * 32, SIZES[index])


def value(index: int) -> bytes:
    return (b"secret %d " % index * (SIZES[index] // 8 + 1))[: SIZES[index]]


@asynccontextmanager
async def opened(folder, *masters: MasterKey):
    seals = DiskSeals(MasterKeys(masters)) if masters else None
    async with Movers.open() as movers, DiskTier.open(folder, 64 << 20, movers, seals=seals) as tier:
        yield tier


async def fill(tier) -> None:
    assert all(await tier.put_many([(want(index), memoryview(value(index))) for index in range(len(SIZES))]))


async def held(tier) -> list[bytes | Miss]:
    leases = await tier.get_many([want(index) for index in range(len(SIZES))])
    return [lease if isinstance(lease, Miss) else bytes(lease.view) for lease in leases]


async def test_values_and_journal_outlive_a_restart_and_stand_nowhere_in_the_clear(tmp_path):
    async with opened(tmp_path, OLD) as tier:
        await fill(tier)
        await tier.journal.put(b"id", b"promise of alice")
    files = b"".join((tmp_path / name).read_bytes() for name in ("slab", "index"))
    for words in (b"secret", b"alice", want(3).key, want(5).key):
        assert words not in files
    async with opened(tmp_path, NEW, OLD) as tier:  # wrapped anew
        assert await held(tier) == [value(index) for index in range(len(SIZES))]
        assert tier.journal.items() == [(b"id", b"promise of alice")]
        assert sorted(tier.keys()) == [want(index).key for index in range(len(SIZES))]
        assert tier.discard_many([want(0).key]) == 1
        await tier.journal.remove(b"id")
    async with opened(tmp_path, NEW) as tier:
        assert await held(tier) == [Miss.ABSENT, *(value(index) for index in range(1, len(SIZES)))]
        assert tier.journal.items() == []


async def test_what_was_altered_is_dropped(tmp_path):
    async with opened(tmp_path, OLD) as tier:
        await fill(tier)
        slab = tmp_path / "slab"
        placed = [tier._catalog._entries[want(index).key].placed for index in range(len(SIZES))]
        with slab.open("r+b") as file:
            for each in placed[:-1]:
                file.seek(each.offset + 4096)
                byte = file.read(1)[0] ^ 1
                file.seek(each.offset + 4096)
                file.write(bytes([byte]))
            file.flush()
            os.fsync(file.fileno())
        assert await held(tier) == [Miss.CORRUPT] * (len(SIZES) - 1) + [value(len(SIZES) - 1)]


async def test_no_two_slots_share_a_key(tmp_path):
    async with opened(tmp_path, OLD) as tier:
        await fill(tier)
        salts = {tier._catalog._entries[want(index).key].placed.salt for index in range(len(SIZES))}
        assert len(salts) == len(SIZES)
        assert {len(salt) for salt in salts} == {32}


async def test_a_folder_is_sealed_from_its_beginning_or_never(tmp_path):
    for folder, first, then in ((tmp_path / "a", (), (OLD,)), (tmp_path / "b", (OLD,), ())):
        async with opened(folder, *first) as tier:
            await fill(tier)
        with pytest.raises(TierError, match="sealed"):
            async with opened(folder, *then):
                pass
        async with opened(folder, *first) as tier:
            assert await held(tier) == [value(index) for index in range(len(SIZES))]
    with pytest.raises(Denied) as refused:
        async with opened(tmp_path / "b", NEW):
            pass
    assert refused.value.kind == "no_key"
