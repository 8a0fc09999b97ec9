"""The socket's file: who may open it, and what happens to what lies in its place."""

import os
import socket
import stat
from pathlib import Path

import pytest
from fakes.raw_socket import url

import kvstore
from kvstore.errors import AlreadyExists, Invalid, Unavailable
from kvstore.server.local import LocalServer


def mode_of(path):
    return stat.S_IMODE(Path(path).stat().st_mode)


async def test_only_the_owner_may_open_the_socket(server, path):
    assert mode_of(path) == 0o600


async def test_another_mode_is_kept_whatever_the_umask(service, path):
    before = os.umask(0o077)
    try:
        async with LocalServer.open(service, path, mode=0o660):
            assert mode_of(path) == 0o660
    finally:
        os.umask(before)


async def test_a_second_node_does_not_take_the_socket(server, service, path):
    with pytest.raises(AlreadyExists):
        async with LocalServer.open(service, path):
            pass
    async with kvstore.open(url(path)) as kv:
        assert (await kv.health()).ok


async def test_a_foreign_listener_is_not_replaced(service, path):
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(path)
        foreign.listen()
        with pytest.raises(AlreadyExists, match="somebody listens"):
            async with LocalServer.open(service, path):
                pass


async def test_what_a_dead_node_left_is_replaced(service, path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    async with LocalServer.open(service, path), kvstore.open(url(path)) as kv:
        assert (await kv.health()).ok
    assert not Path(path).exists()  # noqa: ASYNC240  a test


async def test_a_file_that_is_no_socket_is_left_alone(service, tmp_path):
    path = tmp_path / "node.sock"
    path.write_text("mine")
    with pytest.raises(AlreadyExists, match="no socket"):
        async with LocalServer.open(service, str(path)):
            pass
    assert path.read_text() == "mine"


async def test_a_path_too_long_for_a_socket_is_said(service):
    with pytest.raises(Invalid, match="at most 107"):
        async with LocalServer.open(service, "/tmp/" + "x" * 120):
            pass


async def test_no_node_there(path):
    with pytest.raises(Unavailable, match="no node listens") as caught:
        async with kvstore.open(url(path)):
            pass
    assert "kvtier up" in caught.value.remedy
