"""A node that stops, vanishes or comes back: what its clients are told."""

import asyncio

import msgspec
import pytest
from fakes.node import SHARD, fake_service, filler, links_of, payload_of, until
from fakes.raw_socket import LIMITS, NS, url

import kvstore
from kvstore import api
from kvstore.errors import Closed, NotFound, Unavailable
from kvstore.server.local import LocalServer


async def test_a_stop_answers_what_was_accepted(service, path):
    release = asyncio.Event()

    async def commit(tenant, request):
        await release.wait()
        return api.Receipt(id=request.id, namespace=NS.id, lane="main", version=5, tokens=0, blocks=0, durability="bucket")

    service.answers["commit"] = commit
    opened = LocalServer.open(service, path, limits=LIMITS)
    await opened.__aenter__()
    async with kvstore.open(url(path)) as kv:
        begun = await kv.restore("x")
        commit_ = asyncio.create_task(kv.commit("s", namespace=NS.id, base_version=4, blocks=[]))
        wait = asyncio.create_task(kv.get_restore(begun.restore_id, wait_ms=60_000))
        await until(lambda: len(service.calls) >= 3)
        closing = asyncio.create_task(opened.__aexit__(None, None, None))
        with pytest.raises(Unavailable, match="stopping"):
            await wait
        release.set()
        assert (await commit_).version == 5
        await closing
        with pytest.raises(Unavailable):
            await kv.health()


async def test_a_stop_is_bounded_and_says_that_the_outcome_is_unknown(service, path):
    async def commit(tenant, request):
        await asyncio.Event().wait()

    service.answers["commit"] = commit
    opened = LocalServer.open(service, path, limits=msgspec.structs.replace(LIMITS, drain=0.05))
    await opened.__aenter__()
    async with kvstore.open(url(path)) as kv:
        running = asyncio.create_task(kv.commit("s", namespace=NS.id, base_version=4, blocks=[]))
        await until(lambda: service.calls)
        await opened.__aexit__(None, None, None)
        with pytest.raises(Unavailable) as caught:
            await running
        assert caught.value.kind == "outcome_unknown"


async def test_a_node_that_vanishes_leaves_it_open_whether_a_change_was_made(path):
    links = links_of(NS, 1)
    never = asyncio.Event()
    async with fake_service() as service:

        async def hangs(tenant, request):
            await never.wait()

        service.answers["commit"] = service.answers["get_session"] = hangs
        opened = LocalServer.open(service, path, limits=LIMITS)
        server = await opened.__aenter__()
        async with kvstore.open(url(path)) as kv:
            await kv.put(NS, SHARD, links, filler(links))
            running = [
                asyncio.create_task(kv.commit("s", namespace=NS, base_version=0, blocks=links)),
                asyncio.create_task(kv.get_session("s")),
            ]
            await until(lambda: {"commit", "get_session"} <= {name for _, name, _ in service.calls})
            for connection in server._connections:
                connection.abort()
            errors = await asyncio.gather(*running, return_exceptions=True)
            assert [error.kind for error in errors] == ["outcome_unknown", "unavailable"]
        never.set()
        await opened.__aexit__(None, None, None)


async def test_a_client_connects_again_to_a_node_that_was_restarted(path):
    links = links_of(NS, 2)
    async with fake_service() as first:
        opened = LocalServer.open(first, path, limits=LIMITS)
        await opened.__aenter__()
        kv = await kvstore.connect(url(path))
        await kv.put(NS, SHARD, links, filler(links))
        held = await kv.get(NS, SHARD, links)
        assert held.intact
        await opened.__aexit__(None, None, None)
        await until(lambda: not held.intact)
        assert payload_of(NS, held.leases[0])  # still mapped: reading it ends no process
        held.release()
        with pytest.raises(Unavailable):
            await kv.get(NS, SHARD, links)
    async with fake_service() as second, LocalServer.open(second, path, limits=LIMITS):
        await asyncio.sleep(0.6)  # failed attempts are not repeated for half a second
        with await kv.get(NS, SHARD, links) as blocks:  # the namespace was said again by itself
            assert (len(blocks), blocks.miss) == (0, "absent")
        assert await kv.put(NS, SHARD, links, filler(links)) == [True, True]
        await kv.aclose()
    with pytest.raises(Closed):
        await kv.health()


async def test_a_namespace_that_cannot_be_said_again_is_an_error_of_the_call(server, service, path):
    async with kvstore.open(url(path)) as kv:
        links = links_of(NS, 1)
        await kv.put(NS, SHARD, links, filler(links))
        service.plane.namespaces.clear()
        with pytest.raises(NotFound):
            (await kv.get(NS, SHARD, links)).release()
