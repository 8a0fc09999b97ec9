"""What a node publishes of its tiers, as the mesh's own subscriber hears it."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
import zmq
from fakes.mesh_peers import NS, block, wants_of
from fakes.node import until

from kvstore.clock import SystemClock
from kvstore.errors import Invalid
from kvstore.ids import Link, Shard
from kvstore.mesh import publishing
from kvstore.mesh.listening import Listener
from tiering import DiskTier, DramTier, Movers

CLOCK, ANY = SystemClock(), "tcp://127.0.0.1:0"


class Following(Listener):
    """As a router listens; and it keeps what was said: by (block, medium) whether it is there."""

    def __init__(self, publisher):
        super().__init__(*where(publisher), self)
        self.said, self.held, self.sessions = [], set(), {}

    def apply(self, batch):
        assert not batch.unknown

    def forget(self):
        self.held.clear()

    def _apply(self, payload):
        super()._apply(payload)
        for event in msgspec.msgpack.decode(payload)[1]:
            self.said.append(event)
            names = {(name.hex(), event.get("medium")) for name in event.get("block_hashes", ())}
            if event["type"] == "BlockStored":
                self.held |= names
                for before, name in zip([event["parent_block_hash"], *event["block_hashes"]], event["block_hashes"], strict=False):
                    if event["session_id"]:
                        self.sessions[name.hex()] = (event["session_id"], before and before.hex())
            else:
                self.held = self.held - names if names else set()


def where(publisher):
    return [each.getsockopt_string(zmq.LAST_ENDPOINT) for each in (publisher._sockets._pub, publisher._sockets._replay)]


@asynccontextmanager
async def published(folder=None, dram=8 << 20):
    async with AsyncExitStack() as life:
        publisher = await life.enter_async_context(publishing.Publisher.open(ANY, ANY, (), CLOCK))
        movers = await life.enter_async_context(Movers.open())
        memory = await life.enter_async_context(DramTier.open("dram", dram, movers))
        publisher.hear(memory, "DRAM")
        disk = await life.enter_async_context(DiskTier.open(folder, 32 << 20, movers)) if folder else None
        if disk is not None:
            publisher.hear(disk, "NVME")
        yield publisher, memory, disk


@asynccontextmanager
async def followed(publisher):
    following = Following(publisher)
    tasks = [asyncio.create_task(each()) for each in (*publisher.work.values(), following.run)]
    try:
        await until(lambda: following.heard.batches)
        yield following
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def put(tier, wants):
    await tier.put_many([(each, memoryview(block(each))) for each in wants])


def names(wants, medium):
    return {(each.ref.name.prefix_id, medium) for each in wants}


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """A subscription takes a moment, in which nothing is heard: so something is said often."""
    monkeypatch.setattr(publishing, "_TELL_S", 0.01)
    monkeypatch.setattr(publishing, "_QUIET_S", 0.02)


async def test_a_subscriber_that_comes_late_hears_what_comes_goes_and_grows(tmp_path):
    wants = wants_of(4)
    async with published(tmp_path, dram=1 << 20) as (publisher, memory, disk):
        await put(memory, wants[:2])
        async with followed(publisher) as following:
            await until(lambda: following.held == names(wants[:2], "DRAM"))
            assert following.said[0] == {"type": "AllBlocksCleared"}
            await put(disk, wants[:1])
            await until(lambda: following.held == names(wants[:2], "DRAM") | names(wants[:1], "NVME"))
            memory.discard_many([wants[0].key])
            await until(lambda: following.held == names(wants[1:2], "DRAM") | names(wants[:1], "NVME"))
            links = [Link(each.ref.name.prefix_id, each.ref.name.tokens) for each in wants[:2]]
            publisher.grown("s", NS.id, [str(Shard())], links)
            first, second = (link.prefix_id for link in links)
            await until(lambda: following.sessions == {first: ("s", None), second: ("s", first)})
            said = following.said[-1]
            assert (said["block_size"], said["token_ids"], said["namespace"], said["ownership"]) == (128, [], NS.id, "kvtier")


async def test_what_a_disk_has_of_an_earlier_life_is_told_of_once_it_is_read(tmp_path):
    wants = wants_of(2)
    async with Movers.open() as movers, DiskTier.open(tmp_path, 32 << 20, movers) as disk:
        await put(disk, wants)
    async with published(tmp_path) as (publisher, memory, _), followed(publisher) as following:
        await put(memory, wants[:1])
        await until(lambda: following.held == names(wants[:1], "DRAM") | names(wants[:1], "NVME"))


async def test_a_gap_is_repaired_by_replay():
    async with published() as (publisher, memory, _), followed(publisher) as following:
        await put(memory, wants_of(1))
        await until(lambda: following.held)
        say, publisher._sockets.say = publisher._sockets.say, lambda number, payload: None
        await put(memory, wants_of(3))
        number = publisher._number
        await until(lambda: publisher._number > number + 2)  # said, and on its way to nobody
        assert following.held == names(wants_of(1), "DRAM")
        publisher._sockets.say = say
        await until(lambda: following.held == names(wants_of(3), "DRAM"))
        assert following.heard.gaps == 1
        assert following.heard.forgotten == 0


async def test_too_much_at_once_is_a_gap_that_is_seen_and_then_all_is_told_anew(monkeypatch):
    monkeypatch.setattr(publishing, "_QUEUE", 4)
    async with published() as (publisher, memory, _), followed(publisher) as following:
        await put(memory, wants_of(2))
        await until(lambda: following.held == names(wants_of(2), "DRAM"))
        wants = wants_of(20, 7)
        for each in [*wants, *wants_of(2)[:1]]:  # in one go: nobody is told in between
            slot = memory.reserve(each)
            slot.view[:] = block(each)
            slot.commit().release()
        memory.discard_many([wants_of(2)[1].key])
        assert publisher.counts["dropped"] == 17
        await until(lambda: following.held == names(wants_of(1), "DRAM"))  # those that were dropped have no names
        assert following.heard.gaps == 1
        memory.discard_many([wants[0].key])
        await put(memory, wants[:1])  # read again
        await until(lambda: following.held == names([*wants_of(1), wants[0]], "DRAM"))


async def test_nobody_beyond_this_host_without_networks_and_none_but_they_with(monkeypatch):
    with pytest.raises(Invalid, match="beyond this host"):
        async with publishing.Publisher.open("tcp://0.0.0.0:0", "", (), CLOCK):
            pass
    opening = publishing.Publisher.open(ANY, ANY, ("10.0.0.0/8",), CLOCK)
    async with opening as publisher:
        following = Following(publisher)
        tasks = [asyncio.create_task(each()) for each in (*publisher.work.values(), following.run)]
        await until(lambda: publisher.counts["refused"])
        assert not following.heard.batches
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
