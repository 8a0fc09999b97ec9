"""A thousand clients at a time on one node, for minutes: errors, refusals, how long calls take, and whether the node grows.

The node is `kvtier serve` in a process of its own, its bucket a SeaweedFS in another. Each client has connections and a session
of its own, asks, waits for the answer, and thinks before it asks again; so many more are on the Unix socket, as engines are.
Over HTTP a prompt is one block, for the client takes a connection for each block that it reads or writes at a time. An error is
any answer but the call's own; a refusal (429 or 503, by a limit that has a name) is counted apart, and so is a block that is
not there, or was not taken: those are answers. Without an error the exit status is 0.

    python benchmarks/load.py [--clients 1000] [--engines 60] [--seconds 300] [--think 2] [--store memory] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from _bench import SHARD, server, url

import kvstore
from kvstore import Client
from kvstore.errors import KVTierError
from kvstore.ids import Link, Namespace, chain

KVTIER: Final = [sys.executable, "-c", "from kvstore.cli.main import main; main()"]
NS: Final = Namespace(
    model="load", revision="1", layers=4, kv_heads=2, head_dim=64, dtype="BF16", block_tokens=16
)  # 36 KiB a block
DRAM: Final = "128MiB"
PROMPTS, BLOCKS = 1000, 6  # of 206 MiB in all: more than the memory tier has, so that some come from the bucket
REFUSALS: Final = {"overloaded", "quota", "store_busy", "circuit_open"}
LOOK_S: Final = 2.0
TAKES_S: Final = 60.0  # a call that takes longer is an error
OPENING_S: Final = 10.0  # over which clients come
MIX: Final = {
    "lookup": 20,
    "get": 20,
    "restore": 15,
    "get_session": 15,
    "commit": 10,
    "put": 5,
    "list_sessions": 2,
    "stats": 5,
    "ready": 5,
}


class Seen:
    """What came of the calls, by face and call."""

    def __init__(self) -> None:
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        self.errors: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.misses = 0
        self.examples: dict[str, str] = {}

    async def call(self, name: str, asked: Awaitable[Any]) -> Any:
        """The answer, or None where there is none."""
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(TAKES_S):
                answer = await asked
        except (KVTierError, TimeoutError, OSError) as error:
            kind = error.kind if isinstance(error, KVTierError) else type(error).__name__
            (self.refusals if kind in REFUSALS else self.errors)[f"{name} {kind}"] += 1
            self.examples.setdefault(f"{name} {kind}", str(error))
            return None
        self.took[name].append(1e3 * (time.perf_counter() - begun))
        return answer


class User:
    """One client: what it asks for next, and what it holds.

    Args:
        kv: Its connection.
        face: `http` or `socket`.
        seen: Told of every call.
        dice: Its own.
        prompts: All prompts there are.
    """

    def __init__(self, number: int, kv: Client, face: str, seen: Seen, dice: random.Random, prompts: list[list[Link]]) -> None:
        self._kv, self._face, self._seen, self._dice, self._prompts = kv, face, seen, dice, prompts
        self._name, self._version = f"{face}-{number:04}", 0
        self._mine: list[Link] = []

    async def run(self, think_s: float, end: float) -> None:
        """Until then."""
        await self._commit()
        calls: list[Callable[[], Awaitable[None]]] = [getattr(self, f"_{name}") for name in MIX]
        while time.monotonic() < end:
            await asyncio.sleep(min(self._dice.expovariate(1 / think_s), max(0.0, end - time.monotonic())))
            await self._dice.choices(calls, list(MIX.values()))[0]()

    def _call(self, name: str, asked: Awaitable[Any]) -> Awaitable[Any]:
        return self._seen.call(f"{self._face} {name}", asked)

    def _prompt(self) -> list[Link]:
        return self._dice.choice(self._prompts)[: 1 if self._face == "http" else BLOCKS]

    async def _put(self) -> bool:
        links = self._prompt()
        taken = await self._call("put", self._kv.put(NS, SHARD, links, _fill))
        self._mine = links
        return bool(taken) and all(taken)

    async def _commit(self) -> None:
        if not await self._put():
            self._seen.misses += 1
            return
        committed = self._kv.commit(
            self._name, namespace=NS, base_version=self._version, blocks=self._mine, ttl_s=3600, durability="bucket"
        )
        receipt = await self._call("commit", committed)
        if receipt is None:  # it may have landed all the same
            session = await self._call("get_session", self._kv.get_session(self._name, namespace=NS))
            self._version = self._version if session is None else session.version
        else:
            self._version = receipt.version

    async def _get(self) -> None:
        links = self._mine or self._prompt()
        blocks = await self._call("get", self._kv.get(NS, SHARD, links, deadline_ms=10_000))
        if blocks is not None:
            self._seen.misses += len(blocks) < len(links)
            blocks.release()

    async def _lookup(self) -> None:
        await self._call("lookup", self._kv.lookup(namespace=NS, prefix_ids=[link.prefix_id for link in self._prompt()]))

    async def _restore(self) -> None:
        if not self._version:
            return
        restore = await self._call("restore", self._kv.restore(self._name, namespace=NS))
        if restore is not None:
            await self._call("wait", self._kv.wait(restore, timeout_ms=30_000))

    async def _get_session(self) -> None:
        if self._version:
            await self._call("get_session", self._kv.get_session(self._name, namespace=NS))

    async def _list_sessions(self) -> None:
        await self._call("list_sessions", self._kv.list_sessions(prefix=self._name, limit=20))

    async def _stats(self) -> None:
        await self._call("stats", self._kv.stats())

    async def _ready(self) -> None:
        await self._call("ready", self._kv.ready())


def _fill(index: int, payload: memoryview) -> None:
    payload[:8] = index.to_bytes(8, "little")


class Process:
    """A node from outside."""

    def __init__(self, pid: int) -> None:
        self._at = Path(f"/proc/{pid}")

    def look(self) -> dict[str, float]:
        """MiB it has of its own, MiB of the shared arena, open descriptors, threads, CPU seconds."""
        fields = dict(line.split(":", 1) for line in (self._at / "status").read_text().splitlines())
        ticks = (self._at / "stat").read_text().rpartition(")")[2].split()
        return {
            "anon_mib": int(fields["RssAnon"].split()[0]) / 1024,
            "shared_mib": int(fields["RssShmem"].split()[0]) / 1024,
            "fds": sum(1 for _ in (self._at / "fd").iterdir()),
            "threads": int(fields["Threads"]),
            "cpu_s": (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK"),
        }


@contextmanager
def node(store: str, folder: Path, engines: int) -> Iterator[tuple[dict[str, Any], Process]]:
    """A node; where it can be reached, and how to look at it."""
    flags = {
        "store.url": store,
        "dram.size": DRAM,
        "node.listen": "127.0.0.1:0",
        "node.socket": f"{folder}/node.sock",
        "limits.connections": str(engines + 4),
        "lifecycle.collect_interval": "30s",
        "lifecycle.history": "2",
    }
    sets = [text for name, value in flags.items() for text in ("--set", f"{name}={value}")]
    command = [*KVTIER, "serve", "--format", "json", "--log-level", "warning", *sets]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield msgspec.json.decode(process.stdout.readline(), type=dict[str, Any]), Process(process.pid)
        finally:
            process.terminate()


async def load(where: Mapping[str, Any], process: Process, args: argparse.Namespace) -> tuple[Seen, list[dict[str, float]], float]:
    """All clients at once."""
    seen, dice, looks = Seen(), random.Random(args.seed), list[dict[str, float]]()
    prompts = [list(chain(NS, [dice.randrange(32_000) for _ in range(16 * BLOCKS)])) for _ in range(PROMPTS)]
    async with AsyncExitStack() as life, asyncio.TaskGroup() as tasks:
        begun = time.monotonic()
        end = begun + OPENING_S + args.seconds
        for number in range(args.clients + args.engines):
            face = "http" if number < args.clients else "socket"
            kv = await life.enter_async_context(await kvstore.connect(where["http" if face == "http" else "url"]))
            user = User(number, kv, face, seen, random.Random(args.seed * 1_000_003 + number), prompts)
            tasks.create_task(user.run(args.think, end))
            await asyncio.sleep(max(0.0, begun + OPENING_S * number / (args.clients + args.engines) - time.monotonic()))
        while time.monotonic() < end:
            looks.append({"at_s": time.monotonic() - begun, **process.look()})
            await asyncio.sleep(LOOK_S)
    return seen, looks, time.monotonic() - begun


def percentile(values: list[float], part: float) -> float:
    """Of a sorted list."""
    return values[min(len(values) - 1, int(part * len(values)))]


def report(seen: Seen, looks: list[dict[str, float]], took_s: float, *, as_json: bool) -> None:
    """A table, or a JSON object a line."""
    rows = [
        {
            "call": name,
            "calls": len(values),
            "p50_ms": round(percentile(values, 0.5), 2),
            "p99_ms": round(percentile(values, 0.99), 2),
            "longest_ms": round(values[-1], 1),
        }
        for name, values in sorted((name, sorted(values)) for name, values in seen.took.items())
    ]
    first, last = ([each for each in looks if low <= each["at_s"] < high] for low, high in _minutes(looks))
    node_rows = [
        {"node": field, "first_minute": round(_median(first, field), 1), "last_minute": round(_median(last, field), 1)}
        for field in ("anon_mib", "shared_mib", "fds", "threads")
    ]
    counts = {
        "calls": sum(map(len, seen.took.values())),
        "calls_a_s": round(sum(map(len, seen.took.values())) / took_s, 1),
        "node_cpu": round((looks[-1]["cpu_s"] - looks[0]["cpu_s"]) / (looks[-1]["at_s"] - looks[0]["at_s"]), 3),
        "errors": dict(seen.errors),
        "refusals": dict(seen.refusals),
        "short_or_not_taken": seen.misses,
        "examples": seen.examples,
        "load": [round(each, 1) for each in os.getloadavg()],
    }
    if as_json:
        for row in (*rows, *node_rows, counts):
            print(msgspec.json.encode(row).decode())
        return
    print("| call | calls | p50 ms | p99 ms | longest ms |\n|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    print("\n| of the node | first minute | last minute |\n|---|---|---|")
    for each in node_rows:
        print("| " + " | ".join(map(str, each.values())) + " |")
    print("\n" + msgspec.json.format(msgspec.json.encode(counts), indent=2).decode())


def _minutes(looks: list[dict[str, float]]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The first one once all are there, and the last."""
    span = min(60.0, (looks[-1]["at_s"] - OPENING_S) / 3)
    return (OPENING_S, OPENING_S + span), (looks[-1]["at_s"] - span, looks[-1]["at_s"] + 1)


def _median(looks: list[dict[str, float]], field: str) -> float:
    return statistics.median(each[field] for each in looks)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000, help="over HTTP")
    parser.add_argument("--engines", type=int, default=60, help="on the Unix socket")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--think", type=float, default=2.0, help="mean seconds between an answer and the next question")
    parser.add_argument("--store", choices=["seaweed", "memory"], default="seaweed", help="memory: the bucket is in the node's own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with ExitStack() as life:
        if args.store == "seaweed":
            seaweed, folder = life.enter_context(server())
            store = url(seaweed, "load")
        else:
            store, folder = "memory://load", Path(life.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-load-")))
        where, process = life.enter_context(node(store, folder, args.engines))
        seen, looks, took_s = asyncio.run(load(where, process, args))
    report(seen, looks, took_s, as_json=args.json)
    return 1 if seen.errors else 0


if __name__ == "__main__":
    sys.exit(main())
