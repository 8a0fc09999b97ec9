"""What a directory of blocks costs one Valkey and the nodes that use it: memory, look-ups, news, comparing, steady traffic.

The server is filled as 100 nodes would have filled it, each block held by one or two of them; everything measured afterwards goes
through the product's own client. Baselines, in the same run: for memory a set for each block, as one would write it first; for time
the same entries by the server's own Python client, without any of our rules.

    python benchmarks/directory.py [--blocks 10000000] [--nodes 100]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from _bench import report
from valkey import Valkey

from kvstore.clock import RandomIds, SystemClock
from kvstore.directory_url import DirectoryUrl
from kvstore.mesh.entries import BUCKETS, RENEW, Names, pack
from kvstore.mesh.inventory import Inventory, InventorySettings
from kvstore.mesh.testing import ValkeyServer
from kvstore.mesh.valkey import ValkeyDirectory
from tiering import Movers, Watch

CLOCK = SystemClock()
NAMES = Names("default")
SAMPLE = 500_000  # blocks of the baseline of memory
STEADY_S, MOVES_S, LOOKS_S = 15, 50, 2  # seconds; blocks that come, and as many that go, each second; look-ups each second


class Shelf:
    """A tier of keys without values."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._here = dict.fromkeys(keys)
        self._told: Watch = lambda _key, _by, _ref: None

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """As a tier does."""
        return [key in self._here for key in keys]

    def keys(self) -> list[bytes]:
        """As a tier does."""
        return list(self._here)

    def watch(self, told: Watch | None) -> None:
        """As a tier does."""
        self._told = told or (lambda _key, _by, _ref: None)

    def move(self, come: bytes, go: bytes) -> None:
        """One comes, one goes."""
        self._here[come] = None
        self._told(come, 1, None)
        del self._here[go]
        self._told(go, -1, None)


class Blocks:
    """Keys of random blocks in order, and who holds each: as many numbers of nodes as it has holders.

    Attributes:
        shorts: The first 8 bytes of each key, as a number.
        holders: Two nodes for each; the second counts for every other block only.
    """

    def __init__(self, count: int, nodes: int) -> None:
        random = np.random.default_rng(1)
        self.shorts: npt.NDArray[np.uint64] = np.unique(random.integers(0, 1 << 64, count, np.uint64))
        self.holders = random.integers(0, nodes, (len(self.shorts), 2), np.uint16)

    def keys(self, numbers: npt.NDArray[np.int64]) -> list[bytes]:
        """The keys of some."""
        shorts = self.shorts[numbers].astype(">u8").tobytes()
        return [shorts[at : at + 8] + bytes(24) for at in range(0, len(shorts), 8)]

    def of(self, node: int) -> npt.NDArray[np.int64]:
        """What a node holds."""
        second = np.arange(len(self.shorts)) % 2 == 0
        return np.flatnonzero((self.holders[:, 0] == node) | (second & (self.holders[:, 1] == node)))

    def buckets(self, lives: Sequence[int]) -> Iterator[tuple[int, dict[bytes, bytes]]]:
        """Every bucket as the server has it."""
        bounds = np.searchsorted(self.shorts >> np.uint64(48), np.arange(BUCKETS + 1, dtype=np.uint64))
        shorts = self.shorts.astype(">u8").tobytes()
        packed = [pack([life]) for life in lives]
        for bucket in range(BUCKETS):
            entries = {}
            for at in range(int(bounds[bucket]), int(bounds[bucket + 1])):
                first, second = self.holders[at]
                both = at % 2 == 0 and first != second
                entries[shorts[8 * at + 2 : 8 * at + 8]] = packed[first] + packed[second] if both else packed[first]
            yield bucket, entries


def fill(client: Any, blocks: Blocks, nodes: int) -> list[int]:
    """Make the members, and write all entries; the members' incarnations."""
    lives = []
    client.script_load(RENEW.text)
    for node in range(nodes):
        answer = client.execute_command(*RENEW.call(NAMES.membership, f"node{node:03}", 0, 86_400_000, "7979 10.0.0.1", ""))
        lives.append(answer[0])
    pipeline = client.pipeline(transaction=False)
    for bucket, entries in blocks.buckets(lives):
        if entries:
            pipeline.hset(NAMES.bucket(bucket), mapping=entries)
            pipeline.pexpire(NAMES.bucket(bucket), 86_400_000)
        if bucket % 64 == 63:
            pipeline.execute()
    return lives


