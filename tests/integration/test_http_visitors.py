"""Connections over HTTP that ask for nothing: they are few, and not kept."""

import asyncio
import json
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from fakes.node import fake_service

from kvstore.server.app import HttpServer
from kvstore.server.limits import Limits
from kvstore.server.problems import problems

LIMITS = Limits(hello=0.3, requests=2, upload=0.3, drain=5)
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@asynccontextmanager
async def serving(**limits):
    """`await connect()` gives reader and writer of a new connection to it."""
    writers = []
    bounds = msgspec.structs.replace(LIMITS, **limits)
    async with fake_service("default") as service, HttpServer.open(service, "127.0.0.1:0", limits=bounds) as server:

        async def connect(say=b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writers.append(writer)
            writer.write(say)
            return reader, writer

        yield connect
        for writer in writers:
            writer.close()


async def status(reader):
    """Of the next answer, read to its end; 0 where there is none."""
    async with asyncio.timeout(20):
        line = await reader.readline()
        length = 0
        while (header := await reader.readline()).strip():
            name, _, value = header.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        await reader.readexactly(length)
    return int(line.split()[1]) if line else 0


@pytest.mark.parametrize("beginning", [b"", b"GET", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
async def test_a_first_request_that_does_not_arrive_is_not_waited_for(beginning):
    async with serving() as connect:
        reader, _ = await connect(beginning)
        assert await status(reader) == 0


async def test_who_was_served_may_stay():
    async with serving() as connect:
        reader, writer = await connect(HEALTH)
        assert await status(reader) == 200
        await asyncio.sleep(1)
        writer.write(HEALTH)
        assert await status(reader) == 200


async def test_the_silent_keep_nobody_out_for_long():
    async with serving(hello=2.0) as connect:
        silent = [await connect(b"GET") for _ in range(4)]
        await asyncio.sleep(0.1)
        refused, _ = await connect(HEALTH)
        assert await status(refused) == 503
        for reader, _ in silent:
            assert await status(reader) == 0
        served, _ = await connect(HEALTH)
        assert await status(served) == 200


async def test_a_body_that_does_not_arrive_is_not_waited_for():
    head = b"POST /v1/lookup HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    async with serving() as connect:
        reader, _ = await connect(head)
        async with asyncio.timeout(20):
            answer = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in answer.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            problem = await reader.readexactly(length)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(problem)["kind"] == "invalid"


async def test_who_leaves_before_the_answer_is_no_defect_of_ours(caplog):
    async def answer(request):
        raise ConnectionResetError("Cannot write to closing transport")

    request = make_mocked_request("GET", "/v1/blocks")
    request.transport.is_closing.return_value = True
    assert (await problems(request, answer)).status == 499
    assert not caplog.records
    request.transport.is_closing.return_value = False  # then it is another connection that was reset
    assert (await problems(request, answer)).status == 500
    assert caplog.records
