"""The disk tier beside the bare medium: values read into the arena and verified, and values made durable.

Baselines, in the same run and file system: as many bytes by O_DIRECT from and to one file, four requests at a time, neither checked
nor synced. Rounds are shuffled; the first is not counted.

    python benchmarks/nvme.py [--rounds 5] [--sizes 2,8,32] [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tiering import DiskTier, DramSlot, DramTier, Lease, Movers, Stack, StackSettings, Want
from tiering.testing import key_of

MIB = 1 << 20
TOTAL = 512 * MIB  # on disk, of each size
CALL = 128 * MIB  # in one call
DEPTH = 4


class Case(NamedTuple):
    """One thing to measure: `run(i)` is called `calls` times, then `after`."""

    run: Callable[[int], None]
    bytes_per_call: int
    calls: int
    after: Callable[[], None]


@contextmanager
def cases(size: int, folder: Path) -> Iterator[dict[str, Case]]:
    """What can be measured with values of `size` bytes: `nvme_get`, `nvme_put`, and `nvme_get_raw`, `nvme_put_raw` beside them."""
    with ExitStack() as closing:
        loop = asyncio.new_event_loop()
        closing.callback(loop.close)
        rig = Rig(loop, size)
        loop.run_until_complete(rig.open(folder))
        closing.callback(lambda: loop.run_until_complete(rig.close()))
        bare = closing.enter_context(Bare.open(folder, size, rig.stack, rig.fresh))
        yield {
            "nvme_get": rig.case(rig.get, TOTAL),
            "nvme_put": rig.case(rig.put, CALL * 2, rig.forget),
            "nvme_get_raw": Case(bare.read, CALL, TOTAL // CALL, _nothing),
            "nvme_put_raw": Case(bare.write, CALL, 2, _nothing),
        }


class Rig:
    """A hierarchy of DRAM and disk, with values on the disk to read, and others in DRAM to write."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int) -> None:
        self._loop, self._size = loop, size
        self._parts = AsyncExitStack()
        self._stored = [Want(key_of(n), size) for n in range(TOTAL // size)]
        self._new = [Want(key_of(1 << 20 | n), size) for n in range(2 * CALL // size)]
        self.fresh: list[Lease] = []

    async def open(self, folder: Path) -> None:
        """Fill it."""
        movers = await self._parts.enter_async_context(Movers.open())
        dram = await self._parts.enter_async_context(DramTier.open("dram", 4 * CALL, movers))
        self.disk = await self._parts.enter_async_context(DiskTier.open(folder / f"tier{self._size}", TOTAL + 4 * CALL, movers))
        settings = StackSettings(behind_bytes=2 * CALL)
        self.stack = await self._parts.enter_async_context(Stack.open(dram, self.disk, [], settings))
        while self.disk._catalog._space._holes.free_bytes:  # noqa: SLF001, ASYNC110  a slab is new once; that is not measured
            await asyncio.sleep(0.01)
        noise = np.random.default_rng(self._size).bytes(self._size)
        self.fresh = [self._publish(want, noise) for want in self._new]
        for want in self._stored:
            with self._publish(want, noise):
                assert await self.stack.flush([want]) == [True]
            dram.discard_many([want.key])

    async def close(self) -> None:
        """Empty it."""
        for lease in self.fresh:
            lease.release()
        await self._parts.aclose()

    def case(self, run: Callable[[int, int], None], total: int, after: Callable[[], None] | None = None) -> Case:
        """Calls of `CALL` bytes each."""
        count = CALL // self._size
        return Case(lambda i: run(i * count, count), count * self._size, total // CALL, after or _nothing)

    def get(self, first: int, count: int) -> None:
        """Values that are on the disk only."""
        wants = self._stored[first : first + count]
        leases = self._loop.run_until_complete(self.stack.get_many(wants))
        for lease in leases:
            assert isinstance(lease, Lease)
            lease.release()
        assert self.stack.dram.discard_many([want.key for want in wants]) == count == len(leases)

    def put(self, first: int, count: int) -> None:
        """Values that are in DRAM, as a writer leaves them there; durable when it returns."""
        wants = self._new[first : first + count]

        async def store() -> list[bool]:
            for want in wants:
                self.stack.offer(want)
            return await self.stack.flush(wants)

        assert self._loop.run_until_complete(store()) == [True] * count

    def forget(self) -> None:
        """What `put` wrote."""
        assert self.disk.discard_many([want.key for want in self._new]) == len(self._new)
        self._loop.run_until_complete(self.disk._index.commit([]))  # noqa: SLF001  the room is free again

    def _publish(self, want: Want, value: bytes) -> Lease:
        slot = self.stack.dram.reserve(want)
        assert isinstance(slot, DramSlot)
        slot.view[:] = value
        return slot.commit()


class Bare:
    """One file, and four threads that each wait for their part of it; from and to the memory that the tiers use."""

    def __init__(self, descriptor: int, size: int, pool: ThreadPoolExecutor, stack: Stack, fresh: Sequence[Lease]) -> None:
        self._file, self._size, self._pool, self._stack = descriptor, size, pool, stack
        self._fresh = [lease.view for lease in fresh]

    @classmethod
    @contextmanager
    def open(cls, folder: Path, size: int, stack: Stack, fresh: Sequence[Lease]) -> Iterator[Bare]:
        """Written once, as the tier's slab is."""
        descriptor = os.open(folder / "bare", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            with ThreadPoolExecutor(DEPTH) as pool:
                bare = cls(descriptor, size, pool, stack, fresh)
                for call in range(TOTAL // CALL):
                    bare.write(call)
                os.fsync(descriptor)
                yield bare
        finally:
            os.close(descriptor)

    def read(self, call: int) -> None:
        """Straight into the arena."""
        count = CALL // self._size
        slots = [self._stack.dram.reserve(Want(key_of(1 << 21 | n), self._size)) for n in range(count)]
        self._all(os.preadv, call, [slot.view for slot in slots if isinstance(slot, DramSlot)])
        for slot in slots:
            assert isinstance(slot, DramSlot)
            slot.abort()

    def write(self, call: int) -> None:
        """Straight from the arena."""
        count = CALL // self._size
        self._all(os.pwritev, call, self._fresh[call % 2 * count : (call % 2 + 1) * count])

    def _all(self, move: Callable[[int, list[memoryview], int], int], call: int, views: Sequence[memoryview]) -> None:
        def one(at: int) -> int:
            return move(self._file, [views[at]], call * CALL + at * self._size)

        assert set(self._pool.map(one, range(CALL // self._size))) == {self._size}


def _nothing() -> None:
    pass


def measure(case: Case) -> tuple[float, float]:
    """GB/s, and CPU-seconds per GB of this process."""
    cpu, began = _cpu(), time.perf_counter()
    for i in range(case.calls):
        case.run(i)
    took, cpu = time.perf_counter() - began, _cpu() - cpu
    case.after()
    moved = case.bytes_per_call * case.calls / 1e9
    return moved / took, cpu / moved


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Every size, in shuffled rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="2,8,32", help="MiB")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    asked = parser.parse_args()
    order = np.random.default_rng()
    for size in [int(float(text) * MIB) for text in asked.sizes.split(",")]:
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=asked.folder) as name, cases(size, Path(name)) as found:
            seen: dict[str, list[tuple[float, float]]] = {case: [] for case in found}
            for turn in range(asked.rounds + 1):
                for case in order.permutation(list(found)):
                    result = measure(found[case])
                    if turn:
                        seen[case].append(result)
        for case in ("nvme_get", "nvme_put"):
            _report(case, size, seen[case], seen[f"{case}_raw"])


def _report(case: str, size: int, ours: list[tuple[float, float]], bare: list[tuple[float, float]]) -> None:
    ratio = statistics.median(one[0] / other[0] for one, other in zip(ours, bare, strict=True))
    line = {
        "name": case,
        "mib": size / MIB,
        "value": round(statistics.median(one[0] for one in ours), 3),
        "unit": "GB/s",
        "baseline": round(statistics.median(one[0] for one in bare), 3),
        "ratio": round(ratio, 3),
        "cpu_s_per_gb": round(statistics.median(one[1] for one in ours), 3),
        "baseline_cpu_s_per_gb": round(statistics.median(one[1] for one in bare), 3),
        "samples": len(ours),
    }
    print(msgspec.json.encode(line).decode(), flush=True)


if __name__ == "__main__":
    main()
