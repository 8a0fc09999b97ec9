"""The HTTP face of a node. Without access tokens it listens on loopback only, and refuses requests for another host's name."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Self
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from kvstore import api
from kvstore.clock import Clock, RandomIds, SystemClock
from kvstore.config import AuthSettings, TlsSettings, is_loopback, parse_address
from kvstore.errors import AlreadyExists, Denied, Invalid, Overloaded
from kvstore.fairness import Shares
from kvstore.server.auth import ACCESS, access_of, authenticated, begun, check_exposed, needs
from kvstore.server.console import console_routes
from kvstore.server.events import event_route
from kvstore.server.inflight import InFlight
from kvstore.server.keyring import Door, door
from kvstore.server.limits import STANDARD, Limits
from kvstore.server.logs import logged, name_request
from kvstore.server.metrics import Metrics
from kvstore.server.ports import Service
from kvstore.server.problems import Handler, problems
from kvstore.server.routes import call_routes
from kvstore.server.streams import Blocks
from kvstore.server.tls import renew, server_context
from kvstore.server.visitors import Visitors
from kvstore.service.supervisor import Supervisor

log = logging.getLogger(__name__)
_KEEPING: Final = "tokens"
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class HttpServer:
    """Serves the HTTP API. Make one with `open`.

    Attributes:
        url: Where it listens, such as `http://127.0.0.1:7878`.
    """

    def __init__(self, url: str, listener: asyncio.Server, who: Door) -> None:
        self.url, self._who = url, who
        self._listener = listener  # uvloop stops accepting when nobody holds it

    def wrong(self) -> str:
        """Why it does not go by its file of tokens as that is now; "" where it does."""
        return self._who.wrong

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        service: Service,
        listen: str = "127.0.0.1:7878",
        *,
        limits: Limits = STANDARD,
        metrics: Metrics | None = None,
        auth: AuthSettings | None = None,
        tls: TlsSettings | None = None,
        clock: Clock | None = None,
        background: Supervisor | None = None,
    ) -> AsyncIterator[Self]:
        """Listen until the end of the block; then answer what was accepted, within `limits.drain`.

        Args:
            service: The node.
            listen: `host:port`; port 0 takes a free one.
            limits: Bounds.
            metrics: Where requests are counted, and what `/metrics` shows besides the node's statistics.
            auth: Who may come; by default whoever is on this host.
            tls: Certificates; by default none.
            clock: Tokens expire by it; the system's by default.
            background: Keeps what it does besides answering going, and counts its failures; its own by default.

        Raises:
            Invalid: Others reach the address, and `auth` and `tls` do not say who may come and how; or a file of theirs is not fit.
            AlreadyExists: The port is taken.
        """
        host, port = parse_address(listen)
        auth, tls = auth or AuthSettings(), tls or TlsSettings()
        check_exposed(host, port, auth, tls, field="node.listen")
        clock = clock or SystemClock()
        context, who, background = server_context(tls), door(auth, clock), background or Supervisor(clock, RandomIds())
        in_flight, visitors = InFlight(), Visitors(limits)
        # Where nobody shows a token, a page in this host's browser could ask for whoever sits there.
        bound = host if not auth.tokens_file and is_loopback(host) else ""
        app = application(service, in_flight, limits, metrics or Metrics(), who, visitors, bound=bound)
        # A handler is cancelled when its client goes away; `in_flight` knows what must go on all the same.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=float(limits.drain), handler_cancellation=True)
        await runner.setup()
        try:
            background.run(_KEEPING, who.keep)
            async with _listening(runner, visitors, host, port, limits, context) as listener, _renewing(context, tls):
                taken = listener.sockets[0].getsockname()[1]
                scheme = "http" if context is None else "https"
                yield cls(f"{scheme}://{f'[{host}]' if ':' in host else host}:{taken}", listener, who)
        finally:
            in_flight.stop()
            await background.stop([_KEEPING])
            await runner.cleanup()
            await in_flight.drain(limits.drain)


@asynccontextmanager
async def _listening(
    runner: web.AppRunner, visitors: Visitors, host: str, port: int, limits: Limits, context: ssl.SSLContext | None
) -> AsyncIterator[asyncio.Server]:
    server = runner.server
    assert server is not None
    patience = float(limits.hello) if context is not None else None
    try:
        listener = await asyncio.get_running_loop().create_server(
            visitors.entrance(server), host, port, ssl=context, ssl_handshake_timeout=patience
        )
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise Invalid(f"node.listen is '{host}:{port}': {error.strerror}") from None
        raise AlreadyExists(f"{host}:{port} is in use", remedy="stop what listens there, or set another [node] listen") from None
    watching = asyncio.create_task(visitors.watch(server))
    try:
        yield listener
    finally:
        listener.close()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@asynccontextmanager
async def _renewing(context: ssl.SSLContext | None, tls: TlsSettings) -> AsyncIterator[None]:
    task = None if context is None else asyncio.create_task(renew(context, tls))
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def application(
    service: Service, in_flight: InFlight, limits: Limits, metrics: Metrics, who: Door, visitors: Visitors, *, bound: str
) -> web.Application:
    """The routes behind the checks that every request passes.

    Args:
        service: The node.
        in_flight: What is worked on.
        limits: Bounds.
        metrics: Counts.
        who: Tells who asks.
        visitors: Connections.
        bound: The address, where only requests for this host's own names are taken; "" where any name may be its own.
    """
    own = [_host_check(bound)] if bound else []
    checks = [logged(RandomIds()), visitors.middleware(), problems, *own, authenticated(who, metrics.observe), _at_most(limits)]
    app = web.Application(middlewares=checks, client_max_size=limits.body)
    app.on_response_prepare.extend([begun, name_request])
    app.add_routes(call_routes(service, in_flight, limits, metrics.observe))
    app.add_routes(Blocks(service, in_flight, limits, metrics.observe).routes())
    app.add_routes([event_route(service, in_flight.stopping), web.get("/metrics", _metrics(service, metrics), name="metrics")])
    app.add_routes(console_routes("node"))
    return app


def _host_check(bound: str) -> Middleware:
    """A page whose name was made to resolve to this machine sends that name: its requests are refused."""
    allowed = _LOCAL_NAMES | {bound}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            name = urlsplit(f"//{request.headers.get('Host', '')}").hostname
        except ValueError:
            name = None
        if name not in allowed:
            raise Denied("the Host header names another host than this one", remedy=f"use http://{bound} with the node's port")
        return await handler(request)

    return check


def _at_most(limits: Limits) -> Middleware:
    shares = Shares(limits.requests, limits.tenants)

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        tenant = request[ACCESS].tenant if ACCESS in request else ""  # nobody's, where there is no such path
        if not shares.enter(tenant):
            raise Overloaded(f"too many HTTP requests are being served; the limit is {limits.requests} for all tenants together")
        try:
            return await handler(request)
        finally:
            shares.leave(tenant)

    return count


def _metrics(service: Service, metrics: Metrics) -> Handler:
    @needs("metrics")
    async def handle(request: web.Request) -> web.Response:
        tenant = access_of(request).tenant
        stats = await service.call(tenant, "stats", api.Nothing())
        health = await service.call(tenant, "ready", api.Nothing())
        assert isinstance(stats, api.Stats)
        assert isinstance(health, api.Health)
        page, content_type = metrics.expose(stats, request.headers.get("Accept", ""), health.degraded)
        return web.Response(body=page, headers={"Content-Type": content_type})

    return handle
