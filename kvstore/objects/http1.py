"""HTTP/1.1, as much of it as object stores speak: a request, an answer, and a body that goes straight to the caller's memory.

`http.client` would do it too, at a price: it reads heads through a buffer of its own and copies, parses headers as e-mail (0.1 ms
an answer), and polls before every read. Here an answer costs one small read, and a body one read for each slice of it, in the
kernel until the slice is full: the interpreter's lock is taken up as rarely as can be.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from typing import Final

import msgspec

from kvstore.errors import Corrupt
from kvstore.objects.base import Arrived

SLICE: Final = 1 << 20
"""Bytes of a body between two reports of what has arrived; twice as many where that takes no time, for each report costs.

The last one may tell of half as much more.
"""
_NO_TIME_S: Final = 0.005
_ROOM: Final = 4 << 10  # a head fits, and little of a body comes along that must be copied
_MOST_HEAD: Final = 64 << 10
_MOST_LINE: Final = 1 << 10
_NO_BODY: Final = frozenset({204, 304})


class Broken(Exception):
    """This is not HTTP, or it ended too early."""


class NoAnswer(Broken):
    """It ended before the first byte of an answer."""


class Answer(msgspec.Struct, frozen=True):
    """Status, headers in lower case, and the body: in the caller's memory for a successful read, else bounded bytes of ours."""

    status: int
    headers: dict[str, str]
    body: memoryview

    @property
    def text(self) -> str:
        """The body as text, for error documents and listings."""
        return str(self.body, "utf-8", "replace")


class Landing(msgspec.Struct, frozen=True):
    """Where a body may go.

    Attributes:
        into: For that of a 200 or 206.
        limit: Most bytes of any other.
        arrived: Told of `into`'s progress.
    """

    into: memoryview | None = None
    limit: int = 1 << 20
    arrived: Arrived | None = None


class Connection:
    """One connection, used by one thread at a time.

    Attributes:
        sock: Its socket, which blocks, with deadlines of the kernel's.
        reusable: Whether the last answer was read to its end and another request may follow.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reusable = False
        self._plain = not isinstance(sock, ssl.SSLSocket)
        self._bound = 0.0
        self._slice = SLICE

    def bound(self, seconds: float) -> None:
        """A single read or write takes so long at most: in the kernel, for Python's own timeouts poll before every read."""
        if seconds == self._bound:
            return
        self._bound = seconds
        if not self._plain:
            self.sock.settimeout(seconds)
            return
        self.sock.settimeout(None)
        most = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, most)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, most)

    def send(self, head: bytes, body: memoryview) -> None:
        """A request."""
        self.reusable = False
        if not body:
            self.sock.sendall(head)
            return
        try:
            self.sock.sendall(head, socket.MSG_MORE if self._plain else 0)
            for at in range(0, len(body), 4 * SLICE):
                self.sock.sendall(body[at : at + 4 * SLICE])
        except (BrokenPipeError, ConnectionResetError):
            pass  # a store may refuse a body before it is all there: its answer says why

    def receive(self, method: str, landing: Landing, name: str) -> Answer:
        """The answer.

        Raises:
            Broken: There is none, or only a part.
            Corrupt: Its body is larger than where it may go.
            OSError: As sockets do; BlockingIOError after the deadline.
        """
        status, headers, rest = self._head()
        body = _Body(self.sock, rest, self._plain, self._slice)
        closes = headers.pop(":version", "") == "HTTP/1.0" or "close" in headers.get("connection", "").lower()
        into = landing.into if status in {200, 206} else None
        if method == "HEAD" or status in _NO_BODY:
            found = memoryview(b"")
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            found = body.chunked(into, landing, name)
        elif "content-length" in headers:
            found = body.sized(_length(headers["content-length"]), into, landing, name)
        else:
            closes, found = True, body.to_the_end(into, landing, name)
        self.reusable, self._slice = not closes and not body.rest, body.slice
        return Answer(status, headers, found)

    def close(self) -> None:
        """Let go of it."""
        self.sock.close()

    def _head(self) -> tuple[int, dict[str, str], memoryview]:
        """Status, headers, and what has come of the body."""
        room, filled = bytearray(_ROOM), 0
        while True:
            got = self.sock.recv_into(memoryview(room)[filled:])
            if not got:
                raise Broken("the connection ended inside an answer's head") if filled else NoAnswer("the connection ended")
            filled += got
            while (end := room.find(b"\r\n\r\n", 0, filled)) >= 0:
                status, headers = _parsed(bytes(room[:end]))
                rest = bytes(room[end + 4 : filled])
                if status >= 200:
                    return status, headers, memoryview(rest)
                room[: len(rest)], filled = rest, len(rest)  # 100 Continue and its kin say nothing
            if filled == len(room):
                if filled >= _MOST_HEAD:
                    raise Broken(f"an answer's head of more than {_MOST_HEAD} bytes")
                room.extend(bytes(len(room)))


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    line, *fields = head.decode("latin-1").split("\r\n")
    version, _, rest = line.partition(" ")
    if version not in {"HTTP/1.1", "HTTP/1.0"} or not rest[:3].isdecimal() or rest[3:4] not in {"", " "}:
        raise Broken(f"no HTTP answer: {line[:80]!r}")
    headers = {":version": version}
    for field in fields:
        name, colon, value = field.partition(":")
        if not colon or not name or name != name.strip():
            raise Broken(f"no HTTP header: {field[:80]!r}")
        name, value = name.lower(), value.strip()
        if name == "content-length" and headers.get(name, value) != value:
            raise Broken("two lengths of one body")
        headers[name] = value
    return int(rest[:3]), headers


