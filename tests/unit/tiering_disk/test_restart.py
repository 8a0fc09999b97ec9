"""What is there after a restart, a crash or another limit; and whose folder it is."""

import asyncio
import os
import subprocess
import sys

import pytest
from fakes.disk import MIB, damage, disk, flip, get, place_of, put
from fakes.sealed import either_disk

from tiering import Miss, PathInUse, TierError
from tiering.index import Change, Index
from tiering.recovery import _parse, without_overlap
from tiering.slab import Placed, Slab
from tiering.testing import key_of


@either_disk
@pytest.mark.parametrize("file", ["slab", "index"])
@pytest.mark.parametrize("what", ["empty", "zero-filled", "half", "garbage"])
async def test_b31_ruined_local_data_at_restart_is_a_miss_never_a_hit(folder, file, what, seals):
    async with disk(folder, seals=seals) as tier:
        await put(tier, *range(6))
        damaged = range(6) if what != "half" else range(3, 6)
        half = place_of(tier, 3).offset
    path = folder / file
    size = path.stat().st_size
    if what == "half":
        os.truncate(path, half if file == "slab" else 3 * 4096)
    else:
        path.write_bytes({"empty": b"", "zero-filled": bytes(size), "garbage": b"\x5a" * size}[what])
    async with disk(folder, seals=seals) as tier:
        got = [await get(tier, n) for n in range(6)]
        if file == "index":
            assert got == [Miss.ABSENT] * 6
        else:
            assert got == [Miss.CORRUPT if n in damaged else n for n in range(6)]
        assert await put(tier, *range(6)) == [True] * 6
        assert [await get(tier, n) for n in range(6)] == list(range(6))


async def test_b31_a_zeroed_page_inside_the_index_does_not_kill_the_process(folder):
    """LMDB aborts on such a page; the file must be judged before LMDB sees it."""
    async with disk(folder) as tier:
        for start in range(0, 300, 100):
            await put(tier, *range(start, start + 100), size=100)
    original = (folder / "index").read_bytes()
    survived = set()
    for page in range(2, 24):
        (folder / "index").write_bytes(original[: page * 4096] + bytes(4096) + original[(page + 1) * 4096 :])
        async with disk(folder) as tier:
            got = {await get(tier, n, size=100) in {n, Miss.CORRUPT} for n in range(0, 300, 50)}
            assert len(got) == 1  # the index is whole, or it is gone
            survived |= got
            assert await put(tier, 999) == [True]
    assert survived == {True, False}


async def test_b39_restart_of_a_full_tier(folder):
    """100 x 1 MiB in 100 MiB: used is exact, all are readable, the next put evicts one: the one stored first."""
    async with disk(folder, 100 * MIB) as tier:
        for start in range(0, 100, 10):
            assert await put(tier, *range(start, start + 10), size=MIB) == [True] * 10
        assert tier.used == tier.limit == 100 * MIB
    async with disk(folder, 100 * MIB) as tier:
        assert tier.used == 100 * MIB
        assert [await get(tier, n, size=MIB) for n in range(1, 100)] == list(range(1, 100))
        assert await get(tier, 0, size=MIB) == 0
        assert await put(tier, 100, size=MIB) == [True]
        assert (tier.used, tier.count, tier.stats.evictions) == (100 * MIB, 100, 1)
        assert tier.contains_many([key_of(n) for n in (0, 1, 2, 100)]) == [True, False, True, True]


@either_disk
async def test_the_limit_may_change_between_runs(folder, seals):
    async with disk(folder, 10 * MIB, seals=seals) as tier:
        await put(tier, *range(10), size=MIB)
    async with disk(folder, 4 * MIB, seals=seals) as tier:
        assert (tier.used, tier.count) == (4 * MIB, 4)
        kept = [n for n in range(10) if tier.contains_many([key_of(n)])[0]]
        assert [await get(tier, n, size=MIB) for n in kept] == kept
    async with disk(folder, 20 * MIB, seals=seals) as tier:
        assert tier.used == 4 * MIB
        assert await put(tier, *range(10, 26), size=MIB) == [True] * 16
        assert [await get(tier, n, size=MIB) for n in (*kept, *range(10, 26))] == [*kept, *range(10, 26)]


