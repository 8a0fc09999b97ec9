"""How soon a node acknowledges a restore, with many heads cached, while it collects and restores for others.

Three processes: the node (`kvtier serve`), the load (collections without a pause, and so many restores always under way, of more
bytes than the DRAM tier has), and this one, which asks. Baselines, in turns with it: the call `health` by the same client, and
`echo`, a byte to a plain process and back, which is what the machine itself makes anybody wait.

With a store that would be on other machines, `--store-nice 19` is a stand-in for those: the server has only the processor time that
nobody else wants. Without it, the store has the priority that `kvtier up` gives it.

    python benchmarks/restore_ack.py [--store memory|seaweed] [--store-nice 19] [--heads 10000] [--restores 50] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
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
PAUSE_S = 0.005  # so that what is asked adds little to the load
LOOK_EVERY = 50  # samples, at which the node is asked what is under way
WARM_UP_S = 3.0
SPARE = 8  # restores of the load beyond those that are promised: one that ended takes a moment to be followed by the next
DICE = np.random.default_rng(1)


@contextmanager
def node(store: str, folder: Path) -> Iterator[dict[str, str]]:
    """A node in a process of its own; where it can be reached. It keeps its collector, which remembers idle heads."""
    flags = {
        "store.url": store,
        "dram.size": DRAM,
        "node.listen": "127.0.0.1:0",
        "node.socket": f"{folder}/node.sock",
        "lifecycle.collect_interval": "1h",
    }
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
    """Collections, the next one waiting when one ends, and `restores` restores under way, until it is killed."""
    async with kvstore.open(url) as kv:

        async def restore(index: int) -> None:
            for turn in itertools.count():
                await kv.wait(await kv.restore(f"big {(index + 7 * turn) % restores}", namespace=NS, hold_ms=index))

        async def collect() -> None:
            while True:
                await kv.collect()

        print("ready", flush=True)
        await asyncio.gather(collect(), collect(), *map(restore, range(restores + SPARE)))


async def echo(path: str) -> None:
    """A plain server that says what it was told."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()

    async with await asyncio.start_unix_server(serve, path) as serving:
        print("ready", flush=True)
        await serving.serve_forever()


