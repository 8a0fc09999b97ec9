"""Device memory: copies from the host by three ways, and a session brought up to it, beside one bare copy of its bytes.

    python benchmarks/device.py [--device cuda:0] [--mib 256] [--samples 7]

Where torch sees no CUDA device it says so, and runs on `cpu`: that shows that the code runs, and nothing about any device.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from _bench import BLOCK_BYTES, NAMESPACE, SHARD, fill, links, report

import kvstore
from kvstore.client.aio import Client
from kvstore.ids import Link
from tiering import DramTier, Movers
from tiering.streams import open_device

MIB = 1 << 20
PIECE = 2 * MIB  # in one copy: what a block of a small model weighs


async def measure(device: str, mib: int, samples: int) -> None:
    """The bare copies, then sessions."""
    facts = {"device": device, "mib": mib}
    if device == "cpu":
        print("torch sees no CUDA device here: these are copies in this host's own memory", file=sys.stderr)
        facts["note"] = "no GPU: host memory only"
    async with Movers.open() as movers, DramTier.open("dram", mib * MIB, movers) as dram:
        await asyncio.sleep(1)  # the arena's pages are made real
        rates = host_to_device(device, torch.frombuffer(dram.memory, dtype=torch.uint8)[: mib * MIB], samples)
    for name in ("arena", "bounce"):
        report(f"device_{name}", "GB/s", rates[name], rates["pinned"], **facts)
    bare = [mib * MIB / rate / 1e6 for rate in rates["pinned"]]
    blocks = mib * MIB // BLOCK_BYTES
    url = f"memory://benchmark?dram={mib * 2}MiB&device={device}&device_bytes={mib}MiB"
    async with kvstore.open(url) as kv:
        chain = links(blocks)
        assert all(await kv.put(NAMESPACE, SHARD, chain, fill(0)))
        await kv.commit("chat", namespace=NAMESPACE, base_version=0, blocks=chain)
        came = [await up(kv, chain) for _ in range(samples)]
        report("device_get", "ms", [each[0] for each in came], bare, blocks=blocks, **facts)
        report("device_first_layer", "ms", [each[1] for each in came], bare, blocks=blocks, **facts)


def host_to_device(device: str, arena: torch.Tensor, samples: int) -> dict[str, list[float]]:
    """GB/s of all these bytes from the arena, from torch's own pinned memory, and by way of a pinned buffer."""
    found = open_device(device)
    target = found.allocate(arena.numel())
    registered = found.register(arena)
    pinned, bounce = found.staging(arena.numel()), found.staging(PIECE)

    def direct(source: torch.Tensor) -> None:
        for at in range(0, source.numel(), PIECE):
            found.copy(target[at : at + PIECE], source[at : at + PIECE])
        found.mark().wait()

    def bounced() -> None:
        for at in range(0, arena.numel(), PIECE):
            np.copyto(bounce.numpy(), arena[at : at + PIECE].numpy())
            found.copy(target[at : at + PIECE], bounce)
            found.mark().wait()

    ways: dict[str, Callable[[], None]] = {
        "arena": lambda: direct(arena) if registered else bounced(),
        "pinned": lambda: direct(pinned),
        "bounce": bounced,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(samples + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if turn:
                rates[name].append(arena.numel() / (time.perf_counter() - began) / 1e9)
    found.close()
    return rates


async def up(kv: Client, chain: Sequence[Link]) -> tuple[float, float]:
    """Milliseconds until blocks of the arena are on the device, and until the first layer of all of them is."""
    above = kv.transport._above  # type: ignore[attr-defined]  # noqa: SLF001  an engine has no reason to empty it
    above.tier.discard_many(list(above.tier._values))  # noqa: SLF001  nor to list it
    began = time.perf_counter()
    with await kv.get_on_device(NAMESPACE, SHARD, chain) as blocks:
        assert len(blocks) == len(chain), blocks.miss
        for lease in blocks.leases:
            lease.synchronize(0)
        first = time.perf_counter()
        for lease in blocks.leases:
            lease.synchronize()
        return (time.perf_counter() - began) * 1e3, (first - began) * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--samples", type=int, default=7)
    asyncio.run(measure(**vars(parser.parse_args())))
