"""The disk: bare reads and writes past the page cache, and the disk tier's."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from shutil import disk_usage
from typing import Final, Self

import numpy as np
from blake3 import blake3

from kvstore.cli.bench.results import MIB, Ask, Line, Timing
from kvstore.cli.bench.stopping import Stopping
from kvstore.cli.output import size
from kvstore.errors import Invalid, Unavailable
from tiering import DiskTier, DramSlot, DramTier, Lease, Movers, Stack, StackSettings, Want

DEPTH: Final = 4
_BATCH: Final = 128 * MIB  # moved in one call
_TURNS: Final = 3


def room_needed(ask: Ask) -> int:
    """Bytes on the disk: the file of the bare measure, and the tier with its index."""
    return 4 * _at_once(ask) * ask.block + 256 * MIB


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
    """Both, in turns, in a folder of their own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=".kvtier-bench-", dir=folder) as name:
        took, direct = stopping.run(_in_turns(Path(name), ask, seconds))
    wrote, read, put, got = took
    note = f"{DEPTH} at once, {'O_DIRECT' if direct else 'through the page cache: this file system refuses O_DIRECT'}, durable"
    yield wrote.line("disk_write_raw", note)
    yield read.line("disk_read_raw", note.removesuffix(", durable"))
    yield put.line("nvme_put", "the disk tier, durable", wrote)
    yield got.line("nvme_get", "the disk tier, verified", read)


async def _in_turns(folder: Path, ask: Ask, seconds: float) -> tuple[list[Timing], bool]:
    """([writing, reading, putting, getting], whether past the page cache).

    All from and to the same memory, that of a node's arena: what a disk gives depends on how large the pages are, by a factor of up
    to two. In turns, for it also depends on the minute.
    """
    step, batch, ends = ask.block, _at_once(ask), time.monotonic() + seconds
    async with (
        Movers.open() as movers,
        DramTier.open("dram", 2 * batch * step + 64 * MIB, movers) as dram,
        _Bare.open(folder / "bare", ask, dram, movers) as bare,
        DiskTier.open(folder / "tier", 2 * batch * step + 64 * MIB, movers) as disk,
        Stack.open(dram, disk, [], StackSettings(behind_bytes=batch * step)) as stack,
    ):
        tier = _Tier(stack, disk, ask)
        runs = (bare.write, bare.read, tier.put, tier.get)
        for run in (bare.write, tier.put):  # a file is new once
            await run()
        while not disk.prewritten:  # noqa: ASYNC110  nothing in the product waits for it
            await asyncio.sleep(0.01)
        took: list[list[float]] = [[] for _ in runs]
        share = 0.75 * seconds / len(runs) / _TURNS
        for turn in range(_TURNS):
            if turn and time.monotonic() > ends:
                break
            for run, seen in zip(runs, took, strict=True):
                seen.extend(await _turn(run, share))
        return [Timing(batch * step / statistics.median(seen), seen) for seen in took], bare.direct


async def _turn(run: Callable[[], Awaitable[float]], seconds: float) -> list[float]:
    """Seconds of each call, as `run` has it, for so long; the first does not count if there is time for another."""
    ends, took = time.monotonic() + seconds, list[float]()
    while not took or time.monotonic() < ends:
        took.append(await run())
    return took[1:] or took


class _Bare:
    """One file, and threads that each wait for their part of it."""

    def __init__(self, file: int, pool: ThreadPoolExecutor, ask: Ask, dram: DramTier, movers: Movers, *, direct: bool) -> None:
        self._file, self._pool, self._movers = file, pool, movers
        self._dram, self._wants = dram, _wants(ask)
        self.direct = direct

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path, ask: Ask, dram: DramTier, movers: Movers) -> AsyncIterator[Self]:
        """Past the page cache, if the file system lets us."""
        with ExitStack() as closing:
            flags, direct = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, True
            try:
                file = os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError:
                file, direct = os.open(path, flags, 0o600), False
            closing.callback(os.close, file)
            yield cls(file, closing.enter_context(ThreadPoolExecutor(DEPTH)), ask, dram, movers, direct=direct)

    async def write(self) -> float:
        """Seconds until a batch is durable, as the tier's is."""
        leases = [_publish(self._dram, want) for want in self._wants]
        try:
            return await self._movers.run(self._all, os.pwritev, [lease.view for lease in leases])
        finally:
            for lease in leases:
                lease.release()
            self._dram.discard_many([want.key for want in self._wants])

    async def read(self) -> float:
        """Seconds of a batch, unverified."""
        slots = [_slot(self._dram, want) for want in self._wants]
        try:
            return await self._movers.run(self._all, os.preadv, [slot.view for slot in slots])
        finally:
            for slot in slots:
                slot.abort()

    def _all(self, move: Callable[[int, list[memoryview], int], int], views: Sequence[memoryview]) -> float:
        began = time.perf_counter()
        done = self._pool.map(lambda at: move(self._file, [views[at]], at * views[at].nbytes), range(len(views)))
        short = sum(done) != sum(view.nbytes for view in views)
        if move is os.pwritev:
            os.fdatasync(self._file)
        if short:
            raise Unavailable("the disk did not take or give every byte", remedy="see that it has room and no errors")
        return time.perf_counter() - began


class _Tier:
    """The way a node takes, through memory. Blocks that are put find the disk full of others, which make way."""

    def __init__(self, stack: Stack, disk: DiskTier, ask: Ask) -> None:
        self._stack, self._disk, self._ask = stack, disk, ask
        self._first = 0
        self._stored: Sequence[Want] = []

    async def put(self) -> float:
        """Seconds until a batch is durable."""
        self._first += _at_once(self._ask)
        wants = _wants(self._ask, self._first)
        leases = [_publish(self._stack.dram, want) for want in wants]
        try:
            began = time.perf_counter()
            for want in wants:
                self._stack.offer(want)
            kept = await self._stack.flush(wants)
            took = time.perf_counter() - began
        finally:
            for lease in leases:
                lease.release()
            self._stack.dram.discard_many([want.key for want in wants])
        if not all(kept):
            raise Unavailable("the disk tier did not take every block", remedy="see that the disk has room and no errors")
        self._stored = wants
        return took

    async def get(self) -> float:
        """Seconds until the newest batch is in memory again, verified."""
        began = time.perf_counter()
        leases = [one for one in await self._stack.get_many(self._stored) if isinstance(one, Lease)]
        took = time.perf_counter() - began
        for lease in leases:
            lease.release()
        self._stack.dram.discard_many([want.key for want in self._stored])
        if len(leases) != len(self._stored):
            raise Unavailable("the disk tier lost blocks that it took", remedy="see that the disk has no errors")
        return took


def _wants(ask: Ask, first: int = 0) -> list[Want]:
    return [Want(blake3((first + at).to_bytes(8, "little")).digest(), ask.block) for at in range(_at_once(ask))]


def _slot(dram: DramTier, want: Want) -> DramSlot:
    slot = dram.reserve(want)
    if not isinstance(slot, DramSlot):
        raise Unavailable("there was no room in memory", remedy="a smaller --size")
    return slot


def _publish(dram: DramTier, want: Want) -> Lease:
    slot = _slot(dram, want)
    slot.view[:] = _noise(want.size)
    return slot.commit()


@cache
def _noise(nbytes: int) -> bytes:
    """Incompressible: some disks compress."""
    return np.random.default_rng(1).bytes(nbytes)


def _at_once(ask: Ask) -> int:
    return max(1, min(ask.blocks // 2, _BATCH // ask.block))
