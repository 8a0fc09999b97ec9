"""For vLLM's own server: a session that a request names in headers reaches the connector, which sees none.

::

    vllm serve ... --middleware kvstore.connectors.vllm_http.SessionHeaders

vLLM itself takes `session_id` of the body, `X-Session-ID` and `vllm_xargs.session_id`, in this order. This adds, behind them,
`x-claude-code-session-id`, `session-id` and the header that KVTIER_SESSION_HEADER names, and the headers of parents: it puts their
ids into `vllm_xargs`. All other requests, and all answers, pass through it as they are.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, Final

from kvstore.connectors.session_names import (
    FIELD,
    HEADER,
    MOST_BODY,
    OTHER_HEADERS,
    PARENT,
    PARENT_FIELD,
    PARENT_HEADERS,
    fields_of,
    session_of,
    with_xargs,
)

log = logging.getLogger(__name__)
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_PATHS: Final = ("/completions", "/responses", "/messages")  # whose bodies have a place for `vllm_xargs`


class SessionHeaders:
    """An ASGI application around another one.

    Attributes:
        counts: Requests with such a header, by `marked`, `said` (the body names a session itself), `unread` (no JSON object) and
            `too_large`; of the last two the first one is logged.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        own = os.environ.get("KVTIER_SESSION_HEADER", "")
        self._app = app
        self._headers = (*OTHER_HEADERS, own) if own else OTHER_HEADERS
        self.counts: Counter[str] = Counter()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """See ASGI."""
        ids = self._ids(scope)
        if ids:
            # The body will have another length, which nobody knows before it is read.
            scope = {**scope, "headers": [each for each in scope["headers"] if each[0].lower() != b"content-length"]}
            receive = _Rewritten(receive, partial(self._marked, ids))
        await self._app(scope, receive, send)

    def _ids(self, scope: Message) -> dict[str, str]:
        """What the headers say and vLLM does not read in them."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_PATHS):
            return {}
        # Where one is there twice the first counts, as it does for vLLM.
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        session = "" if session_of(headers, (HEADER,)) else session_of(headers, self._headers)
        found = {FIELD: session, PARENT_FIELD: session_of(headers, PARENT_HEADERS)}
        return {name: value for name, value in found.items() if value}

    def _marked(self, ids: Mapping[str, str], body: bytes, *, whole: bool) -> bytes:
        fields = fields_of(body) if whole else None
        if fields is None:
            return self._as_it_is("too_large" if len(body) > MOST_BODY else "unread", body)
        said = [fields.get("kv_transfer_params"), fields.get("vllm_xargs")]
        known = {
            FIELD: any(map(session_of, [*said, {FIELD: fields.get(FIELD)}])),
            PARENT_FIELD: any(session_of(each, PARENT) for each in said),
        }
        new = {name: value for name, value in ids.items() if not known[name]}
        if not new:
            return self._as_it_is("said", body)
        marked = with_xargs(body, fields, new)
        if marked is None:
            return self._as_it_is("unread", body)
        self.counts["marked"] += 1
        return marked

    def _as_it_is(self, outcome: str, body: bytes) -> bytes:
        self.counts[outcome] += 1
        if outcome != "said" and self.counts[outcome] == 1:
            log.warning("kvtier: a request goes on without the session of its headers, its body is %s; said once", outcome)
        return body


class _Rewritten:
    """A request's `receive` that gives the whole body at once, rewritten.

    It is read when it is asked for: not before somebody between here and there has refused the request.
    """

    def __init__(self, receive: Receive, rewrite: Callable[..., bytes]) -> None:
        self._receive, self._rewrite = receive, rewrite
        self._done = False

    async def __call__(self) -> Message:
        if self._done:
            return await self._receive()
        self._done = True
        body, more = bytearray(), True
        while more and len(body) <= MOST_BODY:
            message = await self._receive()
            if message["type"] != "http.request":  # the client is gone, and nobody wants half a body
                return message
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return {"type": "http.request", "body": self._rewrite(bytes(body), whole=not more), "more_body": more}
