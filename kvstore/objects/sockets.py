"""HTTP/1.1 on sockets of our own, in threads: bodies go straight between the network and the caller's memory.

What obstore cannot do is done here: large bodies without a copy (1.4x on reads), the store's `Date`, listings and batch deletions
whose error documents are seen, and the error text that a HEAD does not carry.
"""

from __future__ import annotations

import asyncio
import http.client
import select
import socket
import ssl
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import msgspec

from kvstore.errors import Corrupt, Overloaded
from kvstore.objects.answers import no_answer
from kvstore.objects.base import Buffer
from kvstore.objects.settings import Endpoint

_CONNECT_S: Final = 5.0
_IDLE_S: Final = 15.0  # shorter than servers keep idle connections, so that a dead one is rarely picked
_SLICE: Final = 4 << 20


class Request(msgspec.Struct, frozen=True):
    """A signed request. `target` is path and query; `headers` include Host."""

    method: str
    target: str
    headers: dict[str, str]
    body: Buffer = b""

    @property
    def resendable(self) -> bool:
        """Whether sending it again after the connection broke does nothing new."""
        return self.method in {"GET", "HEAD"}


class Answer(msgspec.Struct, frozen=True):
    """Status, headers in lower case, and the body: in the caller's memory for a successful read, else bounded bytes of ours."""

    status: int
    headers: dict[str, str]
    body: memoryview

    @property
    def text(self) -> str:
        """The body as text, for error documents and listings."""
        return str(self.body, "utf-8", "replace")


