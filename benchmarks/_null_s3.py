"""An S3 server that costs next to nothing: it keeps what is PUT in memory and sends it back, ranges too.

Only for measuring clients: it checks no signatures, knows no conditions, and says to every HEAD that there is nothing. Run as a
process of its own it prints its port. Given the PEM files of a certificate and of its key, it speaks TLS.
"""

from __future__ import annotations

import mmap
import os
import socket
import ssl
import sys
import threading
from http import HTTPStatus

_HEAD_LIMIT = 64 << 10
_DATE = b"Mon, 30 Nov 2026 00:00:00 GMT"


class _Objects:
    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[int, int]] = {}  # descriptor of an anonymous file, and length

    def put(self, key: bytes, connection: socket.socket, begun: bytes, length: int) -> None:
        """Keep a body, the first bytes of which have come already."""
        file = os.memfd_create("object")
        os.write(file, begun)
        left, room = length - len(begun), bytearray(1 << 20)
        while left:
            got = connection.recv_into(room, min(left, len(room)))
            if not got:
                raise ConnectionError
            os.write(file, memoryview(room)[:got])
            left -= got
        before = self._kept.get(key)
        self._kept[key] = (file, length)
        if before is not None:
            os.close(before[0])

    def get(self, key: bytes) -> tuple[int, int] | None:
        """Descriptor and length."""
        return self._kept.get(key)


def _serve(connection: socket.socket, objects: _Objects, tls: ssl.SSLContext | None) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pending = b""
    try:
        if tls is not None:
            connection = tls.wrap_socket(connection, server_side=True)
        while True:
            while b"\r\n\r\n" not in pending:
                got = connection.recv(_HEAD_LIMIT)
                if not got:
                    return
                pending += got
            head, _, pending = pending.partition(b"\r\n\r\n")
            request, *lines = head.split(b"\r\n")
            method, key, _ = request.split(b" ")
            headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
            if method == b"PUT":
                objects.put(key, connection, pending, int(headers[b"content-length"]))
                pending = b""
                connection.sendall(_head(HTTPStatus.OK, 0))
                continue
            found = objects.get(key) if method == b"GET" else None
            if found is None:
                body = b"<Error><Code>NoSuchKey</Code></Error>"
                connection.sendall(_head(HTTPStatus.NOT_FOUND, len(body)) + (body if method == b"GET" else b""))
                continue
            file, size = found
            start, end, status, more = 0, size, HTTPStatus.OK, b""
            if b"range" in headers:
                first, _, last = headers[b"range"].removeprefix(b"bytes=").partition(b"-")
                start, end, status = int(first), min(size, int(last) + 1), HTTPStatus.PARTIAL_CONTENT
                more = b"content-range: bytes %d-%d/%d\r\n" % (start, end - 1, size)
            head = _head(status, end - start, more)
            if isinstance(connection, ssl.SSLSocket):
                connection.sendall(head)
                connection.sendall(memoryview(mmap.mmap(file, size, prot=mmap.PROT_READ))[start:end])
                continue
            connection.sendall(head, socket.MSG_MORE)
            while start < end:
                start += os.sendfile(connection.fileno(), file, start, end - start)
    except (ConnectionError, ssl.SSLError):
        pass
    finally:
        connection.close()


def _head(status: HTTPStatus, length: int, more: bytes = b"") -> bytes:
    lines = b'HTTP/1.1 %d %s\r\ncontent-length: %d\r\netag: "e"\r\nlast-modified: %s\r\naccept-ranges: bytes\r\n%s\r\n'
    return lines % (status, status.phrase.encode(), length, _DATE, more)


def main() -> None:
    """Serve until standard input ends."""
    objects, tls = _Objects(), None
    if sys.argv[1:]:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*sys.argv[1:])
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def accept() -> None:
        while True:
            threading.Thread(target=_serve, args=(listener.accept()[0], objects, tls), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
