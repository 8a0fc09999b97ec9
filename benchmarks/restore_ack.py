"""How soon a node acknowledges a restore, with many heads cached, while it collects and restores for others.

Three processes: the node (`kvtier serve`), the load (collections one after the other, and so many restores always under way, of
more bytes than the DRAM tier has), and this one, which asks. Baseline, in the same run: the call `health` by the same client.

    python benchmarks/restore_ack.py [--store memory|seaweed] [--heads 10000] [--restores 50] [--samples 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from _bench import SHARD, server

import kvstore
from kvstore import Client, api
from kvstore.errors import KVTierError
from kvstore.ids import Link, Namespace, chain

KVTIER = [sys.executable, "-c", "from kvstore.cli.main import main; main()"]
NS = Namespace(
    model="benchmark", revision="1", layers=2, kv_heads=2, head_dim=64, dtype="BF16", block_tokens=256
)  # 257 KiB a block
BLOCKS, DRAM = 24, "128MiB"  # of each big session; 50 of them have more than twice that
AT_ONCE = 32
PAUSE_S = 0.01  # so that what is asked adds little to the load
DICE = np.random.default_rng(1)


@contextmanager
def node(store: str, folder: Path) -> Iterator[dict[str, str]]:
    """A node in a process of its own; where it can be reached."""
    flags = {"store.url": store, "dram.size": DRAM, "node.listen": "127.0.0.1:0", "node.socket": f"{folder}/node.sock"}
    sets = [text for name, value in flags.items() for text in ("--set", f"{name}={value}")]
    command = [*KVTIER, "serve", "--format", "json", "--log-level", "warning", *sets]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield msgspec.json.decode(process.stdout.readline(), type=dict[str, Any])
        finally:
            process.terminate()


def big_chain(index: int) -> list[Link]:
    """The blocks of a session that shares none."""
    first = 1_000_000 + index * BLOCKS * NS.block_tokens
    return chain(NS, range(first, first + BLOCKS * NS.block_tokens))


def fill(_: int, room: memoryview) -> None:
    """Any bytes."""
    room[:] = DICE.bytes(len(room))


async def populate(kv: Client, heads: int, restores: int) -> None:
    """`heads` sessions of one block that they share, and `restores` big ones."""
    small = chain(NS, range(NS.block_tokens))
    await kv.put(NS, SHARD, small, fill)
    names = iter(range(heads))

    async def commit() -> None:
        for name in names:
            await kv.commit(f"small {name}", namespace=NS, base_version=0, blocks=small, durability="bucket")

    await asyncio.gather(*(commit() for _ in range(AT_ONCE)))
    for index in range(restores):
        blocks = big_chain(index)
        await kv.put(NS, SHARD, blocks, fill)
        await kv.commit(f"big {index}", namespace=NS, base_version=0, blocks=blocks, durability="bucket")


async def load(url: str, restores: int) -> None:
    """Collections, and `restores` restores under way, until it is killed."""
    async with kvstore.open(url) as kv:

        async def restore(index: int) -> None:
            for turn in itertools.count():
                await kv.wait(await kv.restore(f"big {(index + 7 * turn) % restores}", namespace=NS, hold_ms=turn % 2))

        async def collect() -> None:
            while True:
                await kv.collect()

        print("ready", flush=True)
        await asyncio.gather(collect(), *map(restore, range(restores)))


@contextmanager
def loading(url: str, restores: int) -> Iterator[None]:
    """The load, in a process of its own."""
    command = [sys.executable, __file__, "--load", url, "--restores", str(restores)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


Ask = Callable[[], Coroutine[Any, Any, object]]


async def sample(asks: Sequence[Ask], samples: int) -> list[list[float]]:
    """Milliseconds of each, in turns."""
    took: list[list[float]] = [[] for _ in asks]
    for _ in range(samples):
        for ask, times in zip(asks, took, strict=True):
            await asyncio.sleep(PAUSE_S)
            started = time.perf_counter()
            await ask()
            times.append((time.perf_counter() - started) * 1000)
    return took


async def measure(url: str, face: str, heads: int, restores: int, samples: int, facts: dict[str, object]) -> None:
    """Acknowledgements of an idle node, then of a busy one."""
    async with kvstore.open(url) as kv:

        async def restore() -> api.RestoreStatus:
            return await kv.restore(f"small {DICE.integers(heads)}", namespace=NS)

        report(face, "idle", await sample([restore, kv.health], samples // 4), facts)
        with loading(url, restores):
            await asyncio.sleep(2)
            before, took = await kv.stats(), await sample([restore, kv.health], samples)
            after = await kv.stats()
        done = sum(after.restored.values()) - sum(before.restored.values())
        runs = sum(after.collector.runs.values()) - sum(before.collector.runs.values())
        report(face, "busy", took, facts | {"restored": done, "collections": runs, "restores_running": after.restores})


def report(face: str, state: str, took: Sequence[list[float]], facts: dict[str, object]) -> None:
    """One line: p50 and p99 of the acknowledgement and of the baseline."""
    line: dict[str, object] = {"name": f"restore_ack_{face}_{state}", "unit": "ms", "samples": len(took[0])}
    for name, times in zip(("ack", "health"), map(sorted, took), strict=True):
        line |= {f"{name}_p50": round(times[len(times) // 2], 3), f"{name}_p99": round(times[len(times) * 99 // 100], 3)}
    print(msgspec.json.encode(line | facts | {"load_average": os.getloadavg()[0]}).decode(), flush=True)


async def run(kind: str, heads: int, restores: int, samples: int) -> None:
    """Everything."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name, server() if kind == "seaweed" else nullcontext() as started:
        store = f"s3://{started[0].bucket}/kv?endpoint={started[0].endpoint}" if started else "memory://bench"
        with node(store, Path(name)) as ready:
            async with kvstore.open(ready["url"]) as kv:
                await populate(kv, heads, restores)
            for face, url in (("http", ready["http"]), ("unix", ready["url"])):
                await measure(url, face, heads, restores, samples, {"store": kind, "heads": heads, "restores": restores})


async def keep_loading(url: str, restores: int) -> None:
    """The load, as long as the node answers."""
    try:
        await load(url, restores)
    except KVTierError as error:
        print(error, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["memory", "seaweed"], default="memory")
    parser.add_argument("--heads", type=int, default=10_000)
    parser.add_argument("--restores", type=int, default=50)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        asyncio.run(keep_loading(options.load, options.restores))
    else:
        asyncio.run(run(options.store, options.heads, options.restores, options.samples))
