"""What is done with a connection between peers, with TLS on it or without."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from typing import Final

_BUFFERS: Final = 64  # of one system call


def fill(sock: socket.socket, room: memoryview) -> int:
    """On a thread: wait until `room` is full. How much of it is: less where the other side ended. Raises `OSError`."""
    if not isinstance(sock, ssl.SSLSocket):
        return sock.recv_into(room, 0, socket.MSG_WAITALL)
    filled = 0
    while filled < len(room) and (more := sock.recv_into(room[filled:])):  # a record at a time, 16 KiB at most
        filled += more
    return filled


def pour(sock: socket.socket, rest: deque[memoryview], turn_s: float) -> bool:
    """On a thread: send what the kernel takes now, and wait a moment for it to take more. Whether all is sent.

    Args:
        sock: Without TLS its `SO_SNDTIMEO` is that moment.
        rest: What is to be sent, and afterwards what still is.
        turn_s: That moment, with TLS.
    """
    secured = isinstance(sock, ssl.SSLSocket)
    sock.settimeout(turn_s if secured else None)  # without: the kernel's own deadline holds
    try:
        while rest:
            sent = sock.send(rest[0]) if secured else sock.sendmsg([rest[at] for at in range(min(_BUFFERS, len(rest)))])
            while rest and sent >= rest[0].nbytes:
                sent -= rest.popleft().nbytes
            if sent:
                rest[0] = rest[0][sent:]
    except (BlockingIOError, TimeoutError):
        return False
    finally:
        sock.setblocking(False)
    return True


async def some(sock: socket.socket, most: int) -> bytes:
    """The next bytes of a socket that does not block. Raises `EOFError` at its end, and `OSError`."""
    while True:
        try:
            got = sock.recv(most)
        except (BlockingIOError, ssl.SSLWantReadError):
            await readable(sock)
            continue
        if not got:
            raise EOFError
        return got


def peek(sock: socket.socket) -> bytes:
    """A byte that has come and was not read, whatever it means; b"" where the other side left. Raises `BlockingIOError`."""
    try:
        return socket.socket.recv(sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except ConnectionError:
        return b""


def cut(sock: socket.socket) -> None:
    """From any thread: whoever waits for this connection ends. Raises `OSError`."""
    # Not TLS's own: that would go on as a plain connection, and what is still to be read would be taken for what was said.
    socket.socket.shutdown(sock, socket.SHUT_RDWR)


async def readable(sock: socket.socket) -> None:
    """Wait for something to come, or for the end."""
    loop, ready = asyncio.get_running_loop(), _Ready()
    loop.add_reader(sock.fileno(), ready.now)
    try:
        await ready.future
    finally:
        loop.remove_reader(sock.fileno())


async def writable(sock: socket.socket) -> None:
    """Wait for the kernel to take more."""
    loop, ready = asyncio.get_running_loop(), _Ready()
    loop.add_writer(sock.fileno(), ready.now)
    try:
        await ready.future
    finally:
        loop.remove_writer(sock.fileno())


class _Ready:
    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def now(self) -> None:
        if not self.future.done():
            self.future.set_result(None)
