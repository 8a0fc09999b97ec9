"""A TCP proxy that lets only so many bytes a second through, all connections together: a slow link before a fast store."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self
from urllib.parse import urlsplit

PIECE = 64 << 10


class Link:
    """The link. Only what comes from the server is slowed down.

    Attributes:
        endpoint: URL to use instead of the server's.
        rate: Bytes per second from now on; 0: as fast as it goes.
    """

    def __init__(self, endpoint: str) -> None:
        where = urlsplit(endpoint)
        self._host, self._port = where.hostname, where.port
        self.endpoint, self.rate = "", 0.0
        self._free = 0.0
        self._clients = set[asyncio.Task[None]]()  # a loop holds its tasks weakly

    @classmethod
    @contextmanager
    def open(cls, endpoint: str) -> Iterator[Self]:
        """On a loop of its own, in a thread."""
        link, loop = cls(endpoint), asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(link._client, "127.0.0.1", 0), loop).result()
        link.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield link
        finally:
            server.get_loop().call_soon_threadsafe(server.close)
            asyncio.run_coroutine_threadsafe(_end(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)
        upstream_reader, upstream = await asyncio.open_connection(self._host, self._port)
        try:
            await asyncio.gather(self._pass(reader, upstream, slow=False), self._pass(upstream_reader, writer, slow=True))
        except ConnectionError:
            pass  # either side left
        finally:
            writer.close()
            upstream.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        while data := await reader.read(PIECE):
            if slow and self.rate:
                now = time.monotonic()
                self._free = max(now, self._free) + len(data) / self.rate
                if self._free - now > 0.001:
                    await asyncio.sleep(self._free - now)
            writer.write(data)
            await writer.drain()
        with suppress(OSError, RuntimeError):
            writer.write_eof()


async def _end() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
