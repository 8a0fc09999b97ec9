"""Who may ask over HTTP: this host's own programs, and no page of anybody's."""

import asyncio

import pytest

from kvstore.errors import AlreadyExists, Invalid
from kvstore.server.app import HttpServer


async def raw_request(server, head):
    """Status line and body of a hand-made request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "192.0.2.7:7878", "[::]:0", "example.com:80", "10.0.0.1:0"])
async def test_an_address_that_others_reach_is_refused(service, listen):
    with pytest.raises(Invalid, match="loopback only"):
        async with HttpServer.open(service, listen):
            pass


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7878", "127.0.0.1.evil.example", "", "[::1", "169.254.169.254"])
async def test_a_request_for_another_host_is_refused(server, service, host):
    answer = await raw_request(server, f"GET /v1/sessions/x HTTP/1.1\nHost: {host}\nConnection: close")
    assert answer.split()[1] in {b"403", b"400"}
    assert service.calls == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:7878", "[::1]:7878", "LOCALHOST:1"])
async def test_this_hosts_names_are_taken(server, host):
    answer = await raw_request(server, f"GET /healthz HTTP/1.1\nHost: {host}\nConnection: close")
    assert answer.split()[1] == b"200"


async def test_a_request_without_a_host_is_refused(server):
    answer = await raw_request(server, "GET /healthz HTTP/1.0")
    assert answer.split()[1] in {b"403", b"400"}


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""])
async def test_a_post_that_a_foreign_page_could_send_is_refused(http, service, content_type):
    for path in ("/v1/sessions/x/pin", "/v1/sessions/x/restore", "/v1/collect"):
        response, problem = await http("POST", path, data=b"{}", headers={"Content-Type": content_type})
        assert (response.status, problem["kind"]) == (415, "invalid")
    assert service.calls == []


async def test_no_other_origin_is_ever_allowed(http):
    response, _ = await http("OPTIONS", "/v1/sessions/x", headers={"Origin": "https://evil.example"})
    assert response.status == 405
    assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_port_in_use_is_said(server, service):
    with pytest.raises(AlreadyExists):
        async with HttpServer.open(service, server.url.removeprefix("http://")):
            pass
