"""`/v1/restores/{restore_id}/events`: a restore's progress as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from aiohttp import web

from kvstore import api
from kvstore.server.auth import access_of, needs
from kvstore.server.ports import Service
from kvstore.server.routes import pattern

PATH: Final = "/v1/restores/{restore_id}/events"
HEARTBEAT_S: Final = 15.0  # proxies cut what is silent for long


def event_route(service: Service, stopping: asyncio.Event) -> web.RouteDef:
    """The stream ends with the restore, with its reader, or when the server stops."""

    @needs("read")
    async def handle(request: web.Request) -> web.StreamResponse:
        changes = service.watch(access_of(request).tenant, request.match_info["restore_id"])
        change = await anext(changes)  # a restore that does not exist is a 404, not a stream
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        await response.write(_event(change))
        await _forward(changes, response, stopping)
        await response.write_eof()
        return response

    return web.get(pattern(PATH), handle, allow_head=False, name="restore_events")


async def _forward(changes: AsyncIterator[api.RestoreStatus], response: web.StreamResponse, stopping: asyncio.Event) -> None:
    end = asyncio.create_task(stopping.wait())
    following: asyncio.Task[api.RestoreStatus | None] = asyncio.create_task(_next(changes))
    try:
        while True:
            await asyncio.wait((following, end), timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                return
            if not following.done():
                await response.write(b":\n\n")
                continue
            change = following.result()
            if change is None:
                return
            await response.write(_event(change))
            following = asyncio.create_task(_next(changes))
    finally:
        for task in (end, following):
            task.cancel()
        await asyncio.gather(end, following, return_exceptions=True)


async def _next(changes: AsyncIterator[api.RestoreStatus]) -> api.RestoreStatus | None:
    return await anext(changes, None)


def _event(status: api.RestoreStatus) -> bytes:
    return b"event: " + status.state.encode() + b"\ndata: " + msgspec.json.encode(status) + b"\n\n"
