"""Blocks on a device layer by layer: the first layers are of use while the last are still in the bucket, and a lie is found out."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from fakes.node import SHARD, filler, links_of, namespace, pattern, until

from kvstore import codec
from kvstore.client.aio import Client
from kvstore.clock import SystemClock
from kvstore.config import StorageUrl
from kvstore.embedded import EmbeddedTransport, embedded_settings
from kvstore.ids import BlockName
from kvstore.node import Node
from kvstore.objects.memory import MemoryStore
from kvstore.objects.passing import PassingStore
from kvstore.service.ondevice import OnDevice

pytest.importorskip("torch", reason="the `torch` extra is not installed")

NS = namespace(layers=4)
LINKS = links_of(NS, 6)
PLAN = codec.layout(NS, SHARD, NS.block_tokens)
LAST = PLAN.header_bytes + PLAN.offsets[3 * PLAN.per_layer]  # where the last layer of a raw block begins


class Slow(PassingStore):
    """Sends blocks on a thread of its own, and waits before a block's last layer until it is told to go on.

    `spoil`: numbers of block reads whose last layer arrives with a flipped bit. `attempts`: those that break off there first, and
    begin anew. `others`: bytes that the second attempt of such a read brings instead.
    """

    def __init__(self, store):
        super().__init__(store)
        self.go = asyncio.Event()
        self.reads = self.sending = 0
        self.spoil, self.again, self.others = set(), set(), {}

    async def get(self, key, *, range=None, into=None, if_none_match=None, arrived=None):  # noqa: A002  the contract's own name
        if into is None or not key.startswith("blocks/") or arrived is None:
            return await self._store.get(key, range=range, into=into, if_none_match=if_none_match)
        read, self.reads = self.reads, self.reads + 1
        got = await self._store.get(key)
        body = bytearray(got.data)
        cut = min(LAST, len(body) * 3 // 4)
        await self._send(into, body[:cut], 0, arrived)
        self.sending += 1
        await self.go.wait()
        if read in self.again:
            arrived(0, 0)
            into[:] = bytes(into.nbytes)  # garbage, until it is overwritten
            body = self.others.get(read, body)
            await self._send(into, body[:cut], 0, arrived)
        if read in self.spoil:
            body[cut + 100] ^= 1
        await self._send(into, body[cut:], cut, arrived)
        return await self._answer(got, into, len(body))

    async def _send(self, into, part, at, arrived):
        def send():
            into[at : at + len(part)] = part
            arrived(at, at + len(part))

        await asyncio.to_thread(send)

    async def _answer(self, got, into, size):
        return type(got)(into[:size], got.etag, size, got.modified)


@pytest.fixture(params=["raw", "bp-zstd"])
def coding(request):
    return request.param


@asynccontextmanager
async def opened(coding):
    """A store above a slow bucket; a session of six blocks is in the bucket, and nowhere else."""
    async with AsyncExitStack() as lifetime:
        memory = MemoryStore()
        url = StorageUrl.parse("memory://early?dram=64MiB&device=cpu&device_bytes=64MiB&codec=" + coding)
        for turn in range(2):
            slow = Slow(memory)
            life = await lifetime.enter_async_context(AsyncExitStack())
            node = await life.enter_async_context(Node.open(embedded_settings(url), store=slow))
            above = await life.enter_async_context(
                OnDevice.open(node.service, "default", SystemClock(), device="cpu", nbytes=64 << 20)
            )
            kv = Client(EmbeddedTransport(node, "default", life.pop_all(), above))
            if turn == 0:
                assert await kv.put(NS, SHARD, LINKS, filler(LINKS)) == [True] * len(LINKS)
                await kv.commit("chat", namespace=NS, base_version=0, blocks=LINKS, durability="bucket")
                await kv.aclose()
        try:
            yield kv, slow, above
        finally:
            slow.go.set()
            await kv.aclose()


@pytest.fixture(autouse=True)
def every_layer_is_a_copy(monkeypatch):
    monkeypatch.setattr("tiering.upload.PIECE", 1)


def codec_name(link):
    return BlockName(NS.id, SHARD, link.prefix_id, link.tokens)


async def all_let_go(above):
    dram = above._service.plane.tiers("default").dram
    await until(lambda: not dram.leases)


def layer_bytes(lease, layer):
    raw = lease.tensor.numpy().tobytes()
    starts = [PLAN.header_bytes + (*PLAN.offsets, PLAN.payload_bytes)[at * PLAN.per_layer] for at in (layer, layer + 1)]
    return raw[starts[0] : starts[1]]


def right(link, layer):
    payload = pattern(link, PLAN.payload_bytes)
    return payload[PLAN.offsets[layer * PLAN.per_layer] : PLAN.offsets[(layer + 1) * PLAN.per_layer]]


async def test_layer_0_of_all_blocks_is_usable_while_their_last_layers_were_not_sent(coding):
    async with opened(coding) as (kv, slow, above):
        with await kv.get_on_device(NS, SHARD, LINKS, early=True) as blocks:
            assert await asyncio.wait_for(blocks.arrived(0), 20) == len(LINKS)
            assert not slow.go.is_set()
            blocks.wait(0)
            for link, lease in zip(LINKS, blocks.leases, strict=True):
                assert layer_bytes(lease, 0) == right(link, 0)
            with pytest.raises(ValueError, match="not on its way"):
                blocks.wait(3)
            slow.go.set()
            assert await asyncio.wait_for(blocks.arrived(), 20) == len(LINKS)
            blocks.wait()
            for link, lease in zip(LINKS, blocks.leases, strict=True):
                assert [layer_bytes(lease, layer) for layer in range(4)] == [right(link, layer) for layer in range(4)]
                codec.verify(memoryview(lease.tensor.numpy()), codec_name(link), NS)
        assert slow.reads == len(LINKS)
        await all_let_go(above)
        assert above.tier.contains_many([codec_name(link).tier_key for link in LINKS]) == [True] * 6


async def test_who_joins_a_restore_gets_its_layers_as_they_come(coding):
    async with opened(coding) as (kv, slow, _):
        status = await kv.restore("chat", namespace=NS, tier="device")
        with await kv.get_on_device(NS, SHARD, LINKS, early=True) as blocks:
            assert await asyncio.wait_for(blocks.arrived(0), 20) == len(LINKS)
            assert [layer_bytes(lease, 0) for lease in blocks.leases] == [right(link, 0) for link in LINKS]
            slow.go.set()
            assert await asyncio.wait_for(blocks.arrived(), 20) == len(LINKS)
        done = await kv.wait(status)
        assert (done.state, done.staged_tokens) == ("ready", 6 * NS.block_tokens)
        assert slow.reads == len(LINKS)


async def test_a_corrupt_late_layer_ends_the_run_there_and_its_bytes_are_never_on_the_device(coding):
    async with opened(coding) as (kv, slow, above):
        slow.spoil = {2}
        with await kv.get_on_device(NS, SHARD, LINKS, early=True) as blocks:
            assert await asyncio.wait_for(blocks.arrived(0), 20) == len(LINKS)
            third = blocks.leases[2].tensor
            before = third.numpy().tobytes()[LAST:]
            slow.go.set()
            assert await asyncio.wait_for(blocks.arrived(), 20) == 2
            assert blocks.miss == "corrupt"
            blocks.wait()
            assert [layer_bytes(lease, 3) for lease in blocks.leases] == [right(link, 3) for link in LINKS[:2]]
            assert third.numpy().tobytes()[LAST:] == before
        held = above.tier.contains_many([lease.key for lease in blocks.leases])
        assert held == [True, True]
        stats = (await kv.stats()).tiers["device"]
        assert stats.used == 2 * PLAN.raw_bytes


async def test_a_second_attempt_that_brings_the_same_goes_on(coding):
    async with opened(coding) as (kv, slow, _):
        slow.again = {1, 4}
        with await kv.get_on_device(NS, SHARD, LINKS, early=True) as blocks:
            assert await asyncio.wait_for(blocks.arrived(0), 20) == len(LINKS)
            slow.go.set()
            assert await asyncio.wait_for(blocks.arrived(), 20) == len(LINKS)
            for link, lease in zip(LINKS, blocks.leases, strict=True):
                assert [layer_bytes(lease, layer) for layer in range(4)] == [right(link, layer) for layer in range(4)]


async def test_a_second_attempt_that_brings_another_block_is_none_here_though_it_is_sound(coding):
    async with opened(coding) as (kv, slow, _):
        name = codec_name(LINKS[3])
        raw = bytearray(PLAN.raw_bytes)
        raw[PLAN.header_bytes :] = np.random.default_rng(1).bytes(PLAN.payload_bytes)  # as another machine computed it
        codec.seal(memoryview(raw), name, NS)
        slow.again = {3}
        slow.others = {3: bytearray(codec.encode(memoryview(raw), name, NS, coding).body)}
        with await kv.get_on_device(NS, SHARD, LINKS, early=True) as blocks:
            assert await asyncio.wait_for(blocks.arrived(0), 20) == len(LINKS)
            slow.go.set()
            assert await asyncio.wait_for(blocks.arrived(), 20) == 3
            assert blocks.miss == "unavailable"
        with await kv.get_on_device(NS, SHARD, LINKS) as blocks:  # from memory, whole
            assert len(blocks) == 6
            assert layer_bytes(blocks.leases[3], 0) == bytes(raw[PLAN.header_bytes :][: PLAN.offsets[PLAN.per_layer]])


async def test_who_lets_go_early_stops_it_and_leaves_nothing(coding):
    async with opened(coding) as (kv, _, above):
        blocks = await kv.get_on_device(NS, SHARD, LINKS, early=True)
        assert await asyncio.wait_for(blocks.arrived(0), 20) == len(LINKS)
        blocks.release()
        blocks.release()
        await until(lambda: not above.tier.used)
        assert above.tier.contains_many([codec_name(link).tier_key for link in LINKS]) == [False] * 6
        await all_let_go(above)


async def test_another_thread_waits_for_a_layer_and_this_loop_must_not(coding):
    async with opened(coding) as (kv, slow, _):
        with await kv.get_on_device(NS, SHARD, LINKS, early=True) as blocks:
            assert await asyncio.to_thread(blocks.wait_layer, 0) == len(LINKS)
            with pytest.raises(RuntimeError, match="arrived"):
                blocks.wait_layer(1)
            slow.go.set()
            assert await asyncio.to_thread(blocks.wait_layer) == len(LINKS)


async def test_the_room_of_the_device_bounds_what_is_read(coding):
    async with opened(coding) as (kv, slow, above):
        with await kv.get_on_device(NS, SHARD, LINKS[:0], early=True) as nothing:
            assert (len(nothing), await nothing.arrived()) == (0, 0)
        above.tier._pool._budget.limit = 4 * PLAN.raw_bytes
        with await kv.get_on_device(NS, SHARD, LINKS, early=True) as blocks:
            assert (len(blocks), blocks.miss) == (4, "full")
            slow.go.set()
            assert await asyncio.wait_for(blocks.arrived(), 20) == 4
        assert slow.reads == 4
