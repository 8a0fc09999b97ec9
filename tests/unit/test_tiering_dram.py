"""The arena and the memory tier."""

import asyncio
import ctypes
import errno
import json
import random  # noqa: TID251  seeded
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tiering import DramTier, Lease, Lru, Miss, Movers, TierClosed, Want
from tiering.arena import Arena
from tiering.testing import key_of, value_of, want_of

MIB = 1 << 20

# A reader of another process: what it can do with the arena's descriptor, as a dictionary of outcomes.
READER = r"""
import ctypes, errno, json, mmap, os, socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
message, (fd, *_), _, _ = socket.recv_fds(control, 64, 1)
size, offset, length = map(int, message.split())
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what):
    try:
        what()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def punch():
    if libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4096)):
        raise OSError(ctypes.get_errno(), "fallocate")
both = mmap.PROT_READ | mmap.PROT_WRITE
memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
control.send(json.dumps({
    "map writable": attempt(lambda: mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=both)),
    "reopen and map writable": attempt(lambda: mmap.mmap(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), size, prot=both)),
    "write": attempt(lambda: os.pwrite(fd, b"x", 0)),
    "shrink": attempt(lambda: os.ftruncate(fd, 4096)),
    "grow": attempt(lambda: os.ftruncate(fd, size * 2)),
    "punch a hole": attempt(punch),
    "bytes": memory[offset : offset + length].hex(),
}).encode())
control.recv(1)
control.send(memory[offset : offset + length].hex().encode())
"""


@asynccontextmanager
async def dram(limit, policy=None):
    async with Movers.open() as movers, DramTier.open("dram", limit, movers, policy=policy) as tier:
        yield tier


def fill(slot, n):
    slot.view[:] = value_of(n, slot.want.size)
    return slot.commit()


def test_an_arena_asks_for_large_pages():
    arena = Arena.create("asks-for-large-pages", 4 << 20)
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
    at = next(at for at, text in enumerate(mappings) if "memfd:asks-for-large-pages" in text)
    thp = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert ("hg" in mappings[at + 1].splitlines()[0].split()) is thp
    arena.close()


def test_another_process_reads_the_arena_and_can_do_nothing_else():
    arena = Arena.create("a", MIB)
    arena.view[8192:8200] = b"as it is"
    ours, theirs = socket.socketpair()
    with subprocess.Popen([sys.executable, "-c", READER, str(theirs.fileno())], pass_fds=[theirs.fileno()]) as reader:
        socket.send_fds(ours, [b"%d 8192 8" % arena.size], [arena.fd])
        outcome = json.loads(ours.recv(65536))
        assert bytes.fromhex(outcome.pop("bytes")) == b"as it is"
        assert set(outcome.values()) == {"EPERM"}, outcome
        arena.view[8192:8200] = b"as it is later"[6:]
        ours.send(b".")
        assert bytes.fromhex(ours.recv(65536).decode()) == b"is later"  # the owner still writes, and it is seen
        reader.wait(10)
    ours.close()
    theirs.close()
    arena.close()


def test_populating_leaves_bytes_alone_with_and_without_the_kernel_s_help(monkeypatch):
    for helps in (True, False):
        arena = Arena.create("a", 3 * MIB)
        arena.view[MIB : MIB + 4] = b"kept"
        if not helps:
            monkeypatch.setattr("tiering.arena._libc.madvise", lambda *_: ctypes.set_errno(errno.EINVAL) or -1)
        arena.populate(0, MIB)
        arena.populate(MIB, 64 * MIB)
        assert bytes(arena.view[MIB : MIB + 5]) == b"kept\0"
        arena.close()
        arena.close()


def test_populating_says_when_memory_is_refused(monkeypatch):
    arena = Arena.create("a", MIB)
    monkeypatch.setattr("tiering.arena._libc.madvise", lambda *_: ctypes.set_errno(errno.ENOMEM) or -1)
    with pytest.raises(OSError, match="memory"):
        arena.populate(0, MIB)
    arena.close()


