"""Device memory: copies from the host by three ways, and a session brought up to it, beside one bare copy of its bytes.

    python benchmarks/device.py [--device cuda:0] [--mib 256] [--samples 7]

Every byte that came to the device is compared with what was sent; a difference ends it with an error. So does a run of more than
170 s. Where torch sees no CUDA device it says so, and runs on `cpu`: that shows that the code runs, and nothing about any device.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import torch
from _bench import BLOCK_BYTES, NAMESPACE, SHARD, fill, links, payload, report

import kvstore
from kvstore import codec
from kvstore.blocks import DeviceBlocks
from kvstore.client.aio import Client
from kvstore.clock import SystemClock
from kvstore.config import StorageUrl
from kvstore.embedded import EmbeddedTransport, embedded_settings
from kvstore.ids import Link
from kvstore.node import Node
from kvstore.objects.base import Absent, Arrived, Got, Unchanged
from kvstore.objects.memory import MemoryStore
from kvstore.objects.passing import PassingStore
from kvstore.service.ondevice import OnDevice
from kvstore.service.wants import block_wants
from tiering import DramTier, Movers
from tiering.streams import open_device

MIB = 1 << 20
PIECE = 2 * MIB  # in one copy: what a block of a small model weighs
SECONDS = 170
FEW = 12  # blocks from the slow store: all of them are on their way at once
RATE = 100e6  # bytes per second of each
HEADER = codec.layout(NAMESPACE, SHARD, NAMESPACE.block_tokens).header_bytes


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
    early = [await from_afar(device) for _ in range(3)]
    facts |= {"blocks": FEW, "store": f"{RATE / 1e6:.0f} MB/s for each block", "baseline_is": "the whole session"}
    report("device_early_first_layer", "ms", [each[0] for each in early], [each[1] for each in early], **facts)


class Slow(PassingStore):
    """Sends blocks at a steady rate, a part of a layer at a time."""

    async def get(
        self,
        key: str,
        *,
        range: tuple[int, int] | None = None,  # noqa: A002  the contract's own name
        into: memoryview | None = None,
        if_none_match: str | None = None,
        arrived: Arrived | None = None,
    ) -> Got | Absent | Unchanged:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        got = await self._store.get(key, range=range, into=into, if_none_match=if_none_match)
        if into is None or arrived is None or not key.startswith("blocks/") or not isinstance(got, Got):
            return got
        body, at = bytes(got.data), 0
        into[: len(body)] = bytes(len(body))  # it is there only when it was sent
        while at < len(body):
            part = body[at : at + (64 << 10)]
            await asyncio.sleep(len(part) / RATE)
            into[at : at + len(part)] = part
            await asyncio.to_thread(arrived, at, at + len(part))
            at += len(part)
        return got


@asynccontextmanager
async def opened(device: str, store: MemoryStore) -> AsyncIterator[Client]:
    """A store above a bucket that is far away."""
    url = StorageUrl.parse(f"memory://benchmark?dram=256MiB&codec=raw&device={device}&device_bytes=128MiB")
    async with AsyncExitStack() as lifetime:
        node = await lifetime.enter_async_context(Node.open(embedded_settings(url), store=Slow(store)))
        opening = OnDevice.open(node.service, "default", SystemClock(), device=device, nbytes=128 * MIB)
        above = await lifetime.enter_async_context(opening)
        async with Client(EmbeddedTransport(node, "default", lifetime.pop_all(), above)) as kv:
            yield kv


async def from_afar(device: str) -> tuple[float, float]:
    """Milliseconds until the first layer of all blocks of a bucket is on the device, and until they are there whole."""
    store, chain = MemoryStore(), links(FEW)
    async with opened(device, store) as kv:
        assert all(await kv.put(NAMESPACE, SHARD, chain, fill(0)))
        await kv.commit("chat", namespace=NAMESPACE, base_version=0, blocks=chain, durability="bucket")
    async with opened(device, store) as kv:  # one that has nothing yet
        began = time.perf_counter()
        with await kv.get_on_device(NAMESPACE, SHARD, chain, early=True) as blocks:
            assert await blocks.arrived(0) == FEW, blocks.miss
            for lease in blocks.leases:
                lease.synchronize(0)
            first = time.perf_counter() - began
            blocks.wait(0)
            size = codec.layout(NAMESPACE, SHARD, NAMESPACE.block_tokens).offsets[1]
            kept = [lease.tensor[HEADER : HEADER + size].clone() for lease in blocks.leases]
            assert await blocks.arrived() == FEW, blocks.miss
            for lease in blocks.leases:
                lease.synchronize()
            whole = time.perf_counter() - began
            compare(blocks)
            for index, part in enumerate(kept):
                if part.cpu().numpy().tobytes() != payload(index)[:size]:
                    raise SystemExit(f"the first layer of block {index} was not what was put")
    return first * 1e3, whole * 1e3


def compare(blocks: DeviceBlocks) -> None:
    """Every byte of every block is what was put. Raises `SystemExit` where one is not."""
    for index, lease in enumerate(blocks.leases):
        if lease.tensor.cpu().numpy().tobytes()[HEADER:] != payload(index):
            raise SystemExit(f"block {index} is not what was put")


def host_to_device(device: str, arena: torch.Tensor, samples: int) -> dict[str, list[float]]:
    """GB/s of all these bytes from the arena, from torch's own pinned memory, and by way of a pinned buffer."""
    found = open_device(device)
    target = found.allocate(arena.numel())
    registered = found.register(arena)
    pinned, bounce = found.staging(arena.numel()), found.staging(PIECE)
    for at in range(0, arena.numel(), PIECE):
        arena[at : at + PIECE] = torch.randint(256, (min(PIECE, arena.numel() - at),), dtype=torch.uint8)
    pinned.copy_(arena)

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
            if turn in {0, samples} and not torch.equal(target.cpu(), arena):
                raise SystemExit(f"{name}: the device has other bytes than the host")
            target.zero_()
            if device != "cpu":
                torch.cuda.synchronize()
    found.close()
    return rates


async def up(kv: Client, chain: Sequence[Link]) -> tuple[float, float]:
    """Milliseconds until blocks of the arena are on the device, and until the first layer of all of them is."""
    above = kv.transport._above  # type: ignore[attr-defined]  # noqa: SLF001  an engine has no reason to empty it
    above.tier.discard_many([want.key for want in block_wants(NAMESPACE, SHARD, chain)])
    began = time.perf_counter()
    with await kv.get_on_device(NAMESPACE, SHARD, chain) as blocks:
        assert len(blocks) == len(chain), blocks.miss
        for lease in blocks.leases:
            lease.synchronize(0)
        first = time.perf_counter()
        for lease in blocks.leases:
            lease.synchronize()
        whole = time.perf_counter()
        compare(blocks)
        return (whole - began) * 1e3, (first - began) * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--samples", type=int, default=7)
    signal.alarm(SECONDS)
    asyncio.run(measure(**vars(parser.parse_args())))
