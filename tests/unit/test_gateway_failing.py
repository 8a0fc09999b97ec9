"""Failures between a gateway and an engine, in words: never a Python object's own, and never more than a few."""

import socket

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from kvstore.errors import Unavailable
from kvstore.gateway.failing import has_died, told

SEVERAL = "Multiple exceptions: [Errno 111] Connect call failed ('10.1.2.3', 8000), [Errno 101] ..."  # asyncio's, without a number
KEY = ConnectionKey("engine-a.internal", 8000, False, True, None, None, None)


async def failure(url):
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientError) as found:
            await client.get(url)
    return found.value


async def test_who_is_not_there_refused_and_did_not_die():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        error = await failure(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert (told(error), has_died(error)) == ("connection refused", False)


@pytest.mark.parametrize(
    ("error", "words", "died"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), "connection reset by peer", False),
        (aiohttp.ClientOSError(104, "Connection reset by peer"), "connection reset by peer", True),
        (aiohttp.ServerDisconnectedError(), "closed the connection without an answer", True),
        (aiohttp.ClientPayloadError("x"), "closed the connection in the middle of an answer", True),
        (aiohttp.ServerTimeoutError("x"), "no answer in time", False),
        (TimeoutError(), "no answer in time", False),
        (aiohttp.ClientResponseError(None, (), status=400, message="bad"), "what it answers is not HTTP", False),
        (Unavailable("the node is away"), "the node is away", False),
        (aiohttp.ClientConnectorError(KEY, OSError(SEVERAL)), "cannot be reached", False),
        (OSError(SEVERAL), "OSError", False),
        (aiohttp.ClientOSError(SEVERAL), "ClientOSError", True),
        (aiohttp.InvalidURL("http://10.1.2.3:x"), "InvalidURL", False),
        (KeyError("content"), "KeyError: 'content'", False),
    ],
)
def test_failures_are_told_in_words(error, words, died):
    assert (told(error), has_died(error)) == (words, died)