@contextmanager
def beside(*what: str) -> Iterator[None]:
    """This file in a process of its own, doing something else."""
    with subprocess.Popen([sys.executable, __file__, *what], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


@asynccontextmanager
async def echoing(folder: Path) -> AsyncIterator[Ask]:
    """A question to a plain process."""
    path = f"{folder}/echo.sock"
    with beside("--echo", path):
        reader, writer = await asyncio.open_unix_connection(path)

        async def ask() -> bytes:
            writer.write(b"\n")
            return await reader.readline()

        try:
            yield ask
        finally:
            writer.close()


Ask = Callable[[], Coroutine[Any, Any, object]]
Times = dict[str, list[list[float]]]  # by question: of each round, the milliseconds


class Looks:
    """What was under way, whenever somebody looked."""

    def __init__(self) -> None:
        self.restores: list[int] = []
        self.collecting: list[bool] = []
        self.collections = self.restored = 0
        self.collected = self._last = 0

    def start(self, stats: api.Stats) -> None:
        """A round begins."""
        self._last = _seen(stats)

    def look(self, stats: api.Stats) -> None:
        """Once more."""
        self.restores.append(stats.restores)
        self.collecting.append(stats.collector.running)
        seen = _seen(stats)
        self.collected += max(0, seen - self._last)
        self._last = seen

    def between(self, before: api.Stats, after: api.Stats) -> None:
        """What came to an end in a round."""
        self.collections += sum(after.collector.runs.values()) - sum(before.collector.runs.values())
        self.restored += sum(after.restored.values()) - sum(before.restored.values())

    def facts(self) -> dict[str, object]:
        """For the report."""
        return {
            "restores_least": min(self.restores),
            "looks": len(self.restores),
            "looks_while_collecting": sum(self.collecting),
            "heads_and_objects_collected": self.collected,
            "collections_ended": self.collections,
            "restores_ended": self.restored,
        }


def _seen(stats: api.Stats) -> int:
    """By this collection: fewer than before where it is another one."""
    return stats.collector.heads + stats.collector.listed


async def sample(kv: Client, asks: Mapping[str, Ask], samples: int, looks: Looks | None) -> dict[str, list[float]]:
    """Milliseconds of each, in turns."""
    took: dict[str, list[float]] = {name: [] for name in asks}
    for index in range(samples):
        for name, ask in asks.items():
            await asyncio.sleep(PAUSE_S)
            started = time.perf_counter()
            await ask()
            took[name].append((time.perf_counter() - started) * 1000)
        if looks is not None and index % LOOK_EVERY == 0:
            looks.look(await kv.stats())
    return took


async def idle(url: str, ping: Ask, options: argparse.Namespace, times: Times) -> None:
    """A round on a node that does nothing else."""
    async with kvstore.open(url) as kv:
        add(times, await sample(kv, questions(kv, ping, options.heads), options.samples // 2, None))


async def busy(url: str, loaded: str, ping: Ask, options: argparse.Namespace, times: Times, looks: Looks) -> None:
    """A round on one that has its load, by its socket. The collection goes on when the load is killed, into the next round."""
    async with kvstore.open(url) as kv:
        await quiet(kv)
        with beside("--load", loaded, "--restores", str(options.restores)):
            await asyncio.sleep(WARM_UP_S)
            before = await kv.stats()
            looks.start(before)
            add(times, await sample(kv, questions(kv, ping, options.heads), options.samples, looks))
            looks.between(before, await kv.stats())


def questions(kv: Client, ping: Ask, heads: int) -> dict[str, Ask]:
    """What is asked in turns."""

    async def restore() -> api.RestoreStatus:
        return await kv.restore(f"small {DICE.integers(heads)}", namespace=NS)

    return {"ack": restore, "health": kv.health, "echo": ping}


async def quiet(kv: Client) -> None:
    """Wait for what a load had asked for that was killed."""
    while (await kv.stats()).restores:  # noqa: ASYNC110  the node is another process
        await asyncio.sleep(0.1)


def add(times: Times, took: Mapping[str, list[float]]) -> None:
    """One more round."""
    for name, found in took.items():
        times[name].append(found)


def report(face: str, state: str, times: Times, facts: Mapping[str, object]) -> None:
    """One line: medians over the rounds of p50 and p99, and the longest of all."""
    line: dict[str, object] = {"name": f"restore_ack_{face}_{state}", "unit": "ms"}
    for name, rounds in times.items():
        ranked = [sorted(found) for found in rounds]
        for part in (50, 99):
            line[f"{name}_p{part}"] = round(statistics.median(found[len(found) * part // 100] for found in ranked), 2)
        line[f"{name}_max"] = round(max(found[-1] for found in ranked), 2)
    line |= {"rounds": len(times["ack"]), "samples": sum(map(len, times["ack"]))}
    print(msgspec.json.encode({**line, **facts}).decode(), flush=True)


def give_way(process: int, nice: int) -> None:
    """Of a server that leads a session: where the kernel groups by session, the group has a priority besides its processes'."""
    os.setpriority(os.PRIO_PGRP, process, nice)
    group = Path(f"/proc/{process}/autogroup")
    if group.exists():
        group.write_text(str(nice))


async def run(options: argparse.Namespace) -> None:
    """Everything."""
    seaweed = options.store == "seaweed"
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name, server() if seaweed else nullcontext() as started:
        store = f"s3://{started[0].bucket}/kv?endpoint={started[0].endpoint}" if started else "memory://bench"
        with node(store, Path(name)) as ready:
            async with kvstore.open(ready["url"]) as kv, echoing(Path(name)) as ping:
                await populate(kv, options.heads, options.restores)
                await kv.collect()  # seals every head once, so that later ones come to an end while somebody looks
                if started and options.store_nice is not None:
                    give_way(started[0].pid, options.store_nice)
                facts = {key: getattr(options, key) for key in ("store", "store_nice", "heads", "restores")}
                facts |= {"cores": len(os.sched_getaffinity(0))}
                faces = {"http": ready["http"], "unix": ready["url"]}
                for face, url in faces.items():
                    times: Times = defaultdict(list)
                    for _ in range(options.rounds):
                        await idle(url, ping, options, times)
                    report(face, "idle", times, facts)
                for face, url in faces.items():
                    times, looks = defaultdict(list), Looks()
                    for _ in range(options.rounds):
                        await busy(url, ready["url"], ping, options, times, looks)
                    report(face, "busy", times, facts | looks.facts())


async def keep_loading(url: str, restores: int) -> None:
    """The load, as long as the node answers."""
    try:
        await load(url, restores)
    except KVTierError as error:
        print(error, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["memory", "seaweed"], default="seaweed")
    parser.add_argument("--store-nice", type=int, help="Of the SeaweedFS; by default what `kvtier up` gives it.")
    parser.add_argument("--heads", type=int, default=10_000)
    parser.add_argument("--restores", type=int, default=50)
    parser.add_argument("--samples", type=int, default=300, help="Of each round.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        asyncio.run(keep_loading(options.load, options.restores))
    elif options.echo:
        asyncio.run(echo(options.echo))
    else:
        asyncio.run(run(options))
