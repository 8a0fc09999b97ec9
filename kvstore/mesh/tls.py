"""Mutual TLS between nodes: each shows a certificate of the mesh's own authority, and checks the other's."""

from __future__ import annotations

import ipaddress
import logging
import ssl
import threading
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from kvstore.config import PeersSettings
from kvstore.errors import Invalid
from kvstore.mesh.members import Member

log = logging.getLogger(__name__)
REMEDY: Final = "peers.tls_cert, peers.tls_key and peers.tls_ca name PEM files; docs/mesh.md tells how to make them"


class _Made(msgspec.Struct, frozen=True):
    """Contexts, and what the files looked like that they were made of."""

    stamp: tuple[tuple[int, int], ...]
    client: ssl.SSLContext
    server: ssl.SSLContext


class PeerTls:
    """One node's certificate, and the authority whose certificates are believed. Files that change are read again.

    Whoever has a certificate of that authority is a peer. A node that connects also wants the other's certificate to name the
    address that it connected to, or the member that it asked for (`vouches`).

    Args:
        cert: PEM file of this node's certificate, and what stands between it and the authority.
        key: PEM file of its key, without a passphrase.
        ca: PEM file of the authority.

    Raises:
        Invalid: One of them is not there, or is none; or they do not belong together.
    """

    def __init__(self, cert: str, key: str, ca: str) -> None:
        self._files = [Path(each).expanduser() for each in (cert, key, ca)]
        self._lock = threading.Lock()
        self._refused: tuple[tuple[int, int], ...] = ()
        self._made = self._make(self._stamp())

    @classmethod
    def of(cls, settings: PeersSettings) -> Self | None:
        """As configured; None where nothing is. Raises `Invalid`."""
        return cls(settings.tls_cert, settings.tls_key, settings.tls_ca) if settings.tls_cert else None

    @property
    def client(self) -> ssl.SSLContext:
        """For a connection that this node makes. Any thread."""
        return self._fresh().client

    @property
    def server(self) -> ssl.SSLContext:
        """For one that it takes."""
        return self._fresh().server

    def _fresh(self) -> _Made:
        with self._lock:
            stamp = self._stamp()
            if stamp not in (self._made.stamp, self._refused):
                try:
                    self._made = self._make(stamp)
                    log.info("the certificate for peers was read again")
                except Invalid as error:  # it may be in the middle of being replaced
                    self._refused = stamp
                    log.warning("the certificate for peers changed, and is not used: %s", error.message)
            return self._made

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        found = []
        for file in self._files:
            try:
                status = file.stat()
                found.append((status.st_mtime_ns, status.st_size))
            except OSError:
                found.append((0, 0))
        return tuple(found)

    def _make(self, stamp: tuple[tuple[int, int], ...]) -> _Made:
        client, server = self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_SERVER)
        server.num_tickets = 0  # connections are kept: none is resumed
        return _Made(stamp, client, server)

    def _context(self, protocol: int) -> ssl.SSLContext:
        cert, key, ca = self._files
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # `vouches` does, for it may be the member's name as well
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(ca)
            context.load_cert_chain(cert, key, password=lambda: "")  # else it would ask at the terminal
        except OSError as error:
            raise Invalid(f"TLS between peers: {cert}, {key}, {ca}: {error}", remedy=REMEDY) from None
        return context


def vouches(connection: ssl.SSLSocket, member: Member) -> bool:
    """Whether the certificate at the other end names this member: its address, or its node id as a DNS name. No wildcards."""
    wanted = {member.host.lower(), member.node.lower()}
    names: Any = (connection.getpeercert() or {}).get("subjectAltName", ())  # pairs of texts
    for kind, name in names:
        if kind == "DNS" and name.lower() in wanted:
            return True
        if kind == "IP Address" and _address(name) == _address(member.host) is not None:
            return True
    return False


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
