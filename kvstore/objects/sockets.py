"""HTTP/1.1 on sockets of our own, in threads: bodies go straight between the network and the caller's memory.

What obstore cannot do is done here: large bodies without a copy (1.4x on reads), the store's `Date`, listings and batch deletions
whose error documents are seen, and the error text that a HEAD does not carry.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Final

import msgspec

from kvstore.errors import KVTierError, Overloaded
from kvstore.objects.answers import no_answer
from kvstore.objects.base import Arrived, Buffer
from kvstore.objects.http1 import Answer, Broken, Connection, Landing, NoAnswer
from kvstore.objects.settings import Endpoint
from kvstore.objects.threads import Call, Threads

_CONNECT_S: Final = 5.0
_IDLE_S: Final = 15.0  # shorter than servers keep idle connections, so that a dead one is rarely picked


class Request(msgspec.Struct, frozen=True):
    """A signed request. `target` is path and query; `headers` include Host."""

    method: str
    target: str
    headers: dict[str, str]
    body: Buffer = b""

    def head(self, body: int) -> bytes:
        """As it is sent, ahead of a body of so many bytes."""
        fields = [f"{name}: {value}" for name, value in self.headers.items()]
        if self.method in {"PUT", "POST"}:
            fields.append(f"content-length: {body}")
        return "\r\n".join([f"{self.method} {self.target} HTTP/1.1", *fields, "", ""]).encode("latin-1")

    @property
    def resendable(self) -> bool:
        """Whether sending it again after the connection broke does nothing new."""
        return self.method in {"GET", "HEAD"}


class Sockets:
    """Connections to one host, kept alive between requests; each request runs in a thread of its own until its real end.

    Args:
        endpoint: The host.
        tls: Trust, for an https endpoint.
        connections: At most, and as many threads.

    Attributes:
        threads: Those that move bodies.
    """

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, connections: int) -> None:
        self._endpoint, self._tls, self._most = endpoint, tls, connections
        self.threads = Threads("kvtier-s3", connections)
        self._idle: deque[tuple[Connection, float]] = deque()
        self._lock = threading.Lock()

    async def send(
        self,
        request: Request,
        *,
        deadline_s: float,
        into: memoryview | None = None,
        limit: int = 1 << 20,
        arrived: Arrived | None = None,
        abortable: bool = True,
    ) -> Answer:
        """One request and its answer.

        When this returns or raises, the thread has ended and touches neither `into` nor the body any more. If the caller is
        cancelled, an abortable request is cut off; another one (a write) is awaited.

        Args:
            request: Sent once; a read is sent again, once, if a kept-alive connection turns out dead.
            deadline_s: Seconds from now, waiting for a thread included.
            into: Where the body of a 200 or 206 goes.
            limit: Most bytes of a body that does not go into `into`.
            arrived: As :meth:`kvstore.objects.base.ObjectStore.get` has it.
            abortable: See above.

        Raises:
            Unavailable: No usable answer; kind `timeout` after the deadline.
            Overloaded: No thread was free before the deadline; nothing was sent.
            Corrupt: The body is larger than `into`, or `limit`.
        """
        exchange = _Exchange(self, request, Landing(into, limit, arrived), deadline_s)
        call = self.threads.start(exchange.run)
        deadline = asyncio.get_running_loop().call_later(deadline_s, exchange.expire, call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            if abortable and not call.withdraw():
                exchange.abort()
            await call.settled()
            raise
        except KVTierError as error:
            if exchange.late and not isinstance(error, Overloaded):
                raise no_answer(exchange.name, f"no answer within {deadline_s:.0f} s", kind="timeout") from error
            raise
        finally:
            deadline.cancel()

    async def aclose(self) -> None:
        """Wait for what is under way and close the connections."""
        await self.threads.aclose()
        while self._idle:
            self._idle.pop()[0].close()

    def take(self) -> Connection | None:
        """A kept-alive connection on which nothing has arrived since its last answer; the most recent one first."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since = self._idle.pop()
            if time.monotonic() - since < _IDLE_S and not _readable(connection.sock):
                return connection
            connection.close()

    def keep(self, connection: Connection) -> None:
        """Give a connection back whose answer was read to its end."""
        with self._lock:
            if len(self._idle) < self._most:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    def connect(self) -> Connection:
        """A new connection."""
        sock = socket.create_connection((self._endpoint.host, self._endpoint.port), timeout=_CONNECT_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._endpoint.host)
        except BaseException:
            sock.close()
            raise
        return Connection(sock)


class _Exchange:
    """One request on one connection, in one thread. `abort` may come from any other."""

    def __init__(self, sockets: Sockets, request: Request, landing: Landing, deadline_s: float) -> None:
        self._sockets, self._request, self._landing, self._deadline = sockets, request, landing, deadline_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = False
        self.late = False
        self.name = f"{request.method} {request.target.partition('?')[0]}"

    def abort(self) -> None:
        """Cut the connection: whatever the thread waits for ends now."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                with suppress(OSError):  # it may be over already
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # SSLSocket's own would pull the TLS state from under it

    def expire(self, call: Call[Answer]) -> None:
        """The deadline is over."""
        self.late = True
        if not call.withdraw():
            self.abort()
        elif not call.answer.done():  # it never got its turn: the store has nothing to do with that
            call.answer.set_exception(
                Overloaded(f"{self.name}: waited {self._deadline:.0f} s for one of the store's connections to be free")
            )

    def run(self) -> Answer:
        try:
            kept = self._sockets.take()
            if kept is not None:
                try:
                    return self._on(kept)
                except (NoAnswer, ConnectionError):
                    if not self._request.resendable or self._aborted:
                        raise
                    if self._landing.arrived is not None:
                        self._landing.arrived(0, 0)
            return self._on(self._sockets.connect())
        except ssl.SSLCertVerificationError as error:
            raise no_answer(self.name, error.verify_message, kind="untrusted_certificate") from error
        except (TimeoutError, BlockingIOError) as error:
            raise no_answer(self.name, "the connection timed out", kind="timeout") from error
        except (OSError, Broken) as error:
            raise no_answer(self.name, f"{type(error).__name__}: {error}") from error

    def _on(self, connection: Connection) -> Answer:
        with self._lock:
            self._socket = connection.sock
            if self._aborted:
                connection.close()
                raise ConnectionAbortedError("given up before it was sent")
        try:
            connection.bound(self._deadline)  # whoever waits cuts the connection; this is for a loop that died without doing so
            body = memoryview(self._request.body).cast("B")
            connection.send(self._request.head(len(body)), body)
            return connection.receive(self._request.method, self._landing, self.name)
        finally:
            with self._lock:
                self._socket = None
            if connection.reusable and not self._aborted:
                self._sockets.keep(connection)
            else:
                connection.close()


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
