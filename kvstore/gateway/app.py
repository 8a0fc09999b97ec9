"""The gateway's HTTP face: OpenAI's routes to the engines, and its own to those who operate it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvstore.clock import Clock, Ids, RandomIds, SystemClock
from kvstore.config import parse_address
from kvstore.directory_url import DirectoryUrl
from kvstore.errors import AlreadyExists, Invalid, Unavailable, Unsupported
from kvstore.gateway.asked import CHAT, COMPLETIONS, passed_on
from kvstore.gateway.choosing import Routing, checked_blocks, rounded
from kvstore.gateway.engines import LOOK, Engine, Engines
from kvstore.gateway.failing import told
from kvstore.gateway.proxy import MOST_BODY, Proxy
from kvstore.gateway.reading import read
from kvstore.gateway.routes import Decision, RouteAsked, RouteChoice, Routes
from kvstore.gateway.settings import GatewaySettings
from kvstore.gateway.tenancy import salted
from kvstore.gateway.words import EngineTokenizer, OwnTokenizer
from kvstore.server.auth import access_of, authenticated, begun, check_exposed, needs
from kvstore.server.console import console_routes
from kvstore.server.keyring import Door, door
from kvstore.server.logs import logged, name_request
from kvstore.server.problems import problems
from kvstore.server.tls import renew, server_context
from kvstore.service.supervisor import Supervisor

if TYPE_CHECKING:
    from kvstore.mesh.valkey import ValkeyDirectory

_MODELS_S: Final = 10.0
_MODELS: Final = 1 << 20
_LINGER_S: Final = 5.0  # from the end of a drain until whoever is left is cut off


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as it is now."""

    engine: str
    url: str
    up: bool
    draining: bool
    running: int
    sent: int
    failed: int


class Gateway:
    """A running gateway. Make one with `open`.

    Attributes:
        url: Where it listens.
        routing: What decides.
    """

    def __init__(self, url: str, routing: Routing) -> None:
        self.url, self.routing = url, routing

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: GatewaySettings, *, clock: Clock | None = None, ids: Ids | None = None) -> AsyncIterator[Self]:
        """Serve until the end of the block; then requests under way may end.

        Raises:
            Invalid: No engine, or a setting that does not fit, tokens and certificates included.
            Unsupported: The tokenizer is not here.
            AlreadyExists: The address is taken.
        """
        clock, ids = clock or SystemClock(), ids or RandomIds()
        host, port = parse_address(settings.listen)
        check_exposed(host, port, settings.auth, settings.tls, field="listen")
        async with AsyncExitStack() as lifetime:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
            session = await lifetime.enter_async_context(
                aiohttp.ClientSession(
                    connector=connector,
                    timeout=timeout,
                    auto_decompress=False,
                    cookie_jar=aiohttp.DummyCookieJar(),  # one client's cookies are not another one's
                    headers={"Accept-Encoding": "identity"},
                    skip_auto_headers=("Accept", "Content-Type", "User-Agent"),
                )
            )
            engines = Engines(settings.engines, session)
            words = OwnTokenizer(settings.tokenizer) if settings.tokenizer else EngineTokenizer(session)
            directory = await lifetime.enter_async_context(_directory(settings, clock, ids)) if settings.directory else None
            routing = Routing(
                engines, words, model=settings.model, jitter=ids.jitter, monotonic=clock.monotonic, directory=directory
            )
            lifetime.push_async_callback(routing.whereabouts.aclose)
            await engines.look()
            background = Supervisor(clock, ids)
            lifetime.push_async_callback(background.aclose)
            background.run("engines", engines.watch)
            background.run("nodes", routing.whereabouts.keep)
            background.run("events", routing.follow)
            if directory is not None:
                background.run("directory", directory.keep)
            proxy = Proxy(routing, session, settings.bounds, requests=settings.requests, header=settings.header)
            who = door(settings.auth, clock)
            background.run("tokens", who.keep)
            face = _Face(engines, routing, proxy, session, who)
            app = face.application(ids)
            context = server_context(settings.tls)
            if context is not None:
                background.run("certificates", partial(renew, context, settings.tls))
            runner = web.AppRunner(
                app, access_log=None, shutdown_timeout=settings.bounds.drain_s + _LINGER_S, handler_cancellation=True
            )
            await runner.setup()
            lifetime.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, host, port, ssl_context=context)
            try:
                await site.start()
            except OSError as error:
                raise AlreadyExists(f"{settings.listen}: {error.strerror}", remedy="set another --listen") from None
            scheme = "http" if context is None else "https"
            yield cls(f"{scheme}://{settings.listen.rpartition(':')[0]}:{runner.addresses[0][1]}", routing)


