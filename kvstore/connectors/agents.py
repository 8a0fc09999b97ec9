"""Sessions for agent frameworks: an id goes along with every request, and the KV is warm when the engine looks for it.

::

    agents = AgentSessions("kvtier+unix:///run/kvtier/node.sock", model="SmolLM2-135M-Instruct")
    client = openai.OpenAI(base_url=..., http_client=httpx.Client(transport=agents.transport()))
    with session("chat-42"):
        client.chat.completions.create(...)     # X-Session-ID: chat-42; its KV is on its way before the engine has the prompt

Nothing here fails without a tier, and nothing waits for one but `KVSession`: a second at most, where the order of things matters.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import httpx

from kvstore import api
from kvstore.connectors.bridge import Bridge
from kvstore.connectors.session_names import FIELD, HEADER, PARENT_FIELD, PARENT_HEADERS, fields_of, with_xargs
from kvstore.errors import Gone, Invalid, NotFound
from kvstore.keys import check_id

if TYPE_CHECKING:
    from kvstore.client import SyncClient

IDLE_S: Final = 30.0  # a session that was not used that long is restored again: it may have left the tier
_CLOSE_S: Final = 2.0
_SOON_S: Final = 1.0
_REMEMBERED: Final = 4096

_session: ContextVar[str] = ContextVar("kvtier_session", default="")
_parent: ContextVar[str] = ContextVar("kvtier_parent", default="")


@contextmanager
def session(session_id: str, *, parent: str = "") -> Iterator[None]:
    """Requests in here, and in tasks that are started here, belong to this session. Where it is new, it is a fork of `parent`.

    Raises:
        Invalid: An id that no tier takes, or no header carries: it must be ASCII.
    """
    tokens = _session.set(_fit_for_headers(session_id)), _parent.set(_fit_for_headers(parent))
    try:
        yield
    finally:
        _session.reset(tokens[0])
        _parent.reset(tokens[1])


class AgentSessions:
    """One program's way to its sessions' KV. Close it, or use it in a `with` statement.

    Args:
        url: A storage URL: that of the node beside the engine.
        model: The namespace's model id, where sessions are used with several models; by default a session's only one.
        tier: Where restored KV is put.
    """

    def __init__(self, url: str, *, model: str = "", tier: api.Target = "dram") -> None:
        self.bridge = Bridge(url)
        self._model, self._tier = model, tier
        self._used: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def warm(self, session_id: str, *, version: int | None = None) -> bool:
        """Bring a session's KV near, unless that was just done. Returns at once; whether anything was asked for."""
        now = time.monotonic()
        with self._lock:
            last = self._used.pop(session_id, None)
            self._used[session_id] = now
            if len(self._used) > _REMEMBERED:
                self._used.popitem(last=False)
        if version is None and last is not None and now - last < IDLE_S:
            return False

        def restore(kv: SyncClient) -> None:
            kv.restore(session_id, model=self._model, version=version, tier=self._tier)

        return self.bridge.call("restore", restore) is not None

    def forget(self, session_id: str, *, namespace: str = "") -> None:
        """Delete a session's KV. Returns at once; one that has none is fine."""
        with self._lock:
            self._used.pop(session_id, None)

        def delete(kv: SyncClient) -> None:
            with suppress(NotFound, Gone):
                kv.delete_session(session_id, namespace=namespace)

        self.bridge.call("delete_session", delete)

    def version(self, session_id: str, *, namespace: str = "") -> Future[int] | None:
        """The version that a session's KV has, 0 where it has none. None where too many calls wait."""
        return self.bridge.call("get_session", lambda kv: _version(kv, session_id, namespace))

    def transport(
        self,
        inner: httpx.BaseTransport | httpx.AsyncBaseTransport | None = None,
        *,
        session_id: str = "",
        in_body: bool = False,
    ) -> SessionTransport:
        """For `httpx.Client(transport=...)` and `httpx.AsyncClient(transport=...)`.

        Args:
            inner: What sends the requests; httpx's own by default.
            session_id: Of requests outside of any :func:`session`.
            in_body: Whether the id is put into JSON bodies, too, as `vllm_xargs.session_id`: for vLLM without a gateway before it,
                which shows headers to no connector. Other servers may refuse a field that they do not know.

        Raises:
            Invalid: As :func:`session`.
        """
        return SessionTransport(self, inner, _fit_for_headers(session_id), in_body=in_body)

    def close(self) -> None:
        """Let go of the node. What was asked before, such as the end of a session, has a little time to get there."""
        last = self.bridge.call("close", lambda _: None)  # calls are made in order
        if last is not None:
            wait([last], _CLOSE_S)
        self.bridge.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SessionTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Adds the session's id to requests, and warms its KV while they travel; see `AgentSessions.transport`."""

    def __init__(
        self,
        sessions: AgentSessions,
        inner: httpx.BaseTransport | httpx.AsyncBaseTransport | None,
        session_id: str,
        *,
        in_body: bool,
    ) -> None:
        self._sessions, self._inner, self._session_id, self._in_body = sessions, inner, session_id, in_body

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        if self._inner is None:
            self._inner = httpx.HTTPTransport()
        if not isinstance(self._inner, httpx.BaseTransport):
            raise TypeError("this transport was given an async one: use it with httpx.AsyncClient")
        return self._inner.handle_request(self._marked(request))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        if self._inner is None:
            self._inner = httpx.AsyncHTTPTransport()
        if not isinstance(self._inner, httpx.AsyncBaseTransport):
            raise TypeError("this transport was given a blocking one: use it with httpx.Client")
        return await self._inner.handle_async_request(self._marked(request))

    def close(self) -> None:
        """See httpx. The sessions stay open."""
        if isinstance(self._inner, httpx.BaseTransport):
            self._inner.close()

    async def aclose(self) -> None:
        """See httpx. The sessions stay open."""
        if isinstance(self._inner, httpx.AsyncBaseTransport):
            await self._inner.aclose()

    def _marked(self, request: httpx.Request) -> httpx.Request:
        named = request.headers.get(HEADER) or _session.get() or self._session_id
        if not named or request.method != "POST":
            return request
        headers = request.headers.copy()
        headers.setdefault(HEADER, named)
        if parent := _parent.get():
            headers.setdefault(PARENT_HEADERS[0], parent)
        self._sessions.warm(named)
        body = _with_xargs(request, named, parent) if self._in_body else None
        if body is None:
            request.headers = headers
            return request
        headers["Content-Length"] = str(len(body))
        headers.pop("Transfer-Encoding", None)  # of a stream that was read meanwhile: both would be two lengths
        return httpx.Request(request.method, request.url, headers=headers, content=body, extensions=request.extensions)


