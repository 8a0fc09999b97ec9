"""What a process tells on stderr: lines for people, or JSON for programs; and one line for each HTTP request.

Every request has an id: the caller's `X-Request-ID`, or a new one. The answer repeats it, and every line that is logged while the
request is served has it. Query strings, headers and bodies are never logged, and whatever looks like an access token is cut.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from kvstore.clock import Ids
from kvstore.server.auth import ACCESS
from kvstore.server.problems import Handler

REQUEST_ID: Final = "X-Request-ID"
_KEY: Final = web.RequestKey("kvtier.request_id", str)
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TOKEN: Final = re.compile(r"kvt_([0-9a-f]{16})_[0-9a-f]+")
_SESSIONS: Final = ("X-Session-ID", "x-claude-code-session-id", "session-id")
_LONGEST: Final = 256  # characters of a session's id, which a client chose
_QUIET: Final = frozenset({"/healthz", "/readyz", "/metrics"})  # asked every few seconds, for ever

_access: Final = logging.getLogger("kvstore.access")
_current: Final[ContextVar[str]] = ContextVar("kvtier_request_id", default="")


class LogFormat(StrEnum):
    """How to log."""

    text = "text"
    json = "json"


class _Unquoted(logging.Filter):
    """What is no HTTP, aiohttp tells with a traceback and the bytes that it stopped at: credentials and prompts are in them."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is to be written. It loses its traceback, and counts no more than other requests do."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
            record.msg, record.args = f"{record.getMessage()}: it is no HTTP ({type(error).__name__})", ()
            return logging.getLogger().isEnabledFor(logging.INFO)
        return True


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _TOKEN.sub(r"kvt_\1_***", super().format(record))


class JsonLines(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `logger`, `message`; `request_id` and more where there is a request."""

    def format(self, record: logging.LogRecord) -> str:
        """The line. Everything in it is text or a number, so that no value can break it."""
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := _current.get():
            found["request_id"] = request_id
        found |= getattr(record, "fields", {})
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return _TOKEN.sub(r"kvt_\1_***", msgspec.json.encode(found).decode())


def log_to_stderr(level: int, form: LogFormat) -> None:
    """Set up this process's logging. Requests are logged in JSON only: for people there are the metrics."""
    text = _Text("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form is LogFormat.json else text)
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("botocore").setLevel(max(level, logging.WARNING))  # it tells of every look-up of credentials
    handler.addFilter(_Unquoted())
    _access.setLevel(level if form is LogFormat.json else logging.WARNING)


def logged(ids: Ids) -> Middleware:
    """Outermost: gives every request its id, and logs how it ended."""

    @web.middleware
    async def log(request: web.Request, handler: Handler) -> web.StreamResponse:
        said = request.headers.get(REQUEST_ID, "")
        request_id = said if _ID.fullmatch(said) else ids.new()
        request[_KEY] = request_id
        token = _current.set(request_id)
        clock = asyncio.get_running_loop().time
        begun, status = clock(), 499  # of a client that left before there was an answer
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            if _access.isEnabledFor(logging.INFO) and request.path not in _QUIET:
                _tell(request, status, clock() - begun)
            _current.reset(token)

    return log


async def name_request(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: the answer says which request it is of."""
    if found := request.get(_KEY):
        response.headers.setdefault(REQUEST_ID, found)


def id_of_request(request: web.Request) -> str:
    """What the log and the answer call it."""
    return request[_KEY]


def _tell(request: web.Request, status: int, seconds: float) -> None:
    match = request.match_info
    resource, access = match.route.resource, request.get(ACCESS)
    named = match.get("id", "") or next(filter(None, map(request.headers.get, _SESSIONS)), "") or ""
    fields = {
        "route": match.route.name or (resource.canonical if resource else "none"),
        "method": request.method,
        "status": status,
        "duration_ms": round(1000 * seconds, 3),
        "session": named[:_LONGEST],
        "tenant": access.tenant if access else "",
        "token": access.token if access else "",
    }
    kept = {key: value for key, value in fields.items() if value != ""}
    _access.info("%s %s %d", request.method, kept["route"], status, extra={"fields": kept})
