"""Connections of the HTTP face: how many there are, and how long one is kept that asks for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from kvstore.server.limits import Limits
from kvstore.server.problems import Handler

_KEEP_S: Final = 75.0  # between two requests, as servers usually do
_LOOK_S: Final = 0.5  # longest time between two looks
_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Visitors:
    """Bounds on who is connected. Without them a client that never ends its first line takes a descriptor for ever.

    Args:
        limits: There may be two connections for each of `requests`, so that one too many can still be told so; `hello` is the time
            for a first request to arrive.
    """

    def __init__(self, limits: Limits) -> None:
        self._most, self._hello_s = 2 * limits.requests, float(limits.hello)
        self._served: set[web.RequestHandler] = set()
        self._quiet: dict[web.RequestHandler, tuple[float, float]] = {}  # since when, and how long it may be

    def middleware(self) -> Middleware:
        """Notices who asks for something."""

        @web.middleware
        async def notice(request: web.Request, handler: Handler) -> web.StreamResponse:
            visitor = request.protocol
            self._served.add(visitor)
            try:
                return await handler(request)
            finally:
                self._served.discard(visitor)
                self._quiet[visitor] = (asyncio.get_running_loop().time(), _KEEP_S)

        return notice

    def entrance(self, server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
        """What to make of a new connection."""
        return lambda: server() if len(server.connections) < self._most else _TurnedAway()

    async def watch(self, server: web.Server) -> None:
        """Close those that are quiet for too long. Runs until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            here = server.connections
            for visitor in here:
                since, patience = self._quiet.setdefault(visitor, (clock(), self._hello_s))
                if visitor not in self._served and clock() - since > patience:
                    visitor.force_close()
            for gone in self._quiet.keys() - set(here):
                del self._quiet[gone]
            await asyncio.sleep(min(_LOOK_S, self._hello_s))


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        with suppress(OSError):
            transport.write(_FULL)
        transport.close()
