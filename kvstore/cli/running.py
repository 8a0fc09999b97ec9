"""A node with its faces, from the first signal of life until it has drained."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Annotated, TypeAlias

import msgspec
import typer

from kvstore.cli import output
from kvstore.cli.machine import memory_limit
from kvstore.config import Settings
from kvstore.errors import Invalid
from kvstore.node import Node
from kvstore.server import logs
from kvstore.server.app import HttpServer
from kvstore.server.limits import Limits
from kvstore.server.local import LocalServer
from kvstore.server.logs import LogFormat
from kvstore.server.metrics import Metrics
from kvstore.server.peering import Peering

LogOption: TypeAlias = Annotated[
    str, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error; to stderr.")
]
LogFormatOption: TypeAlias = Annotated[
    LogFormat, typer.Option("--log-format", help="Lines for people, or JSON, which has a line for each request, too.")
]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node can be reached now. Empty where it has no such face.

    Attributes:
        url: Of the Unix socket, for engines on this host.
        http: Of the HTTP API, as a storage URL.
        store: Storage URL of its bucket.
    """

    event: str = "ready"
    node: str
    url: str
    http: str
    store: str
    pid: int


def log_to_stderr(level: str, form: LogFormat = LogFormat.text) -> None:
    """Lines with time, level and origin. Raises `typer.BadParameter` for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise typer.BadParameter(f"{level!r} is not one of debug, info, warning, error", param_hint="--log-level")
    logs.log_to_stderr(number, form)


async def run_node(settings: Settings, announce: Callable[[Ready], None]) -> None:
    """Run until SIGTERM or SIGINT, then drain; a second signal ends the process at once.

    Args:
        settings: The node's.
        announce: Called once it answers.

    Raises:
        KVTierError: As :meth:`kvstore.node.Node.open`, and where an address or socket path is taken.
    """
    refuse_more_memory_than_there_is(settings)
    stop = stop_on_signals()
    limits = Limits(
        connections=settings.limits.connections,
        window=settings.dram.window,
        drain=settings.limits.drain,
        tenants=max(1, len(settings.tenants)),
    )
    async with Node.open(settings) as node, AsyncExitStack() as faces:
        metrics, url, http = Metrics(), "", ""
        if settings.node.socket:
            await faces.enter_async_context(
                LocalServer.open(node.service, settings.node.socket, limits=limits, observe=metrics.observe)
            )
            url = f"kvtier+unix://{settings.node.socket}"
        if settings.node.listen:
            server = await faces.enter_async_context(
                HttpServer.open(
                    node.service,
                    settings.node.listen,
                    limits=limits,
                    metrics=metrics,
                    auth=settings.auth,
                    tls=settings.tls,
                    clock=node.clock,
                    background=node.background,
                )
            )
            node.health.ask("access", server.wrong)
            scheme, _, address = server.url.partition("://")
            http = f"kvtier://{address}{'?tls=true' if scheme == 'https' else ''}"
        if node.mesh is not None:
            await faces.enter_async_context(
                Peering.open(
                    node.service.plane,
                    node.tiers,
                    node.movers,
                    node.clock,
                    node.mesh.peers.owns,
                    listen=settings.peers.listen,
                    networks=settings.peers.networks,
                    tls=node.mesh.tls,
                )
            )
            await faces.enter_async_context(node.joined(node.mesh))
        # What was loaded by now stays for good. The garbage collector need not walk it again: that stops everything for tens of ms.
        gc.collect()
        gc.freeze()
        announce(Ready(node=node.service.node_id, url=url, http=http, store=settings.store.url, pid=os.getpid()))
        await stop.wait()
        typer.echo(f"stopping: what was accepted gets {settings.limits.drain} s to become durable (again: stop at once)", err=True)


def refuse_more_memory_than_there_is(settings: Settings) -> None:
    """An arena is shared memory, made real while the node serves: too large a one would end in the kernel's out-of-memory killer.

    Raises:
        Invalid: `dram.size` is more than what this process may still take.
    """
    left, by = memory_limit()
    if settings.dram.size > left:
        raise Invalid(f"dram.size is {output.size(settings.dram.size)}, and {by} leaves {output.size(left)}: lower dram.size")


def stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process at once."""
    stop = asyncio.Event()

    def handle(number: signal.Signals) -> None:
        if stop.is_set():
            typer.echo("stopped at once: what was not durable yet is lost", err=True)
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, handle, number)
    return stop
