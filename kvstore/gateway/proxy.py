"""Requests through to an engine and answers back: tried elsewhere until the first byte, and never twice after it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Annotated, Final, Protocol

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvstore.errors import Invalid, Overloaded, Unavailable
from kvstore.gateway.asked import ENGINE, ROUTE, Asked, asked, passed_on
from kvstore.gateway.engines import LOOK, Engine
from kvstore.gateway.failing import has_died, told
from kvstore.gateway.reading import read
from kvstore.gateway.tenancy import of_tenant
from kvstore.server.auth import access_of, needs
from kvstore.server.logs import REQUEST_ID, id_of_request

log = logging.getLogger(__name__)
MOST_BODY: Final = 64 << 20
_ELSEWHERE: Final = frozenset({502, 503, 504})  # an engine that says so has not begun
_MOST_DEAD: Final = 2  # engines that may die with one request: it may be what they die of
_PIECE: Final = 64 << 10

_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Some = Annotated[int, msgspec.Meta(ge=1)]


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the gateway; times in seconds.

    Attributes:
        tries: Engines that one request is sent to, one after the other, at most.
        first_s: How long an engine may take to the first byte of a stream.
        idle_s: How long it may be silent afterwards.
        whole_s: How long it may take to the end of an answer that does not stream.
        body_s: How long a client may take to send its request.
        client_s: How long a client may leave a piece of an answer unread.
        drain_s: How long requests under way may go on once the gateway is told to stop.
        whole: Bytes of an answer that does not stream; one that is longer is refused.
        bodies: Bytes of all requests under way; more requests are refused.
    """

    tries: _Some = 3
    first_s: _Seconds = 600.0
    idle_s: _Seconds = 120.0
    whole_s: _Seconds = 3600.0
    body_s: _Seconds = 60.0
    client_s: _Seconds = 60.0
    drain_s: _Seconds = 30.0
    whole: _Some = 64 << 20
    bodies: _Some = 1 << 30


class Trip(Protocol):
    """One request on its way to one engine; what becomes of it is learned from."""

    def first_byte(self, seconds: float) -> None:
        """The engine began to answer so long after it was sent the request."""
        ...

    def over(self) -> None:
        """It has nothing more to do for it, however it ended. Always called, once."""
        ...


class Choice(Protocol):
    """Engines for one request, the cheapest first."""

    engines: Sequence[Engine]

    def reasons(self, engine: Engine) -> str:
        """Why, as JSON on one line; "" where nothing was known."""
        ...

    def sent(self, engine: Engine) -> Trip:
        """It is sent there."""
        ...


class Chooser(Protocol):
    """Decides where requests go."""

    async def choose(self, request: Asked) -> Choice:
        """Engines that may be sent a request now, ranked."""
        ...

    def refusal(self) -> Overloaded | Unavailable:
        """Why there are none."""
        ...


