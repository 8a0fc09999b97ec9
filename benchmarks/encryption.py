"""What encryption costs: the same node's ways to bucket and disk, with it and without, in shuffled rounds of one run.

Baseline is encryption off. `restore` is a whole session into an empty DRAM tier, by a node that has just started.

    python benchmarks/encryption.py [--rounds 5] [--sizes 2 32] [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import bucket
import msgspec
import nvme
import uvloop
from _bench import BLOCK_BYTES, NAMESPACE, SHARD, fill, links, server, url
from _cases import MIB, Case, timed

import kvstore
from kvstore.clock import Clock, Ids
from kvstore.keys import Keys
from kvstore.objects import ObjectStore
from kvstore.objects.seaweed import SeaweedFS
from kvstore.repo.root import Root
from kvstore.sealing import DiskSeals, MasterKey, MasterKeys, Sealing, spelled
from tiering import Movers

OFF, ON = "off", "on"
MASTER = MasterKey("bench", bytes(range(32)))
SESSION = 48  # blocks of 2 MiB


class Sealed(bucket.Rig):
    """A way to a bucket, with encryption."""

    async def root(self, store: ObjectStore, clock: Clock, ids: Ids, movers: Movers) -> Root:
        """A root of its own in the same bucket."""
        root = await Root.open(store, Keys("sealed"), clock, ids, sealing=Sealing(MasterKeys([MASTER]), movers.run))
        await root.put_namespace(self.namespace)
        return root


@contextmanager
def cases(size: int, folder: Path, seaweed: SeaweedFS) -> Iterator[dict[str, dict[str, Case]]]:
    """By row, then by whether it is sealed."""
    with ExitStack() as closing:
        sys.setswitchinterval(0.0005)  # this and the loop as in a node's process
        loop = uvloop.new_event_loop()
        closing.callback(loop.close)
        rows: defaultdict[str, dict[str, Case]] = defaultdict(dict)
        for how in (OFF, ON):
            way = (Sealed if how == ON else bucket.Rig)(loop, size)
            closing.callback(_close, loop, way)
            loop.run_until_complete(way.open(seaweed.settings(), seaweed.credentials))
            disk = nvme.Rig(loop, size, DiskSeals(MasterKeys([MASTER])) if how == ON else None)
            closing.callback(_close, loop, disk)
            loop.run_until_complete(disk.open(folder / how))
            rows["bucket_get"][how] = Case(way.get, way.call_bytes, way.calls)
            rows["bucket_put"][how] = Case(way.put, way.call_bytes, 1, way.forget)
            rows["nvme_get"][how] = Case(disk.get, nvme.CALL, nvme.TOTAL // nvme.CALL)
            rows["nvme_put"][how] = Case(disk.put, nvme.PUT, 1, disk.forget)
        yield dict(rows)


def _close(loop: asyncio.AbstractEventLoop, rig: bucket.Rig | nvme.Rig) -> None:
    loop.run_until_complete(rig.close())


def compare(row: str, run: Callable[[str], tuple[float, float]], rounds: int, **facts: object) -> None:
    """Shuffled rounds; medians, and the median of each round's ratio. `run` gives GB/s and CPU-seconds per GB."""
    found: dict[str, list[tuple[float, float]]] = {OFF: [], ON: []}
    for at in range(-1, rounds):
        for how in random.sample((OFF, ON), 2):
            result = run(how)
            if at >= 0:  # the first warms up
                found[how].append(result)
    (off, off_cpu), (on, on_cpu) = ([statistics.median(each) for each in zip(*found[how], strict=True)] for how in (OFF, ON))
    ratio = statistics.median(sealed[0] / plain[0] for sealed, plain in zip(found[ON], found[OFF], strict=True))
    line = {"name": f"encryption_{row}", "unit": "GB/s", "value": round(on, 3), "baseline": round(off, 3), "ratio": round(ratio, 3)}
    cpu = {"cpu_s_per_gb": round(on_cpu, 3), "baseline_cpu_s_per_gb": round(off_cpu, 3)}
    print(msgspec.json.encode({**line, **cpu, "rounds": rounds, **facts}).decode(), flush=True)


def of_cases(both: dict[str, Case]) -> Callable[[str], tuple[float, float]]:
    """Runs one of the two."""

    def run(how: str) -> tuple[float, float]:
        result = timed(both[how])
        return float(result["gbps"]), float(result["cpu_s_per_gb"])

    return run


def of_restores(seaweed: SeaweedFS, folder: Path) -> Callable[[str], tuple[float, float]]:
    """Runs a restore of a session that was written before."""
    key_file = folder / "keys"
    key_file.touch(mode=0o600)
    key_file.write_text(spelled(MASTER))
    where = {OFF: url(seaweed, "plain", dram="512MiB"), ON: url(seaweed, "secret", dram="512MiB", key_file=str(key_file))}

    async def write(to: str) -> None:
        async with kvstore.open(to) as kv:
            await kv.put(NAMESPACE, SHARD, links(SESSION), fill(0))
            await kv.commit("bench", namespace=NAMESPACE, base_version=0, blocks=links(SESSION), durability="bucket")

    async def restored(from_: str) -> tuple[float, float]:
        async with kvstore.open(from_) as kv:
            started, cpu = time.perf_counter(), time.process_time()
            done = await kv.wait(await kv.restore("bench"))
            took, cpu = time.perf_counter() - started, time.process_time() - cpu
        assert (done.state, done.staged_tokens) == ("ready", SESSION * NAMESPACE.block_tokens), done
        return SESSION * BLOCK_BYTES / 1e9 / took, cpu / (SESSION * BLOCK_BYTES / 1e9)

    for to in where.values():
        asyncio.run(write(to))
    return lambda how: asyncio.run(restored(where[how]))


def main() -> None:
    """Print a JSON line for each row and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", default=[2, 32], help="MiB a block")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    said = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=said.folder) as name, server() as (seaweed, folder):
        for size in said.sizes:
            here = Path(name) / str(size)
            with cases(size * MIB, here, seaweed) as rows:
                for row, both in rows.items():
                    compare(row, of_cases(both), said.rounds, block_mib=size)
            shutil.rmtree(here)
        compare("restore", of_restores(seaweed, folder), said.rounds, block_mib=2)


if __name__ == "__main__":
    main()