def _length(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise Broken(f"no length of a body: {text[:40]!r}")
    return int(text)


class _Body:
    """What follows a head. `rest` is what was read and not yet used, `slice` how much is read at once."""

    def __init__(self, sock: socket.socket, rest: memoryview, plain: bool, slice: int) -> None:  # noqa: A002  it is one
        self.rest, self.slice = rest, slice
        self._sock = sock
        self._plain = plain

    def sized(self, length: int, into: memoryview | None, landing: Landing, name: str) -> memoryview:
        _fits(length, into, landing, name)
        target = memoryview(bytearray(length)) if into is None else into[:length]
        filled = self._fill(target, 0, None if into is None else landing.arrived)
        if filled < length:
            raise Broken(f"the connection ended after {filled} of {length} bytes")
        return target

    def to_the_end(self, into: memoryview | None, landing: Landing, name: str) -> memoryview:
        """A body that ends with its connection."""
        room = memoryview(bytearray(landing.limit)) if into is None else into
        filled = self._fill(room, 0, None if into is None else landing.arrived)
        if filled == len(room) and self._some(memoryview(bytearray(1))):
            _fits(filled + 1, into, landing, name)
        return room[:filled]

    def chunked(self, into: memoryview | None, landing: Landing, name: str) -> memoryview:
        kept, filled = bytearray(), 0
        while size := self._chunk_size():
            _fits(filled + size, into, landing, name)
            if into is None:
                part = memoryview(bytearray(size))
                got = self._fill(part, 0, None)
                kept += part[:got]
            else:
                got = self._fill(into[: filled + size], filled, landing.arrived) - filled
            if got < size or self._line():
                raise Broken("the connection ended inside a chunk")
            filled += size
        while self._line():
            pass  # trailers
        return memoryview(kept) if into is None else into[:filled]

    def _fill(self, target: memoryview, filled: int, arrived: Arrived | None) -> int:
        """Fill `target` from there; where it ended."""
        while filled < len(target):
            left, begun = len(target) - filled, time.monotonic()
            got = self._some(target[filled : filled + (self.slice if 2 * left > 3 * self.slice else left)])  # no small rest
            if not got:
                break
            if got >= SLICE:
                self.slice = 2 * SLICE if time.monotonic() - begun < _NO_TIME_S else SLICE
            filled += got
            if arrived is not None:
                arrived(filled - got, filled)
        return filled

    def _some(self, target: memoryview) -> int:
        filled = min(len(self.rest), len(target))
        target[:filled], self.rest = self.rest[:filled], self.rest[filled:]
        if self._plain:
            return filled + self._sock.recv_into(target[filled:], 0, socket.MSG_WAITALL) if filled < len(target) else filled
        while filled < len(target) and (got := self._sock.recv_into(target[filled:])):  # TLS hands out record by record: 16 KiB
            filled += got
        return filled

    def _chunk_size(self) -> int:
        text = self._line().partition(b";")[0].strip()
        try:
            return int(text, 16) if len(text) <= 16 and not text.startswith((b"-", b"+")) else 1 << 64
        except ValueError:
            raise Broken(f"no size of a chunk: {text[:20]!r}") from None

    def _line(self) -> bytes:
        line = bytes(self.rest)
        while (end := line.find(b"\r\n")) < 0:
            more = self._sock.recv(_ROOM)
            line += more
            if not more or len(line) > _MOST_LINE + _ROOM:
                raise Broken("a chunk without an end of line")
        self.rest = memoryview(line)[end + 2 :]
        return line[:end]


def _fits(length: int, into: memoryview | None, landing: Landing, name: str) -> None:
    if into is not None and length > len(into):
        raise Corrupt(f"{name}: {length} bytes where at most {len(into)} were expected")
    if into is None and length > landing.limit:
        raise Corrupt(f"{name}: an answer of more than {landing.limit} bytes")