class Proxy:
    """The handler of completions.

    Args:
        chooser: Decides.
        session: To the engines.
        bounds: See there.
        requests: At a time; more are refused.
        header: A further header that may hold a session's id.

    Attributes:
        counts: Requests by how they ended.
    """

    def __init__(
        self, chooser: Chooser, session: aiohttp.ClientSession, bounds: Bounds, *, requests: int, header: str = ""
    ) -> None:
        self._chooser, self._session, self._bounds, self._header = chooser, session, bounds, header
        self._requests, self._running, self._bodies = requests, 0, 0
        self._ends, self._waits = math.inf, set[asyncio.Timeout]()
        self.counts: Counter[str] = Counter()

    async def stop(self) -> None:
        """What is under way may go on for `drain_s`; then it ends with an error that the client can read."""
        self._ends = asyncio.get_running_loop().time() + self._bounds.drain_s
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(min(wait.when() or self._ends, self._ends))

    @needs("write", finishes=True)
    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward one request. It was let in, and its answer is given to its end.

        Raises:
            Invalid: Its body is no JSON object.
            Overloaded: The gateway, or every engine that is up, has as many requests as it may have.
            Unavailable: No engine is up, those that were tried failed before their first byte, or it took longer than `whole_s`.
        """
        with self.admitted(request):
            try:
                return await self._forward(request)
            except asyncio.CancelledError:
                self.counts["left"] += 1
                raise

    @contextmanager
    def admitted(self, request: web.Request) -> Iterator[None]:
        """While a request is worked on. Raises `Overloaded`."""
        plain = request.content_length is not None and "Content-Encoding" not in request.headers
        size = min(request.content_length or 0, MOST_BODY) if plain else MOST_BODY
        if self._running >= self._requests or self._bodies + size > self._bounds.bodies:
            self.counts["refused"] += 1
            raise Overloaded(f"{self._running} requests of {self._bodies} bytes are being served, which is the limit")
        self._running += 1
        self._bodies += size
        try:
            yield
        finally:
            self._running -= 1
            self._bodies -= size

    async def body(self, request: web.Request) -> bytes:
        """What a client sent. Raises `Invalid`, and HTTP's own errors for one that is too long or takes too long."""
        try:
            async with asyncio.timeout(self._bounds.body_s):
                return await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        except web.RequestPayloadError as error:
            raise Invalid(f"body: {error}") from None

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        wanted, access = asked(request.path, await self.body(request), request.headers, header=self._header), access_of(request)
        if access.token:
            wanted = of_tenant(wanted, access.tenant, header=self._header)
        wanted.headers[REQUEST_ID] = id_of_request(request)  # an engine's log calls it what ours does
        choice = await self._chooser.choose(wanted)
        why, tries, dead = "", 0, 0
        for engine in choice.engines:
            if tries == self._bounds.tries or dead == _MOST_DEAD or self._stopped:
                break
            if not engine.ready:  # others may have come first meanwhile
                continue
            tries += 1
            try:
                return await self._through(request, wanted, choice, engine)
            except _Elsewhere as error:
                why = f"{engine.name}: {error}"
                dead += error.died
                self.counts["retried"] += 1
                log.warning("a request failed before its first byte at %s: %s", engine, error)
        if self._stopped:
            self.counts["failed"] += 1
            raise Unavailable("this gateway is stopping", remedy="ask another one")
        if not tries:
            refusal = self._chooser.refusal()
            self.counts["refused" if isinstance(refusal, Overloaded) else "failed"] += 1
            raise refusal
        self.counts["failed"] += 1
        raise Unavailable(f"no engine answered; the last one tried was {why}", remedy=LOOK)

    @property
    def _stopped(self) -> bool:
        return asyncio.get_running_loop().time() >= self._ends

    async def _through(self, request: web.Request, wanted: Asked, choice: Choice, engine: Engine) -> web.StreamResponse:
        trip = choice.sent(engine)
        try:
            with engine.working():
                if wanted.stream:
                    return await self._streamed(request, wanted, choice, engine, trip)
                response, body = await self._collected(wanted, choice, engine)
        finally:
            trip.over()
        response.content_length = len(body)
        taken = await self._given(request, response.prepare(request))
        for start in range(0, len(body), _PIECE):
            taken = taken and await self._given(request, response.write(body[start : start + _PIECE]))
        self.counts["left" if not taken else _outcome(response)] += 1
        return response

    @asynccontextmanager
    async def _within(self, seconds: float) -> AsyncIterator[None]:
        """A wait for an engine, which ends at the latest when the gateway does. Raises `TimeoutError`."""
        until = asyncio.get_running_loop().time() + seconds
        async with asyncio.timeout_at(min(until, self._ends)) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    def _asking(self, wanted: Asked, engine: Engine) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = CIMultiDict(wanted.headers)
        headers.update(engine.key.headers())
        return self._session.post(engine.url + wanted.path, data=wanted.body, headers=headers, allow_redirects=False)

    def _response(self, answer: aiohttp.ClientResponse, choice: Choice, engine: Engine) -> web.StreamResponse:
        """What a client is to be told of an answer. Raises `_Elsewhere` for one that another engine may give instead."""
        if answer.status in _ELSEWHERE:
            engine.down(f"it answers {answer.status}")
            raise _Elsewhere(f"it answers {answer.status}")
        response = web.StreamResponse(status=answer.status, headers=passed_on(answer.headers))
        response.headers.popall(REQUEST_ID, None)  # it is ours that was asked, and ours is what both logs have
        response.headers[ENGINE] = engine.name
        if reasons := choice.reasons(engine):
            response.headers[ROUTE] = reasons
        return response

    async def _streamed(
        self, request: web.Request, wanted: Asked, choice: Choice, engine: Engine, trip: Trip
    ) -> web.StreamResponse:
        begun = time.perf_counter()
        async with AsyncExitStack() as asking:
            with self._elsewhere(engine):
                async with self._within(self._bounds.first_s):
                    answer = await asking.enter_async_context(self._asking(wanted, engine))
                    response = self._response(answer, choice, engine)
                    first = await answer.content.readany()  # until it is there, another engine may still be asked
            if answer.status == 200:
                trip.first_byte(time.perf_counter() - begun)
            return await self._stream(request, response, answer, first, engine)

    async def _collected(self, wanted: Asked, choice: Choice, engine: Engine) -> tuple[web.StreamResponse, bytes]:
        """An answer that does not stream, whole: one that broke off may be asked for elsewhere, one that takes long may not."""
        try:
            async with self._within(self._bounds.whole_s):
                with self._elsewhere(engine):
                    async with self._asking(wanted, engine) as answer:
                        response = self._response(answer, choice, engine)
                        body = await read(answer, self._bounds.whole)
        except TimeoutError:  # from here only: the engine's own are told apart inside
            if self._stopped:
                raise _Elsewhere("this gateway is stopping") from None
            self.counts["failed"] += 1
            raise Unavailable(
                f"the answer of {engine.name} did not end in {self._bounds.whole_s:g} s",
                kind="timeout",
                remedy="ask for a stream or for fewer tokens, or raise bounds.whole_s of the gateway",
            ) from None
        if body is None:
            self.counts["failed"] += 1
            raise Unavailable(
                f"the answer of {engine.name} is longer than {self._bounds.whole} bytes",
                remedy="ask for a stream or for fewer tokens, or raise bounds.whole of the gateway",
            )
        return response, body

    @contextmanager
    def _elsewhere(self, engine: Engine) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError) as error:
            if not self._stopped:
                engine.down(told(error))
            raise _Elsewhere(told(error), died=has_died(error)) from None

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, answer: aiohttp.ClientResponse, piece: bytes, engine: Engine
    ) -> web.StreamResponse:
        taken = await self._given(request, response.prepare(request))
        while piece and (taken := taken and await self._given(request, response.write(piece))):
            try:
                async with self._within(self._bounds.idle_s):
                    piece = await answer.content.readany()
            except (aiohttp.ClientError, TimeoutError) as error:
                self.counts["broken"] += 1
                log.warning("engine %s broke off in the middle of an answer: %s", engine, told(error))
                # It began to speak, and what it said is the client's: an error it can read instead of an end that looks regular.
                if answer.content_type == "text/event-stream":
                    await self._given(request, response.write(self._broken(engine)))
                elif request.transport is not None:
                    request.transport.abort()
                return response
        self.counts["left" if not taken else _outcome(response)] += 1
        return response

    async def _given(self, request: web.Request, writing: Awaitable[object]) -> bool:
        """Whether the client took it: one that reads nothing for too long is left alone, so that it holds no engine."""
        try:
            async with asyncio.timeout(self._bounds.client_s):
                await writing
        except (TimeoutError, ConnectionError) as error:
            log.info("a client takes no more of its answer: %s", told(error))
            if request.transport is not None:
                request.transport.abort()
            return False
        return True

    def _broken(self, engine: Engine) -> bytes:
        what, kind, code = f"engine {engine.name} broke off", "engine_broke_off", 502
        if self._stopped:
            what, kind, code = "the gateway was stopped", "gateway_stopped", 503
        error = {"message": f"{what} in the middle of this answer", "type": kind, "code": code}
        return b"\n\ndata: " + msgspec.json.encode({"error": error}) + b"\n\n"


def _outcome(answer: web.StreamResponse) -> str:
    return "ok" if answer.status < 400 else "error"


class _Elsewhere(Exception):
    """It failed, and nothing of it has reached the client.

    Attributes:
        died: Whether the engine went away with the request.
    """

    def __init__(self, why: str, *, died: bool = False) -> None:
        super().__init__(why)
        self.died = died
