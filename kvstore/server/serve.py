"""Both faces of a node, for as long as its process is wanted."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import msgspec

from kvstore.config import Settings
from kvstore.errors import Invalid
from kvstore.server.app import HttpServer
from kvstore.server.limits import Limits
from kvstore.server.local import LocalServer
from kvstore.server.metrics import Metrics
from kvstore.server.ports import Service

log = logging.getLogger(__name__)
R = TypeVar("R")


class Faces(msgspec.Struct, frozen=True):
    """Where a node can be reached; "" where it has no such face.

    Attributes:
        url: Of the HTTP API, `http://127.0.0.1:7878`.
        socket: Path of the Unix socket.
    """

    url: str = ""
    socket: str = ""


@asynccontextmanager
async def faces(service: Service, settings: Settings) -> AsyncIterator[Faces]:
    """The faces that the settings ask for; at the end of the block what was accepted is drained, within `limits.drain`.

    Raises:
        Invalid: There is none, or one cannot be had.
        AlreadyExists: Another node has the port or the socket.
    """
    if not settings.node.listen and not settings.node.socket:
        raise Invalid("node.listen and node.socket are both empty: nobody could reach this node")
    limits = Limits(connections=settings.limits.connections, window=settings.dram.window, drain=settings.limits.drain)
    metrics, url = Metrics(), ""
    async with AsyncExitStack() as lifetime:
        if settings.node.socket:
            local = LocalServer.open(service, settings.node.socket, limits=limits, observe=metrics.observe)
            await lifetime.enter_async_context(local)
        if settings.node.listen:
            http = HttpServer.open(service, settings.node.listen, limits=limits, metrics=metrics)
            url = (await lifetime.enter_async_context(http)).url
        log.info("serving at %s", " and ".join(filter(None, (url, settings.node.socket))))
        yield Faces(url, settings.node.socket)


async def until_stopped() -> None:
    """Wait for SIGTERM or SIGINT; a second one ends the process without draining."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)


def run(main: Coroutine[Any, Any, R]) -> R:
    """As `asyncio.run`, on uvloop where it is installed."""
    try:
        import uvloop  # noqa: PLC0415  optional
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
