"""A node's HTTP face as a stranger meets it."""

import json

import aiohttp
import pytest
from fakes.http_face import LIMITS, NS, block_path
from fakes.node import fake_service, links_of, pattern
from yarl import URL

from kvstore.server.app import HttpServer


@pytest.fixture
async def service():
    async with fake_service() as service:
        service.plane.namespaces[NS.id] = NS
        yield service


@pytest.fixture
async def server(service):
    async with HttpServer.open(service, "127.0.0.1:0", limits=LIMITS) as server:
        yield server


@pytest.fixture
async def http(server):
    async with aiohttp.ClientSession() as session:

        async def ask(method, path, **options):
            async with session.request(method, URL(server.url + path, encoded=True), **options) as response:
                body = await response.read()
                return response, (json.loads(body) if "json" in response.content_type else body)

        yield ask


@pytest.fixture
def link():
    return links_of(NS, 1)[0]


@pytest.fixture
async def stored(http, link):
    """A block, put over HTTP: (link, its raw object)."""
    payload = pattern(link, 65600)
    response, taken = await http("PUT", block_path(link), data=payload)
    assert (response.status, taken) == (200, {"taken": True})
    response, body = await http("GET", block_path(link))
    assert response.status == 200
    return link, body
