"""Streams of events, callers that leave, and a server that stops."""

import asyncio
import json

import aiohttp
import pytest
from fakes.http_face import LIMITS, NS, block_path
from fakes.node import until
from yarl import URL

import kvstore
from kvstore import api
from kvstore.errors import Unavailable
from kvstore.server.app import HttpServer


async def each_event(response):
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def events_of(response):
    return [event async for event in each_event(response)]


async def test_a_restores_progress_is_a_stream_that_ends_with_it(server, service):
    begun = await service.restore("default", api.Restore(id="x"))
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/v1/restores/{begun.restore_id}/events") as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        seen = []
        async for event in each_event(response):  # the next state only once this one was seen: states in between may be left out
            seen.append(event["state"])
            if event["state"] == "resolving":
                await service.advance(begun.restore_id, state="staging", version=2)
            elif event["state"] == "staging":
                await service.advance(begun.restore_id, state="ready")
        assert seen == ["resolving", "staging", "ready"]


async def test_events_of_an_unknown_restore_are_404(http):
    response, problem = await http("GET", "/v1/restores/none/events")
    assert (response.status, problem["kind"]) == (404, "not_found")


async def test_a_commit_goes_on_when_its_client_goes_away(service, server):
    begun, finish, done = asyncio.Event(), asyncio.Event(), []

    async def commit(tenant, request):
        begun.set()
        await finish.wait()
        done.append(request.id)
        return api.Done()

    service.answers["commit"] = commit
    async with aiohttp.ClientSession() as session:
        body = {"base_version": 0, "blocks": []}
        asking = asyncio.create_task(session.post(server.url + "/v1/sessions/s/commit", json=body))
        await begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await asyncio.sleep(0.02)
    finish.set()
    await until(lambda: done == ["s"])


async def test_a_read_ends_when_its_client_goes_away(service, server, link):
    service.plane.gate = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.get(URL(server.url + block_path(link), encoded=True)))
        await until(lambda: service.plane.waiting == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: service.plane.waiting == 0)


async def test_a_stop_finishes_changes_and_cuts_reads_short(service):
    release = asyncio.Event()

    async def commit(tenant, request):
        await release.wait()
        return api.Receipt(id=request.id, namespace=NS.id, lane="main", version=5, tokens=0, blocks=0, durability="bucket")

    service.answers["commit"] = commit
    opened = HttpServer.open(service, "127.0.0.1:0", limits=LIMITS)
    server = await opened.__aenter__()
    async with kvstore.open(server.url.replace("http", "kvtier")) as kv, aiohttp.ClientSession() as session:
        begun = await kv.restore("x")
        committing = asyncio.create_task(kv.commit("s", namespace=NS.id, base_version=4, blocks=[]))
        waiting = asyncio.create_task(kv.get_restore(begun.restore_id, wait_ms=60_000))
        response = await session.get(f"{server.url}/v1/restores/{begun.restore_id}/events")
        await until(lambda: {"commit", "get_restore"} <= {name for _, name, _ in service.calls})
        closing = asyncio.create_task(opened.__aexit__(None, None, None))
        with pytest.raises(Unavailable, match="stopping"):
            await waiting
        assert [event["state"] for event in await events_of(response)] == ["resolving"]
        release.set()
        assert (await committing).version == 5
        await closing
        with pytest.raises(Unavailable, match="no node listens"):
            await kv.health()
