"""How fast a session's blocks come back into DRAM, from the bucket and from the disk tier.

Baselines, in the same run: the same objects read by the same S3 client, eight at a time and not even verified; and the same number
of bytes read from one file past the page cache.

    python benchmarks/restore.py [--blocks 48] [--samples 3]
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import shutil
import time
from pathlib import Path

from _bench import BLOCK_BYTES, NAMESPACE, SHARD, fill, links, payload, report, server, url

import kvstore
from kvstore.objects import S3Store
from kvstore.objects.seaweed import SeaweedFS

PARALLEL = 8


async def measure(blocks: int, samples: int) -> None:
    """Write once; then restore again and again with an empty DRAM tier."""
    chain = links(blocks)
    with server() as (seaweed, folder):
        disk = folder / "nvme"
        options = {"dram": "1GiB", "nvme": "1GiB", "nvme_path": str(disk)}
        async with kvstore.open(url(seaweed, "kv", **options)) as kv:
            await kv.put(NAMESPACE, SHARD, chain, fill(0))
            await kv.commit("bench", namespace=NAMESPACE, base_version=0, blocks=chain, durability="bucket")
        bucket, nvme, gets, reads = [], [], [], []
        for _ in range(samples):
            nvme.append(await restored(url(seaweed, "kv", **options), blocks))
            reads.append(read_file(folder / "file", blocks))
        shutil.rmtree(disk)
        for _ in range(samples):
            bucket.append(await restored(url(seaweed, "kv", dram="1GiB"), blocks))
            gets.append(await read_objects(seaweed, blocks))
    size = blocks * BLOCK_BYTES / 1e9
    report("restore_bucket", "GB/s", [size / took for took in bucket], [size / took for took in gets], bytes=int(size * 1e9))
    report("restore_nvme", "GB/s", [size / took for took in nvme], [size / took for took in reads], bytes=int(size * 1e9))


async def restored(where: str, blocks: int) -> float:
    """Seconds from asking a fresh node to all blocks in its DRAM tier."""
    async with kvstore.open(where) as kv:
        started = time.perf_counter()
        done = await kv.wait(await kv.restore("bench"))
        took = time.perf_counter() - started
    assert (done.state, done.staged_tokens) == ("ready", blocks * NAMESPACE.block_tokens), done
    return took


async def read_objects(seaweed: SeaweedFS, blocks: int) -> float:
    """Seconds for plain GETs of the block objects."""
    async with S3Store.open(seaweed.settings(), credentials=lambda: seaweed.credentials) as store:
        keys = [meta.key async for page in store.list("kv/blocks/") for meta in page]
        assert len(keys) == blocks
        gate = asyncio.Semaphore(PARALLEL)

        async def read(key: str) -> None:
            async with gate:
                await store.get(key, into=memoryview(bytearray(2 * BLOCK_BYTES)))

        started = time.perf_counter()
        await asyncio.gather(*map(read, keys))
        return time.perf_counter() - started


def read_file(path: Path, blocks: int) -> float:
    """Seconds for as many bytes from one file, with O_DIRECT."""
    if not path.exists():
        path.write_bytes(b"".join(map(payload, range(blocks))))
        with path.open("rb") as file:
            os.fsync(file.fileno())
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as room:
            started = time.perf_counter()
            for index in range(blocks):
                os.preadv(descriptor, [room], index * BLOCK_BYTES)
            return time.perf_counter() - started
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--samples", type=int, default=3)
    asyncio.run(measure(**vars(parser.parse_args())))