async def test_a_slot_is_exactly_as_long_as_its_value_and_ready_for_o_direct():
    async with dram(MIB) as tier:
        fill(tier.reserve(want_of(0, 4097)), 0).release()
        slot = tier.reserve(want_of(1, 5000))
        assert (slot.view.nbytes, slot.padded.nbytes, slot.offset % 4096) == (5000, 8192, 0)
        assert np.frombuffer(slot.padded, np.uint8).ctypes.data % 4096 == 0
        slot.padded[:] = b"\xff" * 8192
        padded = slot.padded
        arena = memoryview(tier._arena.view)
        slot.view[:] = value_of(1, 5000)
        lease = slot.commit()
        assert bytes(arena[slot.offset + 5000 : slot.offset + 8192]) == bytes(3192)  # padding goes to disk: it is zeros
        with pytest.raises(ValueError, match="released"):
            padded[0] = 1  # the writer's views ended with the slot
        lease.release()
        with pytest.raises(ValueError, match="released"):
            bytes(lease.view)


async def test_a_slot_ends_once():
    async with dram(MIB) as tier:
        slot = tier.reserve(want_of(1, 10))
        assert tier.used == 10
        slot.abort()
        slot.abort()
        assert tier.used == 0
        with pytest.raises(ValueError, match="before"):
            slot.commit()
        slot = tier.reserve(want_of(1, 10))
        lease = fill(slot, 1)
        slot.abort()
        assert (tier.used, bytes(lease.view)) == (10, value_of(1, 10))
        lease.release()


async def test_the_first_of_two_writers_wins_and_the_other_s_room_comes_back():
    async with dram(MIB) as tier:
        first, second = tier.reserve(want_of(1, 5000)), tier.reserve(want_of(1, 5000))
        assert tier.used == 10_000
        with fill(first, 1) as lease, fill(second, 1) as other:
            assert (other.offset, tier.used, tier.leases) == (lease.offset, 5000, 2)
        assert tier.leases == 0
        assert await tier.evict(1) == 5000


async def test_another_size_under_a_key_replaces_and_the_old_reader_keeps_its_bytes():
    async with dram(100_000) as tier:
        old = fill(tier.reserve(want_of(1, 50_000)), 1)
        new = fill(tier.reserve(want_of(1, 20_000)), 1)
        assert tier.used == 70_000
        assert tier.lease_many([want_of(1, 50_000)]) == [Miss.ABSENT]
        assert tier.reserve(want_of(2, 40_000)) is Miss.FULL
        assert bytes(old.view) == value_of(1, 50_000)
        old.release()
        assert tier.used == 20_000
        new.release()


async def test_the_limit_is_exact_for_values_that_are_no_whole_pages():
    size = 30_001
    async with dram(50 * size) as tier:
        leases = [fill(tier.reserve(want_of(n, size)), n) for n in range(50)]
        assert tier.used == tier.limit
        assert tier.reserve(want_of(50, size)) is Miss.FULL
        assert all(bytes(lease.view) == value_of(n, size) for n, lease in enumerate(leases))
        for lease in leases:
            lease.release()


async def test_room_in_pieces_is_made_whole_by_evicting():
    async with dram(40 * MIB) as tier:
        for n in range(40):
            fill(tier.reserve(want_of(n, MIB)), n).release()
        await tier.evict(20 * MIB)
        kept = tier.lease_many([want_of(n, MIB) for n in range(20, 40, 2)])  # every second one of the rest is in use
        slot = tier.reserve(want_of(99, 12 * MIB))
        assert slot.view.nbytes == 12 * MIB
        assert tier.used <= tier.limit
        slot.abort()
        for n, lease in zip(range(20, 40, 2), kept, strict=True):
            assert bytes(lease.view[:64]) == value_of(n, 64)
            lease.release()


async def test_a_policy_may_refuse_a_value():
    class OnlySmall(Lru):
        def admit(self, key, size):
            return size <= 1000

    async with dram(MIB, policy=OnlySmall()) as tier:
        assert tier.reserve(want_of(1, 1001)) is Miss.FULL
        fill(tier.reserve(want_of(1, 1000)), 1).release()
        assert (tier.used, tier.stats.drops) == (1000, 1)


def test_lru_ignores_keys_it_does_not_rank():
    lru = Lru()
    for key in (b"a", b"b", b"c"):
        lru.add(key)
    lru.touch(b"a")
    lru.touch(b"x")
    lru.remove(b"b")
    lru.remove(b"x")
    assert [lru.victim() for _ in range(3)] == [b"c", b"a", None]


