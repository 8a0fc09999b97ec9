"""Errors as RFC 9457 problem documents, for every answer of the HTTP face."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from aiohttp import web

from kvstore.errors import KVTierError, Problem

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_RETRY: Final = frozenset({429, 503})
_WHO: Final = 401


def problem_response(problem: Problem, headers: dict[str, str] | None = None) -> web.Response:
    """A problem document with its status."""
    found = dict(headers or {})
    if problem.status in _RETRY:
        found.setdefault("Retry-After", str(problem.facts.get("retry_after_s", 1)))
    if problem.status == _WHO:
        found.setdefault("WWW-Authenticate", "Bearer")
    return web.Response(
        body=msgspec.json.encode(problem), status=problem.status, headers=found, content_type="application/problem+json"
    )


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a handler raises into a problem document; what nobody expected says no more than that it is a defect."""
    try:
        return await handler(request)
    except KVTierError as error:
        return problem_response(error.problem())
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allow = {key: value for key, value in error.headers.items() if key == "Allow"}
        return problem_response(_of_status(error.status, f"{request.method} {request.path}: {error.reason}"), allow)
    except Exception as error:
        if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
            return web.Response(status=499)  # whoever asked has left, which is no defect of ours; nobody reads this
        log.exception("%s %s failed", request.method, request.match_info.route.name or request.path)
        return problem_response(KVTierError("the request failed inside the node").problem())


def _of_status(status: int, detail: str) -> Problem:
    """What the HTTP library refuses before a handler sees it: no such path, wrong method, too long a body."""
    kind = "not_found" if status == 404 else "invalid" if status < 500 else "internal"
    return Problem(type=f"urn:kvtier:error:{kind}", title=f"HTTP {status}", status=status, detail=detail, kind=kind)