def _directory(settings: GatewaySettings, clock: Clock, ids: Ids) -> AbstractAsyncContextManager[ValkeyDirectory]:
    try:
        from kvstore.mesh.valkey import ValkeyDirectory, ValkeySettings  # noqa: PLC0415  its client is an extra
    except ModuleNotFoundError as error:
        raise Unsupported(f"a directory needs the package {error.name}", remedy="pip install 'kvtier[mesh]'") from None
    url, bounds = DirectoryUrl.parse(settings.directory), ValkeySettings(mesh=settings.mesh)
    return ValkeyDirectory.observe(url, bounds, clock=clock, ids=ids, environ=os.environ)


class _Face:
    """The handlers of all but completions."""

    def __init__(self, engines: Engines, routing: Routing, proxy: Proxy, session: aiohttp.ClientSession, who: Door) -> None:
        self._engines, self._routing, self._proxy, self._session, self._who = engines, routing, proxy, session, who

    def application(self, ids: Ids) -> web.Application:
        """Every route."""
        checks = [logged(ids), problems, authenticated(self._who, self._refused)]
        app = web.Application(middlewares=checks, client_max_size=MOST_BODY)
        app.on_shutdown.append(lambda _: self._proxy.stop())
        app.on_response_prepare.append(_unsigned)
        app.on_response_prepare.extend([begun, name_request])
        app.add_routes(
            [
                web.post(CHAT, self._proxy.handle),
                web.post(COMPLETIONS, self._proxy.handle),
                web.get("/v1/models", self.models),
                web.post("/v1/route", self.route),
                web.get("/v1/engines", self.engines),
                web.get("/v1/decisions", self.decisions),
                web.post("/v1/engines/{name}/{what:drain|resume}", self.drain),
                web.get("/healthz", self.healthy),
                web.get("/readyz", self.ready),
                web.get("/metrics", self.metrics),
            ]
        )
        app.add_routes(console_routes("gateway"))
        return app

    def _refused(self, op: str, outcome: str, seconds: float) -> None:  # noqa: ARG002  as every observer is told
        self._proxy.counts["denied"] += 1

    @needs("read")
    async def models(self, request: web.Request) -> web.Response:
        """As an engine says."""
        said = "" if access_of(request).token else request.headers.get("Authorization", "")
        for engine in self._engines.ready:
            headers = {**({"Authorization": said} if said else {}), **engine.key.headers()}
            try:
                asking = self._session.get(
                    f"{engine.url}/v1/models",
                    headers=headers,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=_MODELS_S),
                )
                async with asking as answer:
                    body = await read(answer, _MODELS)
                    if body is None:
                        raise Unavailable(f"the list of models of {engine.name} is longer than {_MODELS} bytes", remedy=LOOK)
                    return web.Response(body=body, status=answer.status, headers=passed_on(answer.headers))
            except (aiohttp.ClientError, TimeoutError) as error:
                engine.down(told(error))
        raise self._engines.refusal()

    @needs("read")
    async def route(self, request: web.Request) -> web.Response:
        """Where a prompt would go."""
        with self._proxy.admitted(request):
            return await self._routed(request)

    async def _routed(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await self._proxy.body(request), type=RouteAsked)
        except msgspec.MsgspecError as error:
            raise Invalid(f"body: {error}") from None
        if (asked.token_ids is None) == (asked.prefix_ids is None):
            raise Invalid("name the prompt by exactly one of token_ids and prefix_ids")
        ready, routing, access = self._engines.ready, self._routing, access_of(request)
        if asked.prefix_ids is not None:
            access.check("admin")  # blocks by name may be another tenant's: where they are is not for everybody
        if not ready:
            raise routing.refusal()
        if asked.token_ids is not None:
            salt = salted(access.tenant, asked.salt) if access.token else asked.salt
            plan = await routing.plan(asked.token_ids, salt, ready)
        else:
            blocks = checked_blocks(asked.prefix_ids or [])
            plan = await routing.planned(blocks, asked.tokens or len(blocks) * routing.namespace.block_tokens, ready)
        where = access.may("admin")  # what is inside the network is the operator's; a name is in every answer
        found = [
            RouteChoice(engine=each.name, url=each.url if where else "", predicted=rounded(plan.priced[each.name]))
            for each in plan.engines
        ]
        return _json(Routes(candidates=found))

    @needs("admin")
    async def engines(self, _: web.Request) -> web.Response:
        """All of them."""
        return _json([_state(engine) for engine in self._engines.all.values()])

    @needs("admin")
    async def decisions(self, _: web.Request) -> web.Response:
        """The last ones, newest first."""
        return _json(self._routing.decisions.shown())

    @needs("admin")
    async def drain(self, request: web.Request) -> web.Response:
        """No more requests to one, or again."""
        engine = self._engines.get(request.match_info["name"])
        engine.draining = request.match_info["what"] == "drain"
        return _json(_state(engine))

    @needs("open")
    async def healthy(self, _: web.Request) -> web.Response:
        """The process lives."""
        return web.Response(text="ok")

    @needs("open")
    async def ready(self, request: web.Request) -> web.Response:
        """And has an engine. Which ones there are is for `admin`."""
        if not self._engines.ready:
            raise (
                self._engines.refusal() if access_of(request).may("admin") else Unavailable("no engine takes requests", remedy=LOOK)
            )
        return web.Response(text="ok")

    @needs("metrics")
    async def metrics(self, request: web.Request) -> web.Response:
        """For Prometheus."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        registry = CollectorRegistry()
        registry.register(_Counted(self._engines, self._proxy, self._who))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})


async def _unsigned(_: web.Request, response: web.StreamResponse) -> None:
    """What a gateway is made of is nobody's business; an engine does not say it through one, either."""
    response.headers.popall("Server", None)


