"""From a storage URL to a client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from typing import Any, Final

from kvstore.client.aio import Client
from kvstore.client.local import LocalTransport
from kvstore.client.sync import SyncClient
from kvstore.client.transport import Transport
from kvstore.config import StorageUrl
from kvstore.errors import Unsupported

GROUP: Final = "kvtier.transports"  # entry points: scheme -> `async def (url: StorageUrl) -> Transport`


async def connect(url: str) -> Client:
    """A client of the node that a storage URL names; close it with `aclose`.

    Args:
        url: `kvtier+unix:///path/of/socket`, `kvtier://host:port`, `s3://bucket/prefix?...` (a node inside this process), or
            `memory://name`.

    Raises:
        Invalid: The URL is wrong; the message says where.
        Unavailable: Nobody answers there.
        Unsupported: The node's version is too far away, or what the scheme needs is not installed.
    """
    return Client(await _transport(StorageUrl.parse(url)))


@asynccontextmanager
async def open(url: str) -> AsyncIterator[Client]:  # noqa: A001  `kvstore.open` is the name
    """As `connect`, for `async with kvstore.open(url) as kv:`."""
    async with await connect(url) as client:
        yield client


def open_sync(url: str) -> SyncClient:
    """As `connect`, blocking: `with kvstore.open_sync(url) as kv:`."""
    return SyncClient.open(lambda: connect(url))


async def _transport(url: StorageUrl) -> Transport:
    if url.scheme == "kvtier+unix":
        return await LocalTransport.open(url.path, tenant=url.tenant)
    if url.scheme == "kvtier":
        from kvstore.client.http import HttpTransport  # noqa: PLC0415  its aiohttp is needed by this scheme only

        return await HttpTransport.open(url)
    # What embeds a node is found by name, never imported: a client without it must work.
    for entry in entry_points(group=GROUP, name=url.scheme):
        return await _embedded(entry.load, url)
    raise Unsupported(f"nothing that is installed serves {url.scheme}:// URLs", remedy="pip install 'kvtier[embed]'")


async def _embedded(load: Any, url: StorageUrl) -> Transport:
    try:
        embed = load()
    except ImportError as error:
        raise Unsupported(
            f"{url.scheme}:// embeds a node, which needs {error.name or error}", remedy="pip install 'kvtier[embed]'"
        ) from error
    transport: Transport = await embed(url)
    return transport
