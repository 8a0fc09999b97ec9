"""Meeting a node on its Unix socket: who is there, which version, and the two pieces of shared memory it hands over."""

from __future__ import annotations

import array
import asyncio
import contextlib
import mmap
import os
import socket
from importlib.metadata import version

import msgspec

from kvstore import wire
from kvstore.client.transport import START
from kvstore.errors import Corrupt, Denied, Unavailable

_FDS = 2


class Met(msgspec.Struct, frozen=True):
    """A node that said welcome.

    Attributes:
        socket: Connected, non-blocking; nothing was read past the welcome.
        arena: The tenant's blocks, mapped read-only.
        window: This connection's write window.
    """

    socket: socket.socket
    welcome: wire.Welcome
    arena: mmap.mmap
    window: mmap.mmap


async def meet(path: str, tenant: str, *, timeout_s: float) -> Met:
    """Connect and shake hands.

    Raises:
        Unavailable: Nobody listens there, or they do not answer.
        Denied: This user may not open the socket, or not act for the tenant.
        Unsupported: Kind `version_mismatch`.
        Corrupt: What answers is no node.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    fds: list[int] = []
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(connection, path)
            hello = wire.Hello(wire.PROTOCOL, version("kvtier"), tenant)
            await asyncio.get_running_loop().sock_sendall(connection, wire.frame(hello))
            welcome = await _welcome(connection, fds)
        arena, window = _mapped(welcome, fds)
        return Met(connection, welcome, arena, window)
    except PermissionError:
        connection.close()
        raise Denied(f"{path}: this user may not open the node's socket") from None
    except TimeoutError:
        connection.close()
        raise Unavailable(f"{path}: the node did not answer within {timeout_s:g} s", kind="timeout") from None
    except OSError as error:
        connection.close()
        raise Unavailable(f"{path}: no node listens there ({error.strerror or error})", remedy=START) from None
    except BaseException:
        connection.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


async def _welcome(connection: socket.socket, fds: list[int]) -> wire.Welcome:
    """The first frame, and the descriptors that came with it, appended to `fds`."""
    data = bytearray()
    need = 4
    while len(data) < need:
        await _readable(connection)
        with contextlib.suppress(BlockingIOError):
            part, ancillary, flags, _ = connection.recvmsg(need - len(data), socket.CMSG_SPACE(4 * _FDS), socket.MSG_CMSG_CLOEXEC)
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds += array.array("i", content[: len(content) // 4 * 4])
            if not part:
                raise Unavailable("the node closed the connection during the handshake")
            if flags & socket.MSG_CTRUNC:
                raise Corrupt("the handshake carried more descriptors than expected")
            data += part
            if len(data) == 4:
                need = 4 + wire.body_length(bytes(data))
    match wire.parse_to_client(bytes(data[4:])):
        case wire.Welcome() as welcome if len(fds) == _FDS and welcome.protocol == wire.PROTOCOL:
            return welcome
        case wire.Fault(problem=problem):
            raise problem.error()
        case _:
            raise Corrupt("the handshake was not answered with a welcome of this protocol")


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())


def _mapped(welcome: wire.Welcome, fds: list[int]) -> tuple[mmap.mmap, mmap.mmap]:
    """Both pieces, mapped. A file shorter than it says would end this process by SIGBUS, so it is measured first."""
    arena, window = fds
    for fd, claimed in ((arena, welcome.arena_bytes), (window, welcome.window_bytes)):
        if not 0 < claimed <= os.fstat(fd).st_size:
            raise Corrupt(f"the node says {claimed} bytes of shared memory, and its file has {os.fstat(fd).st_size}")
    return (
        mmap.mmap(arena, welcome.arena_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ),
        mmap.mmap(window, welcome.window_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    )