def _json(value: msgspec.Struct | list[EngineState] | list[Decision]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _state(engine: Engine) -> EngineState:
    return EngineState(
        engine=engine.name,
        url=engine.url,
        up=engine.up,
        draining=engine.draining,
        running=engine.running,
        sent=engine.sent,
        failed=engine.failed,
    )


class _Counted(Collector):
    def __init__(self, engines: Engines, proxy: Proxy, who: Door) -> None:
        self._engines, self._proxy, self._who = engines, proxy, who

    def collect(self) -> list[Metric]:
        requests = CounterMetricFamily("kvtier_gateway_requests", "Requests, by how they ended.", labels=["outcome"])
        for outcome, count in self._proxy.counts.items():
            requests.add_metric([outcome], count)
        up = GaugeMetricFamily("kvtier_gateway_engine_up", "Whether it answers.", labels=["engine"])
        running = GaugeMetricFamily("kvtier_gateway_engine_running", "Requests that it works on.", labels=["engine"])
        sent = CounterMetricFamily("kvtier_gateway_engine_sent", "Requests that it was sent.", labels=["engine"])
        failed = CounterMetricFamily("kvtier_gateway_engine_failed", "Of those, failed before the first byte.", labels=["engine"])
        for engine in self._engines.all.values():
            up.add_metric([engine.name], engine.up)
            running.add_metric([engine.name], engine.running)
            sent.add_metric([engine.name], engine.sent)
            failed.add_metric([engine.name], engine.failed)
        degraded = GaugeMetricFamily("kvtier_gateway_degraded", "1 for what it does not go by as it was told.", labels=["part"])
        if self._who.wrong:
            degraded.add_metric(["access"], 1)
        return [requests, up, running, sent, failed, degraded]