def as_sets(client: Any, blocks: Blocks) -> float:
    """Bytes for each block, where each has a set of its holders under a key of its own."""
    before, count = memory(client), min(SAMPLE, len(blocks.shorts))
    pipeline = client.pipeline(transaction=False)
    for at in range(count):
        first, second = map(int, blocks.holders[at])
        pipeline.sadd(b"kvtier:s:" + blocks.shorts[at].tobytes(), *([first, second] if at % 2 == 0 else [first]))
        if at % 1000 == 999:
            pipeline.execute()
    pipeline.execute()
    return (memory(client) - before) / count


def memory(client: Any) -> int:
    """Bytes in use."""
    return int(client.info("memory")["used_memory"])


def bare_looks(client: Any, keys: Sequence[bytes]) -> float:
    """Milliseconds of the same look-up without us."""
    begun = time.perf_counter()
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.execute_command(*NAMES.look(key))
    pipeline.execute()
    return 1000 * (time.perf_counter() - begun)


def bare_writes(client: Any, keys: Sequence[bytes]) -> float:
    """Entries a second, without a look at what is there."""
    begun = time.perf_counter()
    for first in range(0, len(keys), 256):
        pipeline = client.pipeline(transaction=False)
        for key in keys[first : first + 256]:
            pipeline.hset(NAMES.bucket(key[0] << 8 | key[1]), key[2:8], b"bare")
        pipeline.execute()
    return len(keys) / (time.perf_counter() - begun)


