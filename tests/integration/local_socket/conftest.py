"""A node's service on a socket, and clients that send what they like."""

import asyncio

import pytest
from fakes.node import fake_service
from fakes.raw_socket import LIMITS, Raw

from kvstore import wire
from kvstore.server.local import LocalServer


@pytest.fixture
async def service():
    async with fake_service("default", "acme") as service:
        yield service


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "node.sock")


@pytest.fixture
async def server(service, path):
    async with LocalServer.open(service, path, limits=LIMITS) as server:
        yield server


@pytest.fixture
def raw(path, server):
    made = []

    async def make(hello=True):
        client = await asyncio.to_thread(Raw, path)
        made.append(client)
        if hello:
            assert isinstance(await asyncio.to_thread(client.hello), wire.Welcome)
        return client

    yield make
    for client in made:
        client.close()
