"""The disk tier: what it promises when bytes rot, space ends, callers leave and machines stop."""

import asyncio
import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager

import pytest
from fakes.sealed import either_disk

from tiering import DiskTier, JournalFull, Lease, Lru, Miss, Movers, PathInUse, TierError
from tiering.index import Change, Index
from tiering.journal import Journal
from tiering.recovery import _parse, without_overlap
from tiering.slab import Placed, Slab
from tiering.testing import key_of, value_of, want_of

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tier"


@asynccontextmanager
async def disk(folder, limit=16 * MIB, **options):
    async with Movers.open() as movers, DiskTier.open(folder, limit, movers, **options) as tier:
        yield tier


async def put(tier, *numbers, size=10_000):
    return await tier.put_many([(want_of(n, size), memoryview(value_of(n, size))) for n in numbers])


async def get(tier, n, size=10_000):
    """The value's number if it is right, the miss otherwise."""
    (got,) = await tier.get_many([want_of(n, size)])
    if isinstance(got, Miss):
        return got
    with got:
        assert bytes(got.view) == value_of(n, size)
    return n


def place_of(tier, n):
    return tier._catalog._entries[key_of(n)].placed


def damage(folder, offset, how):
    """Change one byte of the slab, behind the tier's back and past its O_DIRECT."""
    with (folder / "slab").open("r+b") as slab:
        slab.seek(offset)
        old = slab.read(1)
        slab.seek(offset)
        slab.write(how(old))
        slab.flush()
        os.fsync(slab.fileno())


def flip(old):
    return bytes([old[0] ^ 1])


# Bytes that are not what they were


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
                patched.setattr("tiering.slab.os.preadv", _raise(code))
                assert await get(tier, 1) is miss
        assert await get(tier, 1) is Miss.ABSENT
        assert (tier.stats.errors, tier.stats.corruptions, tier.used) == (2, 1, 0)


