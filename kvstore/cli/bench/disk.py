"""The disk: bare reads and writes past the page cache, and the disk tier's."""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from shutil import disk_usage
from typing import Final

import numpy as np
from blake3 import blake3

from kvstore.cli.bench.results import MIB, Ask, Line, Timing, timed
from kvstore.cli.bench.stopping import Stopping
from kvstore.cli.output import size
from kvstore.errors import Invalid, Unavailable
from tiering import DiskTier, DramSlot, DramTier, Lease, Movers, Stack, StackSettings, Want

DEPTH: Final = 4
_BATCH: Final = 64 * MIB  # moved in one call
_CALLS: Final = 64
_PAGE: Final = 4096


def room_needed(ask: Ask) -> int:
    """Bytes on the disk: the file of the bare measure, or the tier with its index, one after the other."""
    return ask.size + ask.size // 4 + 128 * MIB


def refuse_more_than_there_is(folder: Path, ask: Ask) -> None:
    """Raises `Invalid` where it would not fit, or the folder cannot be used."""
    try:
        free = disk_usage(folder).free
        with tempfile.TemporaryDirectory(prefix=".kvtier-bench-", dir=folder):
            pass
    except OSError as error:
        raise Invalid(
            f"--path {folder}: {error.strerror}", remedy="a folder on the disk to be measured, that you may write to"
        ) from None
    if room_needed(ask) > free:
        raise Invalid(
            f"measuring with {size(ask.size)} takes {size(room_needed(ask))} on the disk of {folder}, which has {size(free)} free",
            remedy="a smaller --size, or another --path",
        )


def measure(folder: Path, ask: Ask, seconds: float, stopping: Stopping) -> Iterator[Line]:
    """Both, in a folder of their own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=".kvtier-bench-", dir=folder) as name:
        wrote, read, direct = _bare(Path(name) / "bare", ask, seconds / 2)
        note = f"{DEPTH} at once, {'O_DIRECT' if direct else 'through the page cache: this file system refuses O_DIRECT'}"
        yield wrote.line("disk_write_raw", note)
        yield read.line("disk_read_raw", note)
        (Path(name) / "bare").unlink()
        put, got = stopping.run(_tier(Path(name) / "tier", ask, seconds / 2))
        yield put.line("nvme_put", "the disk tier, durable", wrote)
        yield got.line("nvme_get", "the disk tier, verified", read)


def _bare(path: Path, ask: Ask, seconds: float) -> tuple[Timing, Timing, bool]:
    """(writing, reading, whether past the page cache)."""
    with ExitStack() as closing:
        flags, direct = os.O_RDWR | os.O_CREAT, True
        try:
            file = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            file, direct = os.open(path, flags, 0o600), False
        closing.callback(os.close, file)
        pool = closing.enter_context(ThreadPoolExecutor(DEPTH))
        step = ask.block // _PAGE * _PAGE
        buffers = [_aligned(step) for _ in range(_at_once(ask))]
        rounds = max(1, ask.blocks // len(buffers))

        def move(how: Callable[[int, list[memoryview], int], int], call: int) -> int:
            start = call % rounds * len(buffers)
            return sum(pool.map(lambda at: how(file, [buffers[at]], (start + at) * step), range(len(buffers))))

        def write(call: int) -> int:
            moved = move(os.pwritev, call)
            os.fdatasync(file)  # durable, as the tier's
            return moved

        timed(write, rounds, seconds / 2, warm=False)  # the file is new once; the tier writes its slab when it makes it
        os.fsync(file)
        rounds = max(1, min(rounds, os.fstat(file).st_size // (step * len(buffers))))  # as far as there was time
        wrote = timed(write, _CALLS, seconds / 4)
        os.fsync(file)
        read = timed(lambda call: move(os.preadv, call), _CALLS, seconds / 4)
        return wrote, read, direct


async def _tier(path: Path, ask: Ask, seconds: float) -> tuple[Timing, Timing]:
    """(putting, getting) by the way a node takes, through memory."""
    step, batch = ask.block, _at_once(ask)
    rounds = max(1, ask.blocks // batch)
    noise = np.random.default_rng(1).bytes(step)
    took, stored = list[float](), deque[Sequence[Want]](maxlen=rounds)
    names = count()
    async with (
        Movers.open() as movers,
        DramTier.open("dram", 2 * batch * step + 64 * MIB, movers) as dram,
        DiskTier.open(path, ask.size + 64 * MIB, movers) as disk,
        Stack.open(dram, disk, [], StackSettings(behind_bytes=batch * step)) as stack,
    ):

        async def put(_: int) -> int:
            wants = [Want(blake3(next(names).to_bytes(8, "little")).digest(), step) for _ in range(batch)]
            leases = [_publish(dram, want, noise) for want in wants]
            began = time.perf_counter()
            try:
                for want in wants:
                    stack.offer(want)
                kept = await stack.flush(wants)
            finally:
                for lease in leases:
                    lease.release()
            took.append(time.perf_counter() - began)
            dram.discard_many([want.key for want in wants])
            if not all(kept):
                raise Unavailable("the disk tier did not take every block", remedy="see that the disk has room and no errors")
            stored.append(wants)
            return batch * step

        async def get(index: int) -> int:
            wants = stored[-1 - index % len(stored)]  # the newest, which have not made way yet
            began = time.perf_counter()
            leases = [one for one in await stack.get_many(wants) if isinstance(one, Lease)]
            took.append(time.perf_counter() - began)
            for lease in leases:
                lease.release()
            dram.discard_many([want.key for want in wants])
            return len(leases) * step

        await _until(put, rounds, seconds / 2, took)  # every page of the slab is new once
        putting = await _until(put, _CALLS, seconds / 4, took)
        return putting, await _until(get, _CALLS, seconds / 4, took)


async def _until(run: Callable[[int], Awaitable[int]], calls: int, seconds: float, took: list[float]) -> Timing:
    """As :func:`kvstore.cli.bench.results.timed`; `run` itself notes how long its part took."""
    ends, moved = time.monotonic() + seconds, 0
    took.clear()
    for index in range(calls):
        moved += await run(index)
        if time.monotonic() >= ends:
            break
    return Timing(moved / sum(took), list(took))


def _publish(dram: DramTier, want: Want, value: bytes) -> Lease:
    slot = dram.reserve(want)
    if not isinstance(slot, DramSlot):
        raise Unavailable("there was no room in memory", remedy="a smaller --size")
    slot.view[:] = value
    return slot.commit()


def _at_once(ask: Ask) -> int:
    return max(1, min(ask.blocks, _BATCH // ask.block))


def _aligned(nbytes: int) -> memoryview:
    """Page-aligned, incompressible: some disks compress."""
    whole = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes + _PAGE), np.uint8).copy()
    start = -whole.ctypes.data % _PAGE
    return whole[start : start + nbytes].data
