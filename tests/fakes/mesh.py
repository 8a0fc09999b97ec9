"""Members of a mesh on a directory, for tests."""

import asyncio
import hashlib
from contextlib import AsyncExitStack, asynccontextmanager

from valkey.asyncio import Valkey

from kvstore.clock import RandomIds, SystemClock
from kvstore.directory_url import DirectoryUrl
from kvstore.mesh.inventory import Inventory, InventorySettings
from kvstore.mesh.valkey import ValkeyDirectory, ValkeySettings
from tiering import DramTier, Movers
from tiering.testing import value_of, want_of

CLOCK = SystemClock()
SIZE = 4096
KEYS = [hashlib.sha256(str(n).encode()).digest() for n in range(700)]


@asynccontextmanager
async def raw(server):
    """The server, without anything in between."""
    client = Valkey(port=server.port)
    try:
        yield client
    finally:
        await client.aclose()


class Node:
    """A member with a directory and, where it has a tier, an inventory. `crash` ends it without a word."""

    def __init__(self, directory, inventory):
        self.directory, self.inventory = directory, inventory
        loops = [directory.keep, directory.tell, *([inventory.tell, inventory.repair] if inventory else [])]
        self.tasks = [asyncio.create_task(loop()) for loop in loops]

    async def crash(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def names(self):
        return [member.node for member in self.directory.members()]

    async def holders(self, keys):
        return [tuple(sorted(member.node for member in holders)) for holders in await self.directory.locate(keys)]


@asynccontextmanager
async def opened(server, name, tiers=(), *, url="", environ=None, **settings):
    settings = ValkeySettings(**{"renew_s": 0.1, "lease_s": 10.0, "write_s": 0.01, **settings})
    async with AsyncExitStack() as lifetime:
        where = DirectoryUrl.parse(url or server.url)
        opening = ValkeyDirectory.open(
            where, name, f"host-{name}", 7, settings, clock=CLOCK, ids=RandomIds(), environ=environ or {}
        )
        directory = await lifetime.enter_async_context(opening)
        inventory = None
        if tiers:
            movers = await lifetime.enter_async_context(Movers.open())
            pace = InventorySettings(tell_s=0.01, share=1.0)
            inventory = await lifetime.enter_async_context(Inventory.open(tiers, directory, movers.run, CLOCK, pace))
        node = Node(directory, inventory)
        lifetime.push_async_callback(node.crash)
        yield node


@asynccontextmanager
async def memory(count):
    async with Movers.open() as movers, DramTier.open("dram", 64 * SIZE, movers) as tier:
        await put(tier, range(count))
        yield tier


async def put(tier, numbers):
    await tier.put_many([(want_of(n, SIZE), memoryview(value_of(n, SIZE))) for n in numbers])


async def until(condition):
    """Wait until it is true. pytest's own limit says when it never will be."""
    while True:
        outcome = condition()
        if await outcome if asyncio.iscoroutine(outcome) else outcome:
            return
        await asyncio.sleep(0.02)


async def until_holders(node, keys, expected):
    """Until look-ups say so. An answer of nothing is allowed in between."""

    async def said():
        return await node.holders(keys) == expected

    await until(said)
