"""A node that serves 400 blocks to its peers until it is killed. Says its name and port."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.mesh_peers import mesh_node, wants_of


async def main():
    async with mesh_node("a", dram=256 << 20) as node:
        node.put(wants_of(400))
        print("a", node.peering.address[1], flush=True)  # noqa: T201  it is read by the test
        await asyncio.to_thread(sys.stdin.read)  # or until whoever started it is gone


asyncio.run(main())