class Sockets:
    """Connections to one host, kept alive between requests; each request runs in a thread of its own until its real end.

    Args:
        endpoint: The host.
        tls: Trust, for an https endpoint.
        connections: Threads.
    """

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, connections: int) -> None:
        self._endpoint, self._tls, self._most = endpoint, tls, connections
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="kvtier-s3")
        self._idle: deque[tuple[http.client.HTTPConnection, float]] = deque()
        self._lock = threading.Lock()

    async def send(
        self, request: Request, *, deadline_s: float, into: memoryview | None = None, limit: int = 1 << 20, abortable: bool = True
    ) -> Answer:
        """One request and its answer.

        When this returns or raises, the thread has ended and touches neither `into` nor the body any more. If the caller is
        cancelled, an abortable request is cut off; another one (a write) is awaited.

        Args:
            request: Sent once; a read is sent again, once, if a kept-alive connection turns out dead.
            deadline_s: Seconds from now, waiting for a thread included.
            into: Where the body of a 200 or 206 goes.
            limit: Most bytes of a body that does not go into `into`.
            abortable: See above.

        Raises:
            Unavailable: No usable answer; kind `timeout` after the deadline.
            Overloaded: No thread was free before the deadline; nothing was sent.
            Corrupt: The body is larger than `into`, or `limit`.
        """
        exchange = _Exchange(self, request, into, limit, deadline_s)
        queued = self._threads.submit(exchange.run)
        ended = asyncio.wrap_future(queued)
        late = False
        try:
            done, _ = await asyncio.wait({ended}, timeout=deadline_s)
            late = not done
        except asyncio.CancelledError:
            if abortable and not queued.cancel():
                exchange.abort()
            await until_over(ended)
            if not ended.cancelled():
                ended.exception()  # nobody else will look at it
            raise
        if late and not queued.cancel():
            exchange.abort()
        if await until_over(ended):
            raise asyncio.CancelledError
        if late and ended.cancelled():  # it never got its turn: the store has nothing to do with that
            raise Overloaded(f"{exchange.name}: waited {deadline_s:.0f} s for one of {self._most} connections to the store")
        if late and ended.exception() is not None:
            raise no_answer(exchange.name, f"no answer within {deadline_s:.0f} s", kind="timeout")
        return ended.result()

    async def aclose(self) -> None:
        """Wait for what is under way and close the connections."""
        await asyncio.to_thread(self._threads.shutdown)
        while self._idle:
            self._idle.pop()[0].close()

    def take(self) -> http.client.HTTPConnection | None:
        """A kept-alive connection on which nothing has arrived since its last answer; the most recent one first."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since = self._idle.pop()
            if time.monotonic() - since < _IDLE_S and not _readable(connection.sock):
                return connection
            connection.close()

    def keep(self, connection: http.client.HTTPConnection) -> None:
        """Give a connection back whose answer was read to its end."""
        with self._lock:
            if len(self._idle) < self._most:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    def connect(self) -> http.client.HTTPConnection:
        """A new connection."""
        host, port = self._endpoint.host, self._endpoint.port
        connection = (
            http.client.HTTPSConnection(host, port, timeout=_CONNECT_S, context=self._tls)
            if self._endpoint.tls
            else http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
        )
        connection.connect()
        return connection


class _Exchange:
    """One request on one connection, in one thread. `abort` may come from any other."""

    def __init__(self, sockets: Sockets, request: Request, into: memoryview | None, limit: int, deadline_s: float) -> None:
        self._sockets, self._request, self._into, self._limit, self._deadline = sockets, request, into, limit, deadline_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = False
        self.name = f"{request.method} {request.target.partition('?')[0]}"

    def abort(self) -> None:
        """Cut the connection: whatever the thread waits for ends now."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                with suppress(OSError):  # it may be over already
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # SSLSocket's own would pull the TLS state from under it

    def run(self) -> Answer:
        try:
            kept = self._sockets.take()
            if kept is not None:
                try:
                    return self._on(kept)
                except (http.client.RemoteDisconnected, ConnectionError):
                    if not self._request.resendable or self._aborted:
                        raise
            return self._on(self._sockets.connect())
        except ssl.SSLCertVerificationError as error:
            raise no_answer(self.name, error.verify_message, kind="untrusted_certificate") from error
        except TimeoutError as error:
            raise no_answer(self.name, "the connection timed out", kind="timeout") from error
        except (OSError, http.client.HTTPException) as error:
            raise no_answer(self.name, f"{type(error).__name__}: {error}") from error

    def _on(self, connection: http.client.HTTPConnection) -> Answer:
        with self._lock:
            self._socket = connection.sock
            if self._aborted:
                connection.close()
                raise ConnectionAbortedError("given up before it was sent")
        # Whoever waits keeps the deadline and cuts the connection; this is for a loop that died without doing so.
        connection.sock.settimeout(self._deadline)
        reusable = False
        try:
            response = self._send(connection)
            answer = self._receive(response)
            reusable = response.isclosed() and not response.will_close
            return answer
        finally:
            with self._lock:
                self._socket = None
            if reusable and not self._aborted:
                self._sockets.keep(connection)
            else:
                connection.close()

    def _send(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        request = self._request
        connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            connection.putheader(name, value)
        body = memoryview(request.body).cast("B")
        if request.method in {"PUT", "POST"}:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders()
        try:
            for at in range(0, len(body), _SLICE):
                connection.send(body[at : at + _SLICE])
        except (BrokenPipeError, ConnectionResetError):
            # A store may refuse a body before it is all there: its answer says why.
            return connection.getresponse()
        return connection.getresponse()

    def _receive(self, response: http.client.HTTPResponse) -> Answer:
        headers = {name.lower(): value for name, value in response.getheaders()}
        if self._into is None or response.status not in {200, 206}:
            return Answer(response.status, headers, self._bounded(response))
        length = response.length  # None where the server did not say
        if length is not None and length > len(self._into):
            raise Corrupt(f"{self.name}: {length} bytes where at most {len(self._into)} were expected")
        filled = 0
        while filled < len(self._into):
            got = response.readinto(self._into[filled : filled + _SLICE])
            if got == 0:
                break
            filled += got
        if length is None and filled == len(self._into) and response.read(1):
            raise Corrupt(f"{self.name}: more than the {filled} bytes that were expected")
        if length is not None and filled < length:
            raise no_answer(self.name, f"the connection ended after {filled} of {length} bytes")
        return Answer(response.status, headers, self._into[:filled])

    def _bounded(self, response: http.client.HTTPResponse) -> memoryview:
        body = response.read(self._limit + 1)
        if len(body) > self._limit:
            raise Corrupt(f"{self.name}: an answer of more than {self._limit} bytes")
        return memoryview(body)


async def until_over(ended: asyncio.Future[Any]) -> bool:
    """Wait for the real end, however often this task is cancelled meanwhile; True if it was."""
    cancelled = False
    while not ended.done():
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled and not ended.cancelled():
        ended.exception()  # nobody else will look at it
    return cancelled


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
