"""What a node needs of its peers, and whether it is there: a port, networks, the directory or the other nodes."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Final

from kvstore.cli.machine import Finding
from kvstore.config import PeersSettings, is_loopback, parse_address, static_peers
from kvstore.directory_url import DirectoryUrl
from kvstore.errors import Invalid
from kvstore.mesh.link import Links
from kvstore.mesh.members import Member
from kvstore.mesh.patience import within
from kvstore.mesh.tls import PeerTls

_DIRECTORY_S: Final = 3.0
_NO_KEY: Final = bytes(32)


async def examine(peers: PeersSettings, node: str, environ: Mapping[str, str]) -> AsyncIterator[Finding]:
    """Everything that can be known about the mesh from here; nothing where this node is part of none.

    Args:
        peers: Its settings.
        node: This node's id.
        environ: Where the directory's credentials are.
    """
    if not peers.listen:
        return
    host, port = parse_address(peers.listen, "peers.listen")
    if not peers.networks and not is_loopback(host):
        yield Finding(
            name="networks",
            status="fail",
            detail=f"peers.networks is empty, and peers.listen is {peers.listen}",
            remedy='name whose addresses may connect, like networks = ["10.0.0.0/8"]',
        )
    try:
        async with Links.open(networks=peers.networks, tls=PeerTls.of(peers)) as links:
            yield await _listening(host, port, links)
            if peers.directory:
                yield await _directory(peers.directory, environ)
            others = static_peers(peers.static)
            if others and node not in others:
                yield Finding(
                    name="static",
                    status="warn",
                    detail=f"peers.static does not name this node, {node}",
                    remedy="set node.id to this node's name in the list, and keep the list the same everywhere",
                )
            for name, address in others.items():
                if name != node:
                    yield await _peer(Member(name, 0, *address), links)
    except Invalid as error:
        yield Finding(name="peers", status="fail", detail=error.message, remedy=error.remedy)


async def _listening(host: str, port: int, links: Links) -> Finding:
    where = f"{host}:{port}"
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the node does
            probe.bind((host, port))
            probe.listen()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            remedy = "name an address of this machine in peers.listen"
            return Finding(name="peers.listen", status="fail", detail=f"{where}: {error.strerror}", remedy=remedy)
    else:
        return Finding(name="peers.listen", status="ok", detail=f"{where} is free")
    why = await _silence(Member("who listens there", 0, host, port), links)
    if why:
        remedy = "choose another port, unless it is this node that listens there"
        return Finding(name="peers.listen", status="warn", detail=f"{where} is taken, by whom is not known: {why}", remedy=remedy)
    return Finding(name="peers.listen", status="ok", detail=f"a node listens at {where}: this one, if it runs")


async def _peer(other: Member, links: Links) -> Finding:
    name, where = f"peer {other.node}", f"{other.host}:{other.port}"
    why = await _silence(other, links)
    if not why:
        return Finding(name=name, status="ok", detail=f"{where} answers")
    remedy = "start it; if it runs: is this node's address in its peers.networks, and the port open?"
    return Finding(name=name, status="warn", detail=f"{where} does not answer: {why}", remedy=remedy)


async def _silence(member: Member, links: Links) -> str:
    """Why it does not answer; "" where it does."""
    try:
        await links.holds(member, [_NO_KEY])
    except Exception as error:  # noqa: BLE001  whatever it is, it is no answer
        return str(error) or "no answer in time"
    return ""


async def _directory(text: str, environ: Mapping[str, str]) -> Finding:
    url = DirectoryUrl.parse(text)
    where = f"{url.host}:{url.port}"
    try:
        from kvstore.mesh.server import Server  # noqa: PLC0415  its client is an extra
    except ModuleNotFoundError as error:
        remedy = "pip install 'kvtier[mesh]'"
        return Finding(name="directory", status="fail", detail=f"it needs the package {error.name}", remedy=remedy)
    server = Server(url, environ)
    try:
        await within(_DIRECTORY_S, server.ask([("PING",)]))
    except Exception as error:  # noqa: BLE001  whatever the library raises
        why = str(error)[:200] or type(error).__name__
        remedy = "start it, or correct peers.directory; until it answers nodes do not find each other"
        return Finding(name="directory", status="fail", detail=f"{where} does not answer: {why}", remedy=remedy)
    finally:
        await server.aclose()
    return Finding(name="directory", status="ok", detail=f"{where} answers")
