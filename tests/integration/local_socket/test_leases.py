"""Leases end with whoever held them: released, cancelled or killed."""

import asyncio
import gc
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
from fakes.node import SHARD, filler, links_of, pattern, payload_of, until
from fakes.raw_socket import LIMITS, NS, leased, url

import kvstore
from kvstore import wire
from kvstore.server.local import LocalServer


def descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings():
    return Path("/proc/self/maps").read_text().count("kvtier-window")


async def test_leases_of_a_killed_client_are_released(server, service, path):
    links = links_of(NS, 4)
    async with kvstore.open(url(path)) as kv:
        await kv.put(NS, SHARD, links, filler(links))
    script = (
        "import sys, time, kvstore\n"
        "from fakes.node import SHARD, links_of, namespace\n"
        f"kv = kvstore.open_sync({url(path)!r})\n"
        "blocks = kv.get(namespace(), SHARD, links_of(namespace(), 4))\n"
        "print(len(blocks), flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.Popen(  # noqa: ASYNC220  it starts at once
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment
    )
    try:
        assert await asyncio.to_thread(child.stdout.readline) == b"4\n"
        assert (leased(service), server.leases, server.connections) == (4, 4, 1)
        child.send_signal(signal.SIGKILL)
        await until(lambda: leased(service) == 0)
        await until(lambda: server.connections == 0)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


async def test_what_a_killed_client_published_is_kept(raw, service, server):
    client = await raw()
    service.plane.namespaces[NS.id] = NS
    link = links_of(NS, 1)[0]
    with mmap.mmap(client.fds[1], 4 << 20) as window:
        window[:65600] = pattern(link, 65600)
    await until(lambda: server.connections == 1)
    client.send(wire.Publish(1, NS.id, str(SHARD), bytes.fromhex(link.prefix_id), [(16, 0, 65600)]))
    client.close()
    await until(lambda: server.connections == 0)
    [lease], _ = await service.plane.get("default", NS.id, SHARD, [link], deadline_ms=0, reach="dram")
    assert payload_of(NS, lease) == pattern(link, 65600)
    lease.release()


async def test_a_connection_holds_a_bounded_number_of_leases(service, path):
    async with LocalServer.open(service, path, limits=msgspec.structs.replace(LIMITS, leases=3)), kvstore.open(url(path)) as kv:
        links = links_of(NS, 5)
        await kv.put(NS, SHARD, links, filler(links))
        first = await kv.get(NS, SHARD, links)
        assert (len(first), first.miss) == (3, "full")
        with await kv.get(NS, SHARD, links) as second:
            assert (len(second), second.miss) == (0, "full")
        first.release()
        with await kv.get(NS, SHARD, links[:3]) as third:
            assert (len(third), third.miss) == (3, "")


async def test_a_lease_is_released_once_however_often_it_is_asked(server, service, path):
    async with kvstore.open(url(path)) as kv:
        links = links_of(NS, 2)
        await kv.put(NS, SHARD, links, filler(links))
        blocks, others = await kv.get(NS, SHARD, links), await kv.get(NS, SHARD, links)
        first = blocks.leases[0]
        for _ in range(3):
            first.release()
            blocks.release()
        await until(lambda: leased(service) == 2)
        others.release()
        await until(lambda: leased(service) == 0)


async def test_b47_500_cancels_leave_nothing(server, service, path):
    links = links_of(NS, 3)
    async with kvstore.open(url(path)) as kv:
        await kv.put(NS, SHARD, links, filler(links))
        (await kv.get(NS, SHARD, links)).release()
        gc.collect()
        before = descriptors()
        for round_ in range(50):
            service.plane.gate = asyncio.Event() if round_ % 2 else None
            running = [asyncio.create_task(kv.get(NS, SHARD, links)) for _ in range(6)]
            running += [asyncio.create_task(kv.put(NS, SHARD, links, filler(links))) for _ in range(2)]
            running += [asyncio.create_task(kv.get_restore("none", wait_ms=1000)), asyncio.create_task(kv.stats())]
            for _ in range(round_ % 5):
                await asyncio.sleep(0)
            for task in running:
                task.cancel()
            for outcome in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(outcome, kvstore.Blocks):
                    outcome.release()
        service.plane.gate = None
        await until(lambda: leased(service) == 0)
        assert await kv.put(NS, SHARD, links, filler(links)) == [True] * 3
        with await kv.get(NS, SHARD, links) as blocks:
            assert len(blocks) == 3
        connection = kv._transport._connection
        await until(lambda: connection.space._extents._free == [(0, 4 << 20)])
        await until(lambda: connection._waiting == {})
        assert connection._slots._value == wire.MAX_IN_FLIGHT
        assert descriptors() <= before
    await until(lambda: server.connections == 0)


async def test_opening_and_closing_leaves_no_descriptor_and_no_mapping(server, path):
    async def once():
        async with kvstore.open(url(path)) as kv:
            await kv.health()

    await once()
    await until(lambda: server.connections == 0)
    before = descriptors(), mappings()
    for _ in range(20):
        await once()
    await until(lambda: server.connections == 0)
    assert (descriptors(), mappings()) == before