def bare_reading(client: Any) -> float:
    """Seconds to read all entries, as a node that compares by itself would; found out by a sixteenth of them."""
    begun = time.perf_counter()
    for first in range(0, BUCKETS // 16, 64):
        pipeline = client.pipeline(transaction=False)
        for bucket in range(first, first + 64):
            pipeline.hgetall(NAMES.bucket(bucket))
        pipeline.execute()
    return 16 * (time.perf_counter() - begun)


async def looks(directory: ValkeyDirectory, client: Any, blocks: Blocks) -> None:
    """512 keys that are all there."""
    random = np.random.default_rng(2)
    ours, bare = [], []
    for _ in range(300):
        keys = blocks.keys(random.integers(0, len(blocks.shorts), 512))
        begun = time.perf_counter()
        found = await directory.locate(keys)
        ours.append(1000 * (time.perf_counter() - begun))
        if directory.stats.silences + directory.stats.spared:
            raise SystemExit("the server did not answer within 250 ms: this machine has other things to do")
        assert sum(map(bool, found)) > 480, "every block is found, but for those that only the reader has"
        bare.append(bare_looks(client, keys))
    p99 = statistics.quantiles(ours, n=100)[98]
    report("directory locate", "ms", ours, bare, keys=512, p99=round(p99, 3))


async def announcements(directory: ValkeyDirectory, client: Any) -> None:
    """New blocks, in batches of 256."""
    ours, bare = [], []
    for turn in range(5):
        every = np.random.default_rng(100 + turn).bytes(32 * 20_000)
        keys = [every[at : at + 32] for at in range(0, len(every), 32)]
        begun = time.perf_counter()
        directory.added(keys)
        while directory._own:  # noqa: SLF001  without the pauses of `tell`
            await directory.flush()
            await CLOCK.sleep(0.001)
        ours.append(len(keys) / (time.perf_counter() - begun))
        directory.dropped(keys)
        while directory._own:  # noqa: SLF001  without the pauses of `tell`, as when they were added
            await directory.flush()
            await CLOCK.sleep(0.001)
        bare.append(bare_writes(client, keys))
        remove(client, keys)
    report("directory announce", "1/s", ours, bare, overflows=directory.stats.overflows, failures=directory.stats.failures)


def remove(client: Any, keys: Sequence[bytes]) -> None:
    """What `bare_writes` wrote."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.hdel(NAMES.bucket(key[0] << 8 | key[1]), key[2:8])
    pipeline.execute()


async def comparing(directory: ValkeyDirectory, client: Any, movers: Movers, keys: Sequence[bytes]) -> None:
    """All that one node has, when none of it is there yet, and compared in every bucket; as fast as it goes."""
    for what in ("a new life", "everything"):
        pace = InventorySettings(share=1.0)
        async with Inventory.open([Shelf(keys)], directory, movers.run, CLOCK, pace) as inventory:
            if what == "everything":
                inventory._seen = (-1, 0)  # noqa: SLF001  as after a loss
            cpu, server = time.process_time(), server_cpu(client)
            begun = time.perf_counter()
            while not inventory.passes:
                await inventory.step()
            took = time.perf_counter() - begun
        report(
            "directory compare",
            "s",
            [took],
            [bare_reading(client)],
            what=what,
            keys=len(keys),
            node_cpu_s=round(time.process_time() - cpu, 2),
            server_cpu_s=round(server_cpu(client) - server, 2),
            repaired=directory.stats.repaired,
        )


def server_cpu(client: Any) -> float:
    """Seconds of processor time that the server has used."""
    used = client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


async def steady(directory: ValkeyDirectory, client: Any, movers: Movers, blocks: Blocks, keys: Sequence[bytes]) -> None:
    """A node in the middle of a day: its lease, blocks that come and go, look-ups, and the slow comparing."""
    random = np.random.default_rng(3)
    shelf = Shelf(keys)
    async with Inventory.open([shelf], directory, movers.run, CLOCK) as inventory:
        inventory._lives = directory.lives  # noqa: SLF001  the start is over
        loops = [asyncio.create_task(loop()) for loop in (directory.tell, inventory.tell, inventory.repair)]
        before, cpu = traffic(client), time.process_time()
        server = server_cpu(client)
        for step in range(STEADY_S * 10):
            for number in range(MOVES_S // 10):
                shelf.move(random.bytes(32), keys[step * MOVES_S // 10 + number])
            if step % (10 // LOOKS_S) == 0:
                await directory.locate(blocks.keys(random.integers(0, len(blocks.shorts), 512)))
            await CLOCK.sleep(0.1)
        to, back = (now - then for now, then in zip(traffic(client), before, strict=True))
        facts = {"node_cpu_percent": 100 * (time.process_time() - cpu) / STEADY_S}
        facts["server_cpu_percent"] = 100 * (server_cpu(client) - server) / STEADY_S
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    named = 32 * (2 * MOVES_S + 512 * LOOKS_S)
    shown = {name: round(value, 2) for name, value in facts.items()}
    report("directory traffic", "B/s", [(to + back) / STEADY_S], [named], to_server=to // STEADY_S, back=back // STEADY_S, **shown)


def traffic(client: Any) -> tuple[int, int]:
    """Bytes that the server has received and sent."""
    said = client.info("stats")
    return int(said["total_net_input_bytes"]), int(said["total_net_output_bytes"])


async def measure(count: int, nodes: int) -> None:
    """Everything, on one server."""
    blocks = Blocks(count, nodes)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        server = ValkeyServer(Path(folder))
        try:
            client: Any = Valkey(port=server.port)
            sets = as_sets(client, blocks)
            client.execute_command("FLUSHALL", "SYNC")
            before = memory(client)
            fill(client, blocks, nodes)
            used = memory(client) - before
            encoding = client.object("ENCODING", NAMES.bucket(0)).decode()
            each = used / len(blocks.shorts)
            report("directory memory", "B/block", [each], [sets], blocks=count, nodes=nodes, used_bytes=used, encoding=encoding)
            where = DirectoryUrl.parse(server.url)
            opening = ValkeyDirectory.open(where, "node000", "10.0.0.1", 7979, clock=CLOCK, ids=RandomIds(), environ={})
            async with opening as directory, Movers.open() as movers:
                keeping = asyncio.create_task(directory.keep())
                while not directory.ready or len(directory.members()) < nodes - 1:
                    await CLOCK.sleep(0.05)
                mine = blocks.keys(blocks.of(0))
                await looks(directory, client, blocks)
                await announcements(directory, client)
                await comparing(directory, client, movers, mine)
                await steady(directory, client, movers, blocks, mine)
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
            calls = client.info("commandstats")
            times = {name.removeprefix("cmdstat_"): calls[name]["usec_per_call"] for name in ("cmdstat_hget", "cmdstat_evalsha")}
            print(msgspec.json.encode({"name": "directory server", "unit": "us/call", **times}).decode(), flush=True)
        finally:
            server.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--nodes", type=int, default=100)
    options = parser.parse_args()
    asyncio.run(measure(options.blocks, options.nodes))
