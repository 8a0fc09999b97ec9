"""A TCP proxy before an S3 server that cuts the connection where chosen answers would have come, once the server has given them."""

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class CuttingProxy:
    """Speaks just enough HTTP/1.1 to tell where a request and its answer end.

    Attributes:
        cuts: Asked for each answered request with (method, path); True cuts the answer off.
        alters: Given each answer's body with (method, path, body), gives the body that goes on.
        done: (method, path, status) of every answer that was cut.
    """

    def __init__(self, endpoint):
        where = urlsplit(endpoint)
        self._host, self._port = where.hostname, where.port
        self.cuts = lambda method, path: False
        self.alters = lambda method, path, body: body
        self.done = []

    @classmethod
    @asynccontextmanager
    async def open(cls, endpoint):
        proxy = cls(endpoint)
        server = await asyncio.start_server(proxy._client, "127.0.0.1", 0)
        proxy.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield proxy
        finally:
            server.close()

    async def _client(self, reader, writer):
        upstream = None
        try:
            upstream_reader, upstream = await asyncio.open_connection(self._host, self._port)
            while await self._exchange(reader, writer, upstream_reader, upstream):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # either side left
        finally:
            for end in (writer, upstream):
                if end is not None:
                    end.close()

    async def _exchange(self, reader, writer, upstream_reader, upstream):
        """One request and its answer. False when the connection is over."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, path = head.split(b" ", 2)[:2]
        upstream.write(head + await _body(reader, _fields(head)))
        await upstream.drain()
        answer_head = await upstream_reader.readuntil(b"\r\n\r\n")
        status = int(answer_head.split(b" ", 2)[1])
        bodiless = method == b"HEAD" or status in {204, 304}
        body = b"" if bodiless else await _body(upstream_reader, _fields(answer_head))
        answer = answer_head + self.alters(method.decode(), path.decode(), body)
        if self.cuts(method.decode(), path.decode()):
            self.done.append((method.decode(), path.decode(), status))
            return False
        writer.write(answer)
        await writer.drain()
        return True


def _fields(head):
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


async def _body(reader, fields):
    if fields.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(fields.get("content-length", 0)))
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        body += line + await reader.readexactly(size + 2)
        if size == 0:
            return body
