"""The Unix socket of a node: who may come in, and what each is handed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Self

from kvstore import wire
from kvstore.access import Access, everything
from kvstore.errors import Corrupt, Denied, KVTierError, Overloaded, Unsupported
from kvstore.fairness import Shares
from kvstore.server.awake import Awake
from kvstore.server.connection import Connection
from kvstore.server.limits import STANDARD, Limits
from kvstore.server.observe import Observe, unobserved
from kvstore.server.ports import Service
from kvstore.server.socketfile import Peer, listening, peer_of
from kvstore.server.window import Window

log = logging.getLogger(__name__)
OWNER_ONLY: Final = 0o600
_PAUSE_S: Final = 0.1  # after an accept that failed, as it does when descriptors run out


class LocalServer:
    """Serves engines on this host. Make one with `open`."""

    def __init__(self, service: Service, limits: Limits, observe: Observe) -> None:
        self._service, self._limits, self._observe = service, limits, observe
        self._connections: set[Connection] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._shares = Shares(limits.connections, limits.tenants)
        self._awake = Awake(lambda: service.plane.copying)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, service: Service, path: str, *, mode: int = OWNER_ONLY, limits: Limits = STANDARD, observe: Observe = unobserved
    ) -> AsyncIterator[Self]:
        """Listen at `path` until the end of the block; then drain what was accepted, within `limits.drain`.

        Args:
            service: The node.
            path: Of the socket file.
            mode: Of the socket file; only its owner's processes may connect, unless it says otherwise.
            limits: Bounds.
            observe: Told of every request.

        Raises:
            AlreadyExists: Another node listens there.
            Invalid: No socket can be made there.
        """
        server = cls(service, limits, observe)
        with listening(path, mode) as listener:
            accepting = asyncio.create_task(server._accept(listener))
            try:
                yield server
            finally:
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
                await server._drain()

    @property
    def connections(self) -> int:
        """Clients that were welcomed and are still here."""
        return len(self._connections)

    @property
    def leases(self) -> int:
        """Leases of all of them."""
        return sum(connection.leases for connection in self._connections)

    async def _accept(self, listener: socket.socket) -> None:
        loop, refusing = asyncio.get_running_loop(), False
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                if not refusing:  # said once, not ten times a second
                    log.warning("connections cannot be accepted: %s", error)
                refusing = True
                await asyncio.sleep(_PAUSE_S)
                continue
            refusing = False
            task = asyncio.create_task(self._serve(accepted))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _drain(self) -> None:
        for connection in self._connections:
            connection.stop()
        if self._serving:
            _, late = await asyncio.wait(self._serving, timeout=self._limits.drain)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _serve(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            connection = await self._welcome(accepted)
        except Exception as error:
            if not isinstance(error, (OSError, EOFError, KVTierError)):
                log.exception("a client could not be welcomed")
            accepted.close()
            return
        except BaseException:
            accepted.close()
            raise
        self._connections.add(connection)
        try:
            await connection.run()
        except Exception:
            log.exception("a connection ended by a defect")
        finally:
            self._connections.discard(connection)
            self._shares.leave(connection.tenant)

    async def _welcome(self, accepted: socket.socket) -> Connection:
        peer = peer_of(accepted)
        try:
            if len(self._serving) > 2 * self._limits.connections:
                raise self._crowded()  # twice as many, so that a client of a tenant that has room left may say whose it is
            async with asyncio.timeout(self._limits.hello):
                hello = await _hello(accepted)
            self._admit(hello, peer)
            if not self._shares.enter(hello.tenant):
                raise self._crowded()
        except KVTierError as error:
            log.warning("refusing pid %d of uid %d: %s", peer.pid, peer.uid, error.message)
            with contextlib.suppress(OSError):
                accepted.send(wire.frame(wire.Fault(0, error.problem())))
            raise
        try:
            return await self._enter(accepted, hello.tenant, peer)
        except BaseException:
            self._shares.leave(hello.tenant)
            raise

    def _crowded(self) -> Overloaded:
        return Overloaded(f"{self._limits.connections} clients are connected; raise [limits] connections")

    def _admit(self, hello: wire.Hello, peer: Peer) -> None:
        wire.check_versions(self._service.version, hello.version)
        if hello.protocol != wire.PROTOCOL:
            raise Unsupported(f"protocol {hello.protocol}; this node speaks {wire.PROTOCOL}", kind="version_mismatch")
        if not self._service.plane.allowed(peer.uid, hello.tenant):
            raise Denied(f"user {peer.uid} may not act for tenant {hello.tenant!r}: add it to [tenants.{hello.tenant}] uids")

    async def _enter(self, accepted: socket.socket, tenant: str, peer: Peer) -> Connection:
        service = self._service
        arena = service.plane.arena(tenant)
        window = Window(int(self._limits.window))
        try:
            welcome = wire.Welcome(wire.PROTOCOL, service.version, service.node_id, arena.size, window.size)
            frame = wire.frame(welcome)
            # Nothing was sent on this socket before, so a frame this small never waits for room.
            if socket.send_fds(accepted, [frame], [arena.fd, window.fd]) != len(frame):
                raise ConnectionError("the welcome did not fit the socket's buffer")  # noqa: TRY301  the window is closed below
            connection = Connection(
                service=service,
                access=_access(tenant, peer),
                who=f"pid {peer.pid} of uid {peer.uid}",
                accepted=accepted,
                window=window,
                limits=self._limits,
                observe=self._observe,
                awake=self._awake,
            )
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except BaseException:
            window.close()
            raise
        return connection


def _access(tenant: str, peer: Peer) -> Access:
    """The node's own user may everything; others may read and write what is the tenant's."""
    return everything(tenant) if peer.uid == os.geteuid() else Access(tenant, frozenset({"read", "write"}))


async def _hello(accepted: socket.socket) -> wire.Hello:
    """The first frame; it may not be long. Raises `EOFError` where the client goes away instead."""
    length = wire.body_length(await _exactly(accepted, 4), wire.MAX_HELLO)
    message = wire.parse_to_node(await _exactly(accepted, length))
    if not isinstance(message, wire.Hello):
        raise Corrupt("the first message must be a hello")
    return message


async def _exactly(accepted: socket.socket, nbytes: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < nbytes:
        part = await loop.sock_recv(accepted, nbytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data
