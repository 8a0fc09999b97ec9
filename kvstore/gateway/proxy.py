"""Requests through to an engine and answers back: tried elsewhere until the first byte, and never twice after it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

import aiohttp
import msgspec
from aiohttp import web

from kvstore.errors import Overloaded, Unavailable
from kvstore.gateway.asked import Asked, asked, passed_on
from kvstore.gateway.engines import Engine

log = logging.getLogger(__name__)
ENGINE: Final = "X-KVTier-Engine"
ROUTE: Final = "X-KVTier-Route"
_ELSEWHERE: Final = frozenset({502, 503, 504})  # an engine that says so has not begun
_PIECE: Final = 64 << 10


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Of the gateway; times in seconds.

    Attributes:
        tries: Engines that one request is sent to, one after the other, at most.
        first_s: How long an engine may take to its first byte.
        idle_s: How long it may be silent afterwards.
        whole: Bytes of an answer that does not stream; one that is longer is refused.
    """

    tries: int = 3
    first_s: float = 600.0
    idle_s: float = 120.0
    whole: int = 64 << 20


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


class Proxy:
    """The handler of completions.

    Args:
        chooser: Decides.
        session: To the engines.
        bounds: See there.
        header: A further header that may hold a session's id.

    Attributes:
        counts: Requests by how they ended.
    """

    def __init__(self, chooser: Chooser, session: aiohttp.ClientSession, bounds: Bounds, *, header: str = "") -> None:
        self._chooser, self._session, self._bounds, self._header = chooser, session, bounds, header
        self.counts: Counter[str] = Counter()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward one request.

        Raises:
            Invalid: Its body is no JSON object.
            Overloaded: Every engine has as many requests as it may have.
            Unavailable: No engine is up, or those that were tried failed before their first byte.
        """
        wanted = asked(request.path, await request.read(), request.headers, header=self._header)
        choice = await self._chooser.choose(wanted)
        why, tries = "", 0
        for engine in choice.engines:
            if not engine.ready or tries == self._bounds.tries:  # others may have come first meanwhile
                continue
            tries += 1
            try:
                return await self._through(request, wanted, choice, engine)
            except _Elsewhere as error:
                why = f"{engine.name}: {error}"
                self.counts["retried"] += 1
                log.warning("a request is tried elsewhere: %s", why)
        if not tries:
            self.counts["refused"] += 1
            raise Overloaded("no engine takes a request now", remedy="try again, or look at GET /v1/engines")
        self.counts["failed"] += 1
        raise Unavailable(f"no engine answered; the last one tried was {why}")

    async def _through(self, request: web.Request, wanted: Asked, choice: Choice, engine: Engine) -> web.StreamResponse:
        trip, begun = choice.sent(engine), time.perf_counter()
        try:
            with engine.working():
                async with self._answer(wanted, engine) as answer:
                    first = await self._piece(answer, engine)
                    if wanted.stream and answer.status == 200:
                        trip.first_byte(time.perf_counter() - begun)
                    headers = passed_on(answer.headers) | {ENGINE: engine.name}
                    if reasons := choice.reasons(engine):
                        headers[ROUTE] = reasons
                    if wanted.stream:
                        return await self._stream(request, answer, first, headers)
                    body = await self._whole(answer, first, engine)
                    self.counts["ok" if answer.status < 400 else "error"] += 1
                    return web.Response(body=body, status=answer.status, headers=headers)
        finally:
            trip.over()

    @asynccontextmanager
    async def _answer(self, wanted: Asked, engine: Engine) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with asyncio.timeout(self._bounds.first_s):
                answer = await self._session.post(engine.url + wanted.path, data=wanted.body, headers=wanted.headers)
        except (aiohttp.ClientError, TimeoutError) as error:
            engine.down(repr(error))
            raise _Elsewhere(repr(error)) from None
        async with answer:
            if answer.status in _ELSEWHERE:
                engine.down(f"status {answer.status}")
                raise _Elsewhere(f"status {answer.status}")
            yield answer

    async def _piece(self, answer: aiohttp.ClientResponse, engine: Engine) -> bytes:
        """The first bytes of a body: until they are there, another engine may still be asked."""
        try:
            async with asyncio.timeout(self._bounds.first_s):
                return await answer.content.readany()
        except (aiohttp.ClientError, TimeoutError) as error:
            engine.down(repr(error))
            raise _Elsewhere(repr(error)) from None

    async def _whole(self, answer: aiohttp.ClientResponse, first: bytes, engine: Engine) -> bytes:
        pieces, size = [first], len(first)
        try:
            async with asyncio.timeout(self._bounds.first_s):
                while piece := await answer.content.read(_PIECE):
                    size += len(piece)
                    if size > self._bounds.whole:
                        raise Unavailable(f"the answer of {engine.name} is longer than {self._bounds.whole} bytes")
                    pieces.append(piece)
        except (aiohttp.ClientError, TimeoutError) as error:
            engine.down(repr(error))
            raise _Elsewhere(repr(error)) from None
        return b"".join(pieces)

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, first: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        try:
            piece = first
            while piece:
                await response.write(piece)
                async with asyncio.timeout(self._bounds.idle_s):
                    piece = await answer.content.readany()
            self.counts["ok" if answer.status < 400 else "error"] += 1
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ServerTimeoutError, TimeoutError) as error:
            self.counts["broken"] += 1
            log.warning("engine %s broke off in the middle of an answer: %r", headers[ENGINE], error)
            # It began to speak, and what it said is the client's: an error it can read instead of an end that looks regular.
            await response.write(_broken(headers[ENGINE]))
        await response.write_eof()
        return response


class _Elsewhere(Exception):
    """It failed, and nothing of it has reached the client."""


def _broken(engine: str) -> bytes:
    error = {"message": f"engine {engine} broke off in the middle of this answer", "type": "engine_broke_off", "code": 502}
    return b"\n\ndata: " + msgspec.json.encode({"error": error}) + b"\n\n"
