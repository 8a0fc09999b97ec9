"""A commit of very many blocks leaves the event loop to others all the time."""

import asyncio
from functools import partial

import msgspec
import pytest

from kvstore.errors import Corrupt
from kvstore.ids import BlockName, Shard, chain
from kvstore.model import BlockRef, Copy, Manifest, sealed
from kvstore.objects.base import CREATE
from kvstore.repo import Proposal
from kvstore.repo.manifests import Manifests, pack
from kvstore.repo.slices import SLICE, sliced
from kvstore.repo.testing import ONE_SHARD, inline, tiny

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


KEY = "r/manifests/default/" + "f" * 32 + "/0000000001-" + "a" * 32


def manifest_of(links):
    refs = tuple(BlockRef(link.prefix_id, link.tokens, (Copy(0, 1, 4096, 200),)) for link in links)
    tokens = sum(link.tokens for link in links)
    return Manifest(namespace=NS.id, shards=ONE_SHARD, block_tokens=4, tokens=tokens, labels={"a": "b"}, created=1.5, blocks=refs)


async def test_a_large_manifest_is_taken_apart_while_others_have_their_turn(repo, memory):
    manifest = manifest_of(chain(NS, range(4 * 20 * SLICE)))
    await memory.put(KEY, pack(manifest, KEY), CREATE)
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    assert await Manifests(repo.root, 1, inline).get(KEY) == manifest
    running.cancel()
    assert turns >= 19


def _renamed(manifest, index):
    """A block with a name that is none."""
    ref = msgspec.structs.replace(manifest.blocks[index], prefix_id="z" * 64)
    return msgspec.structs.replace(manifest, blocks=(*manifest.blocks[:index], ref, *manifest.blocks[index + 1 :]))


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (partial(_renamed, index=0), "not a valid Manifest"),
        (partial(_renamed, index=3 * SLICE), "not a valid Manifest"),
        (lambda manifest: msgspec.structs.replace(manifest, tokens=3), "not the sum"),
        (lambda manifest: msgspec.structs.replace(manifest, blocks=manifest.blocks * 14), "more than"),
    ],
)
async def test_a_large_manifest_is_checked_as_a_small_one_is(repo, memory, broken, why):
    manifest = broken(manifest_of(chain(NS, range(4 * 20 * SLICE))))
    await memory.put(KEY, sealed(msgspec.json.encode(manifest), Manifest, KEY), CREATE)
    with pytest.raises(Corrupt, match=why):
        await Manifests(repo.root, 1, inline).get(KEY)
