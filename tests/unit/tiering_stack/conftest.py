"""A hierarchy over real tiers and scripted origins."""

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from fakes.stack import MIB, Rig

from tiering import DiskTier, DramTier, Movers, Stack, StackSettings
from tiering.testing import ScriptedOrigin


@pytest.fixture
def rig(tmp_path):
    @asynccontextmanager
    async def build(dram=4 * MIB, disk=4 * MIB, origins=1, **settings):
        async with AsyncExitStack() as parts:
            movers = await parts.enter_async_context(Movers.open())
            memory = await parts.enter_async_context(DramTier.open("dram", dram, movers))
            slab = await parts.enter_async_context(DiskTier.open(tmp_path / "tier", disk, movers)) if disk else None
            scripted = [ScriptedOrigin(f"origin{i}" if i else "bucket") for i in range(origins)]
            stack = await parts.enter_async_context(Stack.open(memory, slab, scripted, StackSettings(**settings)))
            rig = Rig(stack, scripted)
            rig.folder = tmp_path / "tier"
            yield rig
        assert memory.leases == 0

    return build
