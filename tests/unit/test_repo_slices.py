"""A commit of very many blocks leaves the event loop to others all the time."""

import asyncio

from kvstore.ids import BlockName, Shard, chain
from kvstore.model import Copy
from kvstore.repo import Proposal
from kvstore.repo.slices import SLICE, sliced
from kvstore.repo.testing import ONE_SHARD, tiny

NS = tiny()


async def test_items_are_done_in_order_and_others_run_between_slices():
    seen = []

    async def other():
        while True:
            seen.append("other")
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    done = await sliced(lambda some: seen.append(len(some)) or [item + 1 for item in some], range(2 * SLICE + 3))
    running.cancel()
    assert done == list(range(1, 2 * SLICE + 4))
    assert seen == [SLICE, "other", SLICE, "other", 3]


async def test_a_large_commit_gives_others_their_turn(repo, shelf):
    """Every block is known to be stored, so that nothing but the loop is used. Turns are counted, not timed."""
    links = chain(NS, range(4 * 40 * SLICE))
    for link in links:
        repo.uploads.learn(BlockName(NS.id, Shard(), link.prefix_id, link.tokens), Copy(0, 1, 4096, 200))
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    for base, count in enumerate((len(links), len(links) - 1)):
        turns = 0
        proposal = Proposal(namespace=NS, base=base, links=tuple(links[:count]), shards=ONE_SHARD)
        receipt = await repo.commit("default", "s", "", proposal, shelf)
        assert (receipt.version, receipt.blocks, receipt.cut) == (base + 1, count, False)
        assert turns > 3 * 40
    running.cancel()