def _raise(code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


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


# Restart


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


# Space


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 12 MiB."""
    at = tmp_path / "mounted"
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "kvtier-test", at], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.decode().strip()}")
    yield at
    subprocess.run(["umount", "-l", at], check=True)


async def test_b40_a_full_disk_refuses_and_the_same_key_is_stored_when_there_is_room(small_disk):
    """The file system is smaller than the limit. What was stored stays readable; nothing raises."""
    async with disk(small_disk / "tier", 64 * MIB) as tier:
        results = []
        for n in range(20):
            results += await put(tier, n, size=MIB)
        stored = [n for n, ok in enumerate(results) if ok]
        assert 3 <= len(stored) < 20
        assert tier.used == len(stored) * MIB
        assert tier.stats.drops == 20 - len(stored)
        assert tier.stats.errors >= 20 - len(stored)
        assert [await get(tier, n, size=MIB) for n in stored] == stored
        refused = next(n for n in range(20) if n not in stored)
        assert await get(tier, refused, size=MIB) is Miss.ABSENT
        await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,size=64m", small_disk], check=True)
        assert await put(tier, refused, size=MIB) == [True]
        assert await get(tier, refused, size=MIB) == refused


async def test_b40_an_index_that_cannot_be_written_loses_no_room(folder, monkeypatch):
    async with disk(folder, 10 * 10_000) as tier:
        await put(tier, *range(10))
        real = tier._index._write
        monkeypatch.setattr(tier._index, "_write", _raise(errno.ENOSPC))
        assert await put(tier, *range(10, 14)) == [False] * 4
        assert tier.used == tier.count * 10_000
        monkeypatch.setattr(tier._index, "_write", real)
        assert await put(tier, *range(20, 30)) == [True] * 10
        assert [await get(tier, n) for n in range(20, 30)] == list(range(20, 30))
        assert tier.used == tier.limit
        await tier.evict(10**9)
        await tier._index.commit([])
        await _prewritten(tier)
        assert tier._catalog._space.free_bytes == tier._slab.size
    async with disk(folder, 10 * 10_000) as tier:
        assert tier.count == 0


async def _prewritten(tier):
    """Wait until every page of the slab was written."""

    def done():
        space = tier._catalog._space
        slots = sum(entry.placed.length for entry in tier._catalog._entries.values())
        return not space._holes.free_bytes and space.free_bytes + slots == tier._slab.size

    while not done():  # noqa: ASYNC110  no event tells; only tests care
        await asyncio.sleep(0.005)


async def test_a_new_slab_is_written_once_while_the_tier_works(folder):
    async with disk(folder, 24 * MIB) as tier:
        assert await put(tier, *range(8), size=MIB) == [True] * 8
        await _prewritten(tier)
        await tier._index.commit([])
        assert (folder / "slab").stat().st_blocks * 512 >= tier._slab.size
        assert [await get(tier, n, size=MIB) for n in range(8)] == list(range(8))
    async with disk(folder, 24 * MIB) as tier:
        assert tier._catalog._space._holes.free_bytes == 0  # not again
        assert [await get(tier, n, size=MIB) for n in range(8)] == list(range(8))


async def test_a_slab_that_is_still_being_written_holds_all_that_it_should(folder, monkeypatch):
    monkeypatch.setattr("tiering.slab.Slab.zero", lambda *_: time.sleep(0.02))
    async with disk(folder, 40 * MIB) as tier:
        for n in range(40):
            assert await put(tier, n, size=MIB) == [True]
        assert (tier.used, tier.count) == (40 * MIB, 40)
        assert [await get(tier, n, size=MIB) for n in range(40)] == list(range(40))


# Callers


async def test_b32_a_cancelled_put_ends_when_nothing_uses_the_buffer_any_more(folder, monkeypatch):
    real, started, go = os.pwritev, threading.Event(), threading.Event()

    def slow(*args):
        started.set()
        go.wait(10)
        return real(*args)

    async with disk(folder) as tier:
        await _prewritten(tier)
        monkeypatch.setattr("tiering.slab.os.pwritev", slow)
        buffer = bytearray(value_of(1, 8192))
        storing = asyncio.create_task(tier.put_many([(want_of(1, 8192), memoryview(buffer))]))
        await asyncio.to_thread(started.wait)
        storing.cancel()
        await asyncio.sleep(0.01)
        storing.cancel()
        await asyncio.sleep(0.01)
        assert not storing.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await storing
        buffer[:] = bytes(8192)
        assert await get(tier, 1, size=8192) == 1


async def test_b32_a_buffer_that_changes_while_it_is_written_is_never_served(folder, monkeypatch):
    async with disk(folder) as tier:
        buffer = mmap.mmap(-1, 8192)  # written from where it is
        buffer[:] = value_of(1, 8192)
        real = os.pwritev

        def overwrite(*args):
            buffer[:] = b"\xee" * 8192
            return real(*args)

        await _prewritten(tier)
        monkeypatch.setattr("tiering.slab.os.pwritev", overwrite)
        await tier.put_many([(want_of(1, 8192), memoryview(buffer))])
        monkeypatch.undo()
        assert await get(tier, 1, size=8192) is Miss.CORRUPT


async def test_b33_twenty_puts_of_one_key_write_it_once_and_a_failed_one_is_taken_over(folder, monkeypatch):
    real, writes = os.pwritev, []

    def count(fd, parts, offset):
        writes.append(offset)
        if len(writes) == 1:
            raise OSError(errno.EIO, "first write fails")
        return real(fd, parts, offset)

    async with disk(folder) as tier:
        await _prewritten(tier)
        monkeypatch.setattr("tiering.slab.os.pwritev", count)
        value = memoryview(value_of(1, 8192)[:4096] + value_of(1, 8192)[4096:])
        results = await asyncio.gather(*(tier.put_many([(want_of(1, 8192), value)]) for _ in range(20)))
        assert results.count([False]) == 1
        assert results.count([True]) == 19
        assert (tier.used, tier.count, await get(tier, 1, size=8192)) == (8192, 1, 1)


async def test_values_at_any_address_are_stored_whole(folder):
    """Aligned, off by one, longer than the bounce buffer, and as another item type."""
    async with disk(folder) as tier:
        size = 2 * MIB + 777
        raw = memoryview(bytearray(size + 1))
        raw[1:] = value_of(1, size)
        assert await tier.put_many([(want_of(1, size), raw[1:].toreadonly())]) == [True]
        assert await get(tier, 1, size=size) == 1
        assert await tier.put_many([(want_of(2, 8000), memoryview(bytearray(value_of(2, 8000))).cast("Q"))]) == [True]
        assert await get(tier, 2, size=8000) == 2
        with pytest.raises(TypeError, match="contiguous"):
            await tier.put_many([(want_of(3, 10), memoryview(bytes(20))[::2])])
        assert tier.used == size + 8000


async def test_a_value_that_is_being_read_is_neither_evicted_nor_overwritten(folder, monkeypatch):
    real, started, go = os.preadv, threading.Event(), threading.Event()

    def slow(*args):
        started.set()
        go.wait(10)
        return real(*args)

    async with disk(folder, 4 * 10_000) as tier:
        await put(tier, *range(4))
        monkeypatch.setattr("tiering.slab.os.preadv", slow)
        reading = asyncio.create_task(get(tier, 0))
        await asyncio.to_thread(started.wait)
        assert tier.discard_many([key_of(0)]) == 0
        for n in range(4, 12):
            assert await put(tier, n) == [True]
        assert tier.contains_many([key_of(0)]) == [True]
        go.set()
        assert await reading == 0
        assert tier.used <= tier.limit


async def test_b44_a_cancelled_read_pins_nothing(folder):
    async with disk(folder, 4 * 10_000) as tier:
        await put(tier, *range(4))
        for n in range(200):
            reading = asyncio.create_task(get(tier, n % 4))
            for _ in range(n % 5):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        assert tier._catalog._pinned == 0
        assert await tier.evict(10**9) == 40_000


async def test_held_keys_stay_and_holds_count(folder):
    async with disk(folder, 4 * 10_000) as tier:
        tier.hold([key_of(0), key_of(0), key_of(1)])  # before they are there
        for n in range(10):
            await put(tier, n)
        assert tier.contains_many([key_of(n) for n in range(4)]) == [True, True, False, False]
        assert tier.discard_many([key_of(0)]) == 0
        tier.hold([key_of(8), key_of(9)])
        assert await put(tier, 11) == [False]  # everything is held
        tier.release([key_of(0), key_of(1), key_of(8)])
        assert await put(tier, 11) + await put(tier, 12) == [True, True]
        assert tier.contains_many([key_of(n) for n in (0, 1, 8, 9, 11, 12)]) == [True, False, False, True, True, True]
        tier.release([key_of(0), key_of(9), key_of(77)])
        assert await tier.evict(10**9) == 40_000


async def test_flush_waits_for_what_is_under_way(folder, monkeypatch):
    real, go = os.pwritev, threading.Event()
    async with disk(folder) as tier:
        await _prewritten(tier)
        monkeypatch.setattr("tiering.slab.os.pwritev", lambda *args: (go.wait(10), real(*args))[1])
        storing = asyncio.create_task(put(tier, 1))
        await asyncio.sleep(0.01)
        flushing = asyncio.create_task(tier.flush([key_of(1), key_of(2)]))
        await asyncio.sleep(0.01)
        assert not flushing.done()
        go.set()
        assert await flushing == [True, False]
        assert await storing == [True]


async def test_another_size_under_a_key_replaces(folder):
    async with disk(folder) as tier:
        await put(tier, 1, size=9000)
        await put(tier, 1, size=5000)
        assert (tier.used, await get(tier, 1, size=9000), await get(tier, 1, size=5000)) == (5000, Miss.ABSENT, 1)
    async with disk(folder) as tier:
        assert (tier.used, await get(tier, 1, size=5000)) == (5000, 1)


async def test_a_policy_may_refuse_and_a_closed_tier_answers(folder):
    class Nothing(Lru):
        def admit(self, key, size):
            return False

    async with disk(folder, policy=Nothing) as tier:
        assert await put(tier, 1) == [False]
    async with disk(folder) as tier:
        await put(tier, 1)
    assert await get(tier, 1) is Miss.UNAVAILABLE
    assert await put(tier, 2) == [False]
    assert (tier.discard_many([key_of(1)]), await tier.evict(1)) == (0, 0)


async def test_b42_threads_and_the_loop_together_keep_the_accounting_exact(folder):
    async with disk(folder, 12 * 10_000) as tier:
        done, problems = threading.Event(), []

        def work(seed):
            n = seed
            try:
                while not done.is_set():
                    n = (n * 7 + 3) % 31
                    tier.hold([key_of(n)])
                    tier.contains_many([key_of(n)])
                    tier.release([key_of(n)])
                    if n % 5 == 0:
                        tier.discard_many([key_of(n)])
                    assert tier.used <= tier.limit
                    time.sleep(0.0002)
            except BaseException as error:
                problems.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(7)]
        for thread in threads:
            thread.start()
        for step in range(20):
            await put(tier, step % 31, (step * 3) % 31)
            assert await get(tier, step % 31) in {step % 31, Miss.ABSENT}
        done.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert problems == []
        assert tier.used == tier.count * 10_000
        await tier.evict(10**9)
        assert tier.used == 0
        await tier._index.commit([])
        await _prewritten(tier)
        assert tier._catalog._space.free_bytes == tier._slab.size


# The journal


async def test_the_journal_keeps_records_until_they_are_removed(folder):
    async with disk(folder) as tier:
        await tier.journal.put(b"b", b"second")
        await tier.journal.put(b"a", b"first")
        await tier.journal.put(b"c", b"third")
        await tier.journal.put(b"b", b"replaced")
        await tier.journal.remove(b"c")
        await tier.journal.remove(b"unknown")
        assert tier.journal.items() == [(b"a", b"first"), (b"b", b"replaced")]
    async with disk(folder) as tier:
        assert tier.journal.items() == [(b"a", b"first"), (b"b", b"replaced")]


async def test_the_journal_is_bounded_and_promises_nothing_it_cannot_keep(folder, monkeypatch):
    monkeypatch.setattr(Journal, "MAX_BODY", 100)
    monkeypatch.setattr(Journal, "MAX_TOTAL", 250)
    async with disk(folder) as tier:
        with pytest.raises(JournalFull):
            await tier.journal.put(b"a", bytes(101))
        results = await asyncio.gather(*(tier.journal.put(b"%d" % n, bytes(100)) for n in range(4)), return_exceptions=True)
        assert [type(result) for result in results] == [type(None), type(None), JournalFull, JournalFull]
        await tier.journal.put(b"1", bytes(50))  # a replacement counts once
        for bad in (b"", b"x" * 65):
            with pytest.raises(ValueError, match="bytes"):
                await tier.journal.put(bad, b"")
        monkeypatch.setattr(tier._index, "_write", _raise(errno.ENOSPC))
        with pytest.raises(OSError, match="cannot be written"):
            await tier.journal.put(b"new", b"x")
        with pytest.raises(OSError, match="cannot be written"):
            await tier.journal.put(b"1", b"x")
        assert tier.journal.items() == [(b"0", bytes(100)), (b"1", bytes(50))]
        monkeypatch.undo()


async def test_leases_of_the_disk_tier_are_their_reader_s_own(folder):
    async with disk(folder) as tier:
        await put(tier, 1)
        (lease,) = await tier.get_many([want_of(1, 10_000)])
        assert isinstance(lease, Lease)
        assert (lease.offset, lease.source, tier.direct in {True, False}) == (-1, "nvme", True)
        tier.discard_many([key_of(1)])
        await put(tier, *range(2, 50))
        assert bytes(lease.view) == value_of(1, 10_000)
        lease.release()
