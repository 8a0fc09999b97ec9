"""What each route needs of whoever asks over HTTP.

Used by the node and by the gateway. A route without `needs` is refused to everybody: forgetting it opens nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

from aiohttp import web
from aiohttp.typedefs import Middleware

from kvstore.access import Access, Need, unauthenticated
from kvstore.config import AuthSettings, TlsSettings, is_loopback
from kvstore.errors import Denied, Invalid, KVTierError
from kvstore.server.keyring import Door
from kvstore.server.observe import Observe, observed
from kvstore.server.problems import Handler

F = TypeVar("F", bound=Callable[..., Any])
ACCESS: Final = web.RequestKey("ACCESS", Access)
_NEEDS: Final = "kvtier_needs"
_FINISHES: Final = "kvtier_finishes"
_BEGUN: Final = web.RequestKey("kvtier.begun", bool)
_END: Final = web.RequestKey("kvtier.end", asyncio.Timeout)
_COUNTED: Final = web.RequestKey("kvtier.counted", bool)


def needs(need: Need, *, finishes: bool = False) -> Callable[[F], F]:
    """Says what a route's handler asks of its caller, and whether a request goes on to its end though its token ends meanwhile."""

    def mark(handler: F) -> F:
        setattr(handler, _NEEDS, need)
        setattr(handler, _FINISHES, finishes)
        return handler

    return mark


def need_of(handler: object) -> Need | None:
    """What `needs` said of it; None where nothing was said."""
    found: Need | None = getattr(handler, _NEEDS, None)
    return found


def access_of(request: web.Request) -> Access:
    """Who sent it, as the middleware found."""
    return request[ACCESS]


def authenticated(who: Door, observe: Observe) -> Middleware:
    """Lets nobody through to a handler whose access does not include what the handler needs, or for longer than it holds.

    The application has `begun` among its `on_response_prepare`.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        match = request.match_info
        if match.http_exception is not None:  # no such route: there is nothing to guard
            return await handler(request)
        try:
            request[ACCESS] = access = await who.admit(request.headers.get("Authorization", ""))
            need = need_of(match.handler)
            if need is None:
                raise KVTierError(f"route {match.route.name or request.path} does not say what it needs")
            access.check(need)
        except Denied as error:
            observe(match.route.name or "other", error.kind, 0.0)
            raise
        if getattr(match.handler, _FINISHES, False):
            return await handler(request)
        request[_END] = end = asyncio.timeout(None)
        try:
            async with end:
                with who.ending(access, end):
                    return await handler(request)
        except TimeoutError:
            if not end.expired():  # the handler's own
                raise
        if _COUNTED not in request:
            observe(match.route.name or "other", "unauthenticated", 0.0)
        if _BEGUN in request and request.transport is not None:
            request.transport.abort()  # nothing can be said any more, but that this is not the end
        raise unauthenticated("the access token expired or was revoked while it was answered")

    return check


def counted(observe: Observe, op: str, request: web.Request) -> AbstractContextManager[None]:
    """`observed`, of a request: one whose token ended is told of here, once, and as what it was."""
    request[_COUNTED] = True
    return observed(observe, op, request.get(_END))


async def begun(request: web.Request, _: web.StreamResponse) -> None:
    """For `on_response_prepare`: what ends from here on cannot be answered otherwise."""
    request[_BEGUN] = True


def check_exposed(host: str, port: int, auth: AuthSettings, tls: TlsSettings, *, field: str) -> None:
    """Refuse an address that others reach unless it is said who may come, and how what they say is kept from others.

    Raises:
        Invalid: With what to set.
    """
    if auth.tokens_file and auth.anonymous:
        raise Invalid("auth.tokens_file and auth.anonymous exclude each other: either callers show a token, or nobody is asked")
    if is_loopback(host):
        return
    if not auth.tokens_file and not auth.anonymous:
        raise Invalid(
            f"{field} is '{host}:{port}'; without access tokens it listens on loopback only: use 127.0.0.1:{port}",
            remedy="set auth.tokens_file (`kvtier tokens create` makes it), or auth.anonymous = true to let in whoever reaches it",
        )
    if not tls.cert and not auth.plaintext:
        raise Invalid(
            f"{field} is '{host}:{port}', and without TLS tokens and KV could be read on the way",
            remedy="set tls.cert and tls.key, or auth.plaintext = true behind something that encrypts",
        )
