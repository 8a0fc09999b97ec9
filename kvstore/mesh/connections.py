"""Connections to one peer: how they are made, and those that are kept for the next exchange."""

from __future__ import annotations

import asyncio
import ipaddress
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from kvstore.mesh.members import Member
from kvstore.mesh.tls import PeerTls, vouches

_IDLE_S: Final = 20.0  # shorter than the listener keeps a connection


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what is had from peers.

    Attributes:
        threads: Connections at work at a time, to all peers together; as many again that wait for a peer to read from the bucket.
        connections: Idle connections kept to one peer.
        connect_s: For a connection to be made.
        silent_s: A peer that sends nothing for so long is cut off, whatever else is expected of it.
    """

    threads: int = 8
    connections: int = 4
    connect_s: float = 1.0
    silent_s: float = 10.0


class Connections:
    """To one member.

    Args:
        member: Whom.
        settings: Bounds.
        trusted: Whether that may be at an address.
        tls: What both show each other; without, connections are plain.
    """

    def __init__(self, member: Member, settings: LinkSettings, trusted: Callable[[str], bool], tls: PeerTls | None) -> None:
        self._member, self._settings, self._trusted, self._tls = member, settings, trusted, tls
        self._idle: deque[tuple[socket.socket, float]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    async def dialled(self) -> socket.socket:
        """A new connection, which does not block. Raises `OSError`."""
        host, port = self._member.host, self._member.port
        loop, failed = asyncio.get_running_loop(), OSError(f"{self.host!r} is no address")
        async with asyncio.timeout(self._settings.connect_s):
            try:
                found = _known(host, port)
                if not found:
                    looked_up = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                    found = [(each[0], (str(each[4][0]), port)) for each in looked_up]
            except (ValueError, OverflowError) as error:  # whoever said that it is an address
                raise OSError(f"{self.host!r} is no address: {error}") from None
            for family, where in found:
                if not self._trusted(str(where[0])):
                    failed = OSError(f"{where[0]}, the address of {self._member.node}, is in no network of peers.networks")
                    continue
                sock = socket.socket(family, socket.SOCK_STREAM)
                sock.setblocking(False)
                try:
                    await loop.sock_connect(sock, where)
                except OSError as error:
                    failed = error
                    sock.close()
                except BaseException:
                    sock.close()
                    raise
                else:
                    return sock
        raise failed

    def close(self) -> None:
        """Let go of idle connections, and keep none from now on."""
        with self._lock:
            self._closed = True
            idle = [sock for sock, _ in self._idle]
            self._idle.clear()
        for sock in idle:
            sock.close()

    # --- on threads ---

    @property
    def host(self) -> str:
        """As requests name it."""
        host = self._member.host
        return f"[{host}]:{self._member.port}" if ":" in host else f"{host}:{self._member.port}"

    def take(self) -> socket.socket | None:
        """A kept connection on which nothing has arrived; the most recent one first."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                sock, since = self._idle.pop()
            if time.monotonic() - since < _IDLE_S and not _readable(sock):
                return sock
            sock.close()

    def keep(self, sock: socket.socket) -> None:
        """Give a connection back on which nothing is under way."""
        with self._lock:
            if not self._closed and len(self._idle) < self._settings.connections:
                self._idle.append((sock, time.monotonic()))
                return
        sock.close()

    def prepared(self, sock: socket.socket) -> socket.socket:
        """A new one, as an exchange needs it. Raises `OSError`."""
        settings = self._settings
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            return self._secured(sock, self._tls)
        # Wait in the kernel, and for so long at most: Python's own timeouts would poll before every read.
        sock.settimeout(None)
        most = struct.pack("@ll", int(settings.silent_s), int(settings.silent_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, most)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, most)
        return sock

    def _secured(self, sock: socket.socket, tls: PeerTls) -> ssl.SSLSocket:
        """With TLS on it, to whom it is meant for. Raises `OSError`."""
        sock.settimeout(self._settings.connect_s)
        secured = tls.client.wrap_socket(sock)
        if not vouches(secured, self._member):
            secured.close()
            raise OSError(f"the certificate at {self.host} names neither that address nor {self._member.node}")
        secured.settimeout(self._settings.silent_s)
        return secured


def _known(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Where an address is; nothing for a name, which has to be looked up."""
    try:
        return [(socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6, (host, port))]
    except ValueError:
        return []


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