async def test_what_is_leased_outlives_the_tier():
    async with dram(MIB) as tier:
        lease = fill(tier.reserve(want_of(1, 1000)), 1)
        late = tier.reserve(want_of(2, 1000))
        late.view[:] = value_of(2, 1000)
    assert bytes(lease.view) == value_of(1, 1000)
    lease.release()
    with pytest.raises(TierClosed):
        late.commit()
    assert tier.lease_many([want_of(1, 1000)]) == [Miss.UNAVAILABLE]
    assert tier.reserve(want_of(3, 10)) is Miss.UNAVAILABLE
    assert (tier.used, tier.leases) == (1000, 0)


async def test_counters_say_what_happened():
    async with dram(10_000) as tier:
        fill(tier.reserve(want_of(1, 6000)), 1).release()
        fill(tier.reserve(want_of(2, 6000)), 2).release()
        for got in tier.lease_many([want_of(1, 6000), want_of(2, 6000)]):
            if isinstance(got, Lease):
                got.release()
        stats = tier.stats
        assert (stats.hits, stats.misses[Miss.ABSENT], stats.bytes_in, stats.bytes_out, stats.evictions) == (1, 1, 12_000, 6000, 1)
        assert tier.count == 1


def test_a_key_has_32_bytes():
    with pytest.raises(ValueError, match="31"):
        Want(b"x" * 31, 1)


async def test_b42_eight_threads_keep_the_accounting_exact():
    """Eight threads lease, write, evict and forget for a second; at the end every byte is accounted for."""
    async with dram(40 * 4000) as tier:
        problems, done = [], threading.Event()

        def work(seed):
            dice = random.Random(seed)
            try:
                while not done.is_set():
                    n = dice.randrange(60)
                    want = want_of(n, 3000 + n * 50)
                    match dice.randrange(5):
                        case 0:
                            slot = tier.reserve(want)
                            if not isinstance(slot, Miss):
                                if dice.random() < 0.2:
                                    slot.abort()
                                else:
                                    fill(slot, n).release()
                        case 1:
                            tier.discard_many([want.key])
                        case _:
                            for lease in tier.lease_many([want, want]):
                                if isinstance(lease, Lease):
                                    assert bytes(lease.view) == value_of(n, want.size)
                                    lease.release()
                    assert tier.used <= tier.limit
            except BaseException as error:
                problems.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        await asyncio.sleep(1.0)
        done.set()
        for thread in threads:
            thread.join()
        assert problems == []
        here = tier.contains_many([key_of(n) for n in range(60)])
        assert tier.leases == 0
        assert tier.used == sum(3000 + n * 50 for n in range(60) if here[n]) > 0
        assert await tier.evict(10**9) == sum(3000 + n * 50 for n in range(60) if here[n])
        assert (tier.used, tier._extents.free_bytes) == (0, tier.size)


async def test_512_leases_one_by_one(record_property):
    async with dram(8 * MIB) as tier:
        wants = [want_of(n, 4096) for n in range(512)]
        for n, want in enumerate(wants):
            fill(tier.reserve(want), n).release()
        best = 1.0
        for _ in range(5):
            started = time.perf_counter()
            leases = tier.lease_many(wants)
            best = min(best, time.perf_counter() - started)
            assert all(isinstance(lease, Lease) for lease in leases)
            for lease in leases:
                lease.release()
        record_property("512 leases, ms", best * 1e3)
        assert tier.leases == 0


async def test_i8_what_is_leased_is_no_victim_before_its_lease_is_accounted_for():
    async with dram(4 * MIB) as tier:
        for n in range(4):
            assert await tier.put_many([(want_of(n, MIB), memoryview(value_of(n, MIB)))]) == [True]
        pins = tier.pin_all([want_of(n, MIB).key for n in range(3)], [MIB] * 3)  # `pinned` comes when the reader has its answer
        assert await tier.evict(2 * MIB) == MIB  # the one that nobody reads
        assert tier.contains_many([want_of(n, MIB).key for n in range(4)]) == [True, True, True, False]
        tier.pinned(pins)
        tier.unpin_all(pins)
        assert await tier.evict(8 * MIB) == 3 * MIB