@either_disk
async def test_after_an_unclean_reboot_only_slots_with_their_own_header_are_believed(folder, monkeypatch, seals):
    monkeypatch.setattr("tiering.recovery.boot_id", lambda: "first boot")
    async with disk(folder, seals=seals) as tier:
        await put(tier, *range(4))
        offset = place_of(tier, 2).offset
        monkeypatch.setattr(tier._index, "commit", _never)  # the machine stops before it can say that it stopped
    damage(folder, offset + 20, flip)
    async with disk(folder, seals=seals) as tier:  # the same boot: headers are not looked at, values are checked when read
        assert tier.count == 4
        monkeypatch.setattr(tier._index, "commit", _never)
    monkeypatch.setattr("tiering.recovery.boot_id", lambda: "second boot")
    async with disk(folder, seals=seals) as tier:
        assert [await get(tier, n) for n in range(4)] == [0, 1, Miss.ABSENT, 3]
        assert tier.used == 30_000
    monkeypatch.setattr("tiering.recovery.boot_id", lambda: "third boot")
    damage(folder, offset + 4096 * 3 + 4096 + 20, flip)
    async with disk(folder, seals=seals) as tier:  # it was stopped cleanly
        assert tier.count == 3


async def _never(_):
    raise OSError("the power is gone")


async def test_b31_at_no_instant_does_a_durable_entry_point_at_bytes_that_may_not_be_there(folder, monkeypatch):
    """What a power cut leaves: the last durable index over any later state of the slab. So bytes are synced before an entry
    names them, and a slot is overwritten only after the index durably forgot it.
    """
    listed, unsynced, problems, entries = {}, set(), [], 0
    write, sync, commit = Slab._write_all, Slab.sync, Index._write

    def checked_write(self, parts, offset):
        end = offset + sum(part.nbytes for part in parts)
        unsynced.update(range(offset, end, 4096))
        problems.extend(one for one in list(listed.values()) if one.offset < end and offset < one.offset + one.length)
        write(self, parts, offset)

    def checked_sync(self):
        written = set(unsynced)
        sync(self)
        unsynced.difference_update(written)

    def checked_commit(self, group):
        nonlocal entries
        commit(self, group)
        for table, key, value in (change for ask in group for change in ask.changes):
            if table == "slots" and value is None:
                listed.pop(key, None)
            elif table == "slots":
                listed[key] = _parse(key, value)
                entries += 1
                problems.extend(
                    [key] if unsynced & set(range(listed[key].offset, listed[key].offset + listed[key].length, 4096)) else []
                )

    monkeypatch.setattr(Slab, "_write_all", checked_write)
    monkeypatch.setattr(Slab, "sync", checked_sync)
    monkeypatch.setattr(Index, "_write", checked_commit)
    limit = 30 * 40_000
    async with disk(folder, limit) as tier:
        for start in range(0, 400, 10):
            await asyncio.gather(*(put(tier, n, size=1 + n * 7919 % 40_000) for n in range(start, start + 10)))
            tier.discard_many([key_of(start - 3)])
        assert tier.stats.evictions > 200
        await tier._index.commit([])
        assert {key: one.size for key, one in listed.items()} == {
            key: entry.placed.size for key, entry in tier._catalog._entries.items()
        }
    assert (problems, entries) == ([], 400)


def test_of_two_claims_to_one_place_the_later_stands():
    def claim(offset, size, seq):
        return Placed(b"k" * 32, offset, size, seq, b"d" * 16)

    old, new, apart = claim(0, 100_000, 5), claim(8192, 10, 9), claim(200_704, 10, 1)
    assert without_overlap([old, new, apart]) == [new, apart]
    assert without_overlap([new, claim(8192, 5000, 3), old]) == [new]
    assert without_overlap([claim(0, 100_000, 50), new, claim(16384, 10, 60), apart]) == [claim(16384, 10, 60), apart]


async def test_a_folder_has_one_owner_and_another_version_s_is_refused(folder):
    async with disk(folder) as tier:
        with pytest.raises(PathInUse, match="open already"):
            async with disk(folder):
                pass
        code = (
            "import asyncio, sys; from pathlib import Path; from tiering import *\n"
            "async def main():\n"
            "    async with Movers.open() as m, DiskTier.open(Path(sys.argv[1]), 1 << 24, m): pass\n"
            "asyncio.run(main())"
        )
        other = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code, folder], capture_output=True, text=True)
        assert (other.returncode, "PathInUse" in other.stderr) == (1, True)
        assert await put(tier, 1) == [True]
        await tier._index.commit([Change("meta", b"layout", b"99")])
    with pytest.raises(TierError, match="layout b'99'"):
        async with disk(folder):
            pass
