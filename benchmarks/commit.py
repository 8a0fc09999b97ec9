"""What a durable commit costs above the bytes it stores.

A session grows by one 2 MiB block per commit with durability `bucket`. Baseline, in the same run: one PUT of the same bytes by the
same client, which no store could beat.

    python benchmarks/commit.py [--commits 40]
"""

from __future__ import annotations

import argparse
import asyncio
import time

from _bench import BLOCK_BYTES, NAMESPACE, SHARD, fill, links, payload, report, server, url

import kvstore
from kvstore.objects import OVERWRITE, S3Store


async def measure(commits: int) -> None:
    """Alternate both, so that they see the same machine."""
    bodies = [payload(index) for index in range(commits)]
    with server() as (seaweed, _):
        async with (
            kvstore.open(url(seaweed, "kv", dram="512MiB")) as kv,
            S3Store.open(seaweed.settings(), credentials=lambda: seaweed.credentials) as store,
        ):
            ours, bare = [], []
            chain = links(commits)
            for index, body in enumerate(bodies):
                started = time.perf_counter()
                await store.put(f"bare/{index}", body, OVERWRITE)
                bare.append(1000 * (time.perf_counter() - started))
                await kv.put(NAMESPACE, SHARD, chain[index : index + 1], fill(index))
                started = time.perf_counter()
                await kv.commit("bench", namespace=NAMESPACE, base_version=index, blocks=chain[: index + 1], durability="bucket")
                ours.append(1000 * (time.perf_counter() - started))
    report("commit", "ms", ours[1:], bare[1:], block_bytes=BLOCK_BYTES)  # the first creates the session and opens connections


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=40)
    asyncio.run(measure(parser.parse_args().commits))
