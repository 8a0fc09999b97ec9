"""Large buckets: collected to exactly the live set, and in memory that does not grow with them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import api
from kvstore.clock import VirtualClock
from kvstore.keys import Keys, manifest_name
from kvstore.lifecycle.collector import Collector
from kvstore.model import BlockRef, Branch, Copy, Head, Manifest, dump
from kvstore.objects import MemoryStore
from kvstore.objects.base import ObjectMeta
from kvstore.repo.manifests import pack
from kvstore.repo.testing import bodies, broken, opened, tiny

KEYS, NS, SHARD = Keys("r"), tiny(), "t0of1.p0of1.g0"
COLLECT = Path(__file__).parents[2] / "benchmarks" / "collect.py"


@pytest.mark.slow
async def test_of_50_000_blocks_exactly_the_live_ones_remain():
    """Sessions with forks, older versions, rewound ends and two generations, between as much garbage of every kind."""
    clock = VirtualClock()
    memory = MemoryStore(clock)
    live: set[str] = set()
    objects: dict[str, bytes] = {}
    for family in range(50):
        token = f"{family:032x}"
        name, older, orphan = (manifest_name(2, f"{each}{token[1:]}") for each in range(3))
        copies = [(Copy(shard=0, gen=1 + index % 2, bytes=1, header_bytes=0),) for index in range(1000)]
        blocks = [BlockRef(prefix_id=f"{family:016x}{index:048x}", tokens=4, copies=copy) for index, copy in enumerate(copies)]
        named = {name: (blocks[:600], 500), older: (blocks[:400], 400), orphan: (blocks[600:], 400)}
        for manifest, (listed, _) in named.items():
            value = Manifest(namespace=NS.id, shards=(SHARD,), block_tokens=4, tokens=4 * len(listed), blocks=tuple(listed))
            key = KEYS.manifest("default", token, manifest)
            objects[key] = pack(value, key)
        branches = {"a": Branch(seq=2, manifest=name, n=500), "b": Branch(seq=1, manifest=older, n=400)}
        key = KEYS.head("default", token)
        objects[key] = dump(Head(swaps=1, write=token, recent=(token,), branches=branches), key)
        live |= {KEYS.block(NS.id, SHARD, block.prefix_id, block.copies[0].gen) for block in blocks[:500]}
        for block in blocks:
            objects[KEYS.block(NS.id, SHARD, block.prefix_id, block.copies[0].gen)] = b"x"
    assert len([key for key in objects if key.startswith(KEYS.blocks)]) == 50_000
    async with opened(memory, clock) as repo:
        for _ in range(3):
            await repo.epochs.advance(await repo.epochs.read())
        for key in sorted(objects):
            memory._objects[key] = (objects[key], ObjectMeta(key, len(objects[key]), f'"{len(key)}"', clock.now()))
        done = await Collector(repo).run(api.Collect())
        assert (done.blocks_kept, done.blocks_deleted, done.live_bytes) == (25_000, 25_000, 25_000)
        assert (done.manifests_kept, done.manifests_deleted, done.heads) == (100, 50, 50)
        assert {key for key in bodies(memory) if key.startswith(KEYS.blocks)} == live
        assert broken(bodies(memory), KEYS) == []


@pytest.mark.slow
def test_memory_is_a_constant_and_a_few_bytes_for_each_block():
    """In a process of its own, on a bucket that is made up as it is listed. `benchmarks/collect.py listing` does five million."""
    peaks = {}
    for keys in (30_000, 180_000):
        command = [sys.executable, str(COLLECT), "synthetic", "--keys", str(keys)]
        peaks[keys] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=100).stdout)["peak"]
    check = [sys.executable, str(COLLECT), "check", "--keys", "180000"]
    assert json.loads(subprocess.run(check, check=True, capture_output=True, timeout=100).stdout)["peak"] < 150  # fsck, too
    more = (peaks[180_000] - peaks[30_000]) * 1024**2
    assert more / 150_000 < 100  # 8 for the mark, 2 x 8 while marks are sorted, 20 as far as outlines are kept (32 MiB at most)
    assert peaks[180_000] < 150