def _fit_for_headers(session_id: str) -> str:
    if session_id:
        check_id(session_id, "session id")
        if not session_id.isascii() or session_id != session_id.strip():
            raise Invalid("a session id travels in a header: it must be ASCII, without spaces around it")
    return session_id


def _with_xargs(request: httpx.Request, named: str, parent: str) -> bytes | None:
    """The body with the ids in `vllm_xargs`; None where it is no JSON object in memory."""
    try:
        content = request.content
    except httpx.RequestNotRead:
        return None
    fields = fields_of(content)
    ids = {FIELD: named} | ({PARENT_FIELD: parent} if parent else {})
    return None if fields is None else with_xargs(content, fields, ids)


class Items(Protocol):
    """The OpenAI Agents SDK's `Session`."""

    session_id: str

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """The conversation, or its last items."""
        ...

    async def add_items(self, items: list[Any]) -> None:
        """Append."""
        ...

    async def pop_item(self) -> Any:
        """Take the last one away."""
        ...

    async def clear_session(self) -> None:
        """Take all away."""
        ...


class KVSession:
    """Any session of the OpenAI Agents SDK, whose KV lives as it does: warmed when it is read, gone back with it, deleted with it.

    ::

        runner = Runner.run(agent, "...", session=KVSession(SQLiteSession("chat-42"), agents))

    Args:
        inner: What keeps the conversation.
        sessions: The way to the KV.
        namespace: Id of the session's namespace, where it has several.
    """

    def __init__(self, inner: Items, sessions: AgentSessions, *, namespace: str = "") -> None:
        self._inner, self._sessions, self._namespace = inner, sessions, namespace
        self._marks: list[tuple[int, int]] = []  # how many items there were when the KV had which version
        self._items = 0

    @property
    def session_id(self) -> str:
        """The inner one's."""
        return self._inner.session_id

    def __getattr__(self, name: str) -> Any:  # what else the SDK asks of a session
        return getattr(self._inner, name)

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """The conversation; its KV is on its way."""
        self._sessions.warm(self.session_id)
        items = await self._inner.get_items(limit)
        if limit is None:
            self._items = len(items)
        return items

    async def add_items(self, items: list[Any]) -> None:
        """Append. Where the KV stood before is remembered, so that `pop_item` can go back there: a second's wait at most."""
        before = self._items
        self._items += len(items)

        def note(kv: SyncClient) -> None:
            version = _version(kv, self.session_id, self._namespace)
            if version and (not self._marks or self._marks[-1][1] < version):
                self._marks.append((before, version))
                del self._marks[:-_REMEMBERED]

        await self._soon("get_session", note)
        await self._inner.add_items(items)

    async def pop_item(self) -> Any:
        """Take the last item away; the KV goes back to the last version that knew no more than what is left, within a second."""
        popped = await self._inner.pop_item()
        if popped is None:
            return None
        self._items = left = max(0, self._items - 1)

        def back(kv: SyncClient) -> None:
            self._marks[:] = [mark for mark in self._marks if mark[0] <= left]
            if not self._marks:
                return
            items, version = self._marks[-1]
            if _version(kv, self.session_id, self._namespace) > version:
                gone_back = kv.rewind(self.session_id, version=version, namespace=self._namespace)
                self._marks[-1] = (items, gone_back.version)

        await self._soon("rewind", back)
        return popped

    async def _soon(self, what: str, work: Callable[[SyncClient], None]) -> None:
        """Now, before the conversation goes on, or not at all: a rewind that came late would take away what came after it."""
        asked = self._sessions.bridge.call(what, work)
        if asked is None:
            return
        asking = asyncio.wrap_future(asked)
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())  # the bridge has said and counted it
        await asyncio.wait([asking], timeout=_SOON_S)
        asked.cancel()

    async def clear_session(self) -> None:
        """Take all away, the KV too."""
        await self._inner.clear_session()
        self._items = 0
        self._marks.clear()
        self._sessions.forget(self.session_id, namespace=self._namespace)


def _version(kv: SyncClient, session_id: str, namespace: str) -> int:
    try:
        return kv.get_session(session_id, namespace=namespace).version
    except (NotFound, Gone):
        return 0
