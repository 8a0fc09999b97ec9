"""Serves blocks of this node's tiers to its peers: a listener of its own, for addresses that are trusted by name."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Final, Self

import msgspec

from kvstore.clock import Clock
from kvstore.config import parse_address
from kvstore.errors import AlreadyExists, Invalid
from kvstore.ids import Shard
from kvstore.mesh import frames
from kvstore.mesh.networks import trusting
from kvstore.mesh.seldom import Seldom
from kvstore.mesh.sockets import peek, pour, readable, some, writable
from kvstore.mesh.tls import PeerTls
from kvstore.objects.gate import ByteGate
from kvstore.server.lending import Lending
from kvstore.service.plane import Plane, TenantTiers
from tiering import Movers, settled

log = logging.getLogger(__name__)
_TURN_S: Final = 0.01  # a thread waits so long for a peer to read on; then another is served
_BAD: Final = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class PeeringLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the listener.

    Attributes:
        connections: At a time, of all peers.
        from_one: Of one address: several nodes of one host have six each at most.
        lent: Bytes leased for peers at a time; of one tenant's memory at most a quarter.
        asked: Bytes of one request; what is beyond them is a miss (`full`).
        idle_s: A connection that asks for nothing for so long is closed.
        stall_s: A peer may keep a piece of an answer waiting for so long, and for as long as its bytes take at `slowest`.
        slowest: Bytes a second.
        tiers_s: For what is to come from the disk.
        through_s: For what is to come from the bucket.
        senders: Threads that send.
    """

    connections: int = 512
    from_one: int = 64
    lent: int = 256 << 20
    asked: int = 64 << 20
    idle_s: float = 60.0
    stall_s: float = 5.0
    slowest: float = 1e6
    tiers_s: float = 2.0
    through_s: float = 5.0
    senders: int = 2


class Peering:
    """The listener. Make one with `open`.

    Attributes:
        address: Where it listens, host and port.
        counts: Of connections and requests by how they ended, and of blocks by what was sent.
    """

    def __init__(
        self,
        listener: socket.socket,
        trusted: Callable[[str], bool],
        lending: Lending,
        tiers: Mapping[str, TenantTiers],
        limits: PeeringLimits,
        clock: Clock,
        tls: PeerTls | None,
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.address: tuple[str, int] = host, port
        self.counts: Counter[str] = lending.counts
        self._listener, self._trusted, self._lending, self._tiers, self._limits = listener, trusted, lending, tiers, limits
        self._threads = ThreadPoolExecutor(limits.senders, thread_name_prefix="kvtier-peer-send")
        self._visits: dict[asyncio.Task[None], str] = {}
        self._seldom, self._tls = Seldom(clock), tls

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        plane: Plane,
        tiers: Mapping[str, TenantTiers],
        movers: Movers,
        clock: Clock,
        owns: Callable[[bytes], bool],
        *,
        listen: str = "127.0.0.1:0",
        networks: tuple[str, ...] = (),
        limits: PeeringLimits | None = None,
        tls: PeerTls | None = None,
    ) -> AsyncIterator[Self]:
        """Listen until the end of the block; then what is under way is cut: a peer has other places to ask.

        Args:
            plane: For what its writers have published.
            tiers: By tenant.
            movers: Threads that code.
            clock: For deadlines.
            owns: Whether this node fetches a block from the bucket for all.
            listen: `host:port`; port 0 takes a free one.
            networks: Whose addresses may connect, such as `10.0.0.0/8`; none: this host's alone.
            limits: Bounds.
            tls: Whose certificates are believed; without, nobody is asked for one.

        Raises:
            Invalid: No such network or address, or an address beyond loopback with no networks.
            AlreadyExists: The port is taken.
        """
        limits = limits or PeeringLimits()
        trusted = trusting(networks)
        listener = _listening(listen, loopback_only=not networks)
        most = min([limits.lent, *(each.dram.limit // 4 for each in tiers.values())])
        gate = ByteGate(max(1, most), limits.tiers_s)
        lending = Lending(plane, tiers, movers, clock, owns, gate, tiers_s=limits.tiers_s, through_s=limits.through_s)
        self = cls(listener, trusted, lending, tiers, limits, clock, tls)
        accepting = asyncio.create_task(self._accept())
        try:
            yield self
        finally:
            accepting.cancel()
            for task in self._visits:
                task.cancel()
            await asyncio.gather(accepting, *self._visits, return_exceptions=True)
            listener.close()
            self._threads.shutdown()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, where = await loop.sock_accept(self._listener)
            except OSError as error:  # such as too many open files
                if self._seldom("accepting"):
                    log.warning("accepting a peer failed: %s", error)
                await asyncio.sleep(0.1)
                continue
            host = where[0]
            refused = (
                "untrusted"
                if not self._trusted(host)
                else "crowded"
                if len(self._visits) >= self._limits.connections
                or sum(each == host for each in self._visits.values()) >= self._limits.from_one
                else ""
            )
            self.counts[f"connections {refused or 'taken'}"] += 1
            if refused:
                sock.close()
                continue
            task = asyncio.create_task(self._visit(sock, host))
            self._visits[task] = host
            task.add_done_callback(lambda over: self._visits.pop(over, None))

    async def _visit(self, sock: socket.socket, host: str) -> None:
        """One connection, request by request."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, int(_TURN_S * 1e6)))
        try:
            if self._tls is not None:
                sock = secured = self._tls.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                await self._shake_hands(secured)
            while True:
                async with asyncio.timeout(self._limits.idle_s):
                    path, body = await _request(sock)
                if path == frames.BLOCKS:
                    await self._blocks(sock, msgspec.msgpack.decode(body, type=frames.Ask))
                elif path == frames.HOLDS:
                    await self._holds(sock, msgspec.msgpack.decode(body, type=bytes))
                else:
                    raise frames.Malformed(path[:80])  # noqa: TRY301  answered below, as all that is no request
        except (frames.Malformed, msgspec.MsgspecError, Invalid) as error:
            self.counts["requests malformed"] += 1
            if self._seldom("malformed"):
                log.warning("%s asked for nothing we know, and is refused: %s", host, error)
            with suppress(OSError):
                sock.send(_BAD)
        except TimeoutError:
            self.counts["connections idle or stalled"] += 1
        except _Unverified as error:
            self.counts["connections unverified"] += 1
            if self._seldom("unverified"):
                log.warning("%s connected, and shows no certificate of peers.tls_ca: %s", host, error)
        except (OSError, EOFError):
            pass  # it left
        finally:
            sock.close()

    async def _shake_hands(self, sock: ssl.SSLSocket) -> None:
        """Steps on a thread, for they compute; between them nothing waits for a peer but this task."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._limits.stall_s):
            while True:
                try:
                    await settled(loop.run_in_executor(self._threads, sock.do_handshake))
                except ssl.SSLWantReadError:
                    await readable(sock)
                except ssl.SSLWantWriteError:
                    await writable(sock)
                except ssl.SSLError as error:
                    raise _Unverified(error.reason or str(error)) from None
                else:
                    return

    async def _holds(self, sock: socket.socket, packed: bytes) -> None:
        if len(packed) % 32 or len(packed) > 32 * frames.MOST_KEYS:
            raise frames.Malformed(f"{len(packed)} bytes of keys")
        keys = [packed[at : at + 32] for at in range(0, len(packed), 32)]
        here = bytearray(len(keys))
        for each in self._tiers.values():
            for index, tier in enumerate(each.stack.locate(keys)):
                here[index] |= tier is not None
        self.counts["requests holds"] += 1
        await self._send(sock, [memoryview(frames.held_head(len(keys)) + here)])

    async def _blocks(self, sock: socket.socket, ask: frames.Ask) -> None:
        """Pieces in order: one is sent while the next is got ready."""
        count = len(ask.tokens)
        if not 1 <= count <= frames.MOST_BLOCKS or len(ask.prefixes) != 32 * count:
            raise frames.Malformed(f"{len(ask.prefixes)} bytes of prefixes for {count} blocks")
        shard = Shard.parse(ask.shard)
        self.counts["requests blocks"] += 1
        ahead = [memoryview(frames.ANSWER)]
        async with _noticing(sock), aclosing(self._lending.pieces(ask, shard, self._limits.asked)) as pieces:
            async for piece in pieces:
                behind = [memoryview(frames.LAST)] if piece.last else []
                try:
                    await self._send(sock, [*ahead, *piece.buffers, *behind])
                finally:
                    await piece.aclose()
                ahead = []

    async def _send(self, sock: socket.socket, buffers: list[memoryview]) -> None:
        """All of it, into the kernel: `send` copies, so that a lease ends with this and not with the peer's reading.

        Raises:
            TimeoutError: The peer does not read.
            OSError: It left.
        """
        rest = deque(buffers)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._limits.stall_s + sum(each.nbytes for each in buffers) / self._limits.slowest):
            while not await settled(loop.run_in_executor(self._threads, pour, sock, rest, _TURN_S)):
                await writable(sock)


class _Unverified(Exception):
    """Whoever connects is no peer."""


@asynccontextmanager
async def _noticing(sock: socket.socket) -> AsyncIterator[None]:
    """A peer that leaves while its answer is made ends the block with `ConnectionResetError`."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    left = False

    def notice() -> None:
        nonlocal left
        loop.remove_reader(sock.fileno())
        with suppress(BlockingIOError):
            left = not peek(sock)  # it may have the answer already, and ask for more
        if left:
            task.cancel()

    loop.add_reader(sock.fileno(), notice)
    try:
        yield
    except asyncio.CancelledError:
        if left and not task.uncancel():
            raise ConnectionResetError("the peer left") from None
        raise
    finally:
        loop.remove_reader(sock.fileno())


async def _request(sock: socket.socket) -> tuple[str, bytes]:
    """Path and body of the next request.

    Raises:
        Malformed: It is none that a peer makes.
        EOFError: There is none.
    """
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > frames.MOST_HEAD:
            raise frames.Malformed(f"a head of more than {frames.MOST_HEAD} bytes")
        data += await some(sock, frames.MOST_HEAD)
    path, length = _parsed(bytes(data[:end]))
    del data[: end + 4]
    while len(data) < length:
        data += await some(sock, min(length - len(data), 1 << 16))
    if len(data) > length:
        raise frames.Malformed("more than one request at a time")
    return path, bytes(data)


def _parsed(head: bytes) -> tuple[str, int]:
    line, *fields = head.decode("latin-1").split("\r\n")
    parts = line.split(" ")
    headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    length = headers.get("content-length", "")
    if len(parts) != 3 or parts[0] != "POST" or parts[2] != "HTTP/1.1" or headers.get("content-type") != frames.MEDIA_TYPE:
        raise frames.Malformed(f"no request of a peer: {line[:80]!r}")
    if not length.isascii() or not length.isdecimal() or len(length) > 9 or int(length) > frames.MOST_BODY:
        raise frames.Malformed(f"a body of {length[:20]!r} bytes")
    return parts[1], int(length)


def _listening(listen: str, *, loopback_only: bool) -> socket.socket:
    host, port = parse_address(listen)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if loopback_only and not ipaddress.ip_address(str(where[0])).is_loopback:
            raise Invalid(
                f"peers.listen is {listen!r}, beyond this host, and peers.networks is empty: no network is trusted",
                remedy="name the cluster's networks in peers.networks, or listen on 127.0.0.1",
            )
        sock = socket.create_server(where[:2], family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AlreadyExists(
                f"peers.listen is {listen!r}, which is in use", remedy="stop what listens there, or set another address"
            ) from None
        raise Invalid(f"peers.listen is {listen!r}: {error.strerror}", remedy="set an address of this host") from None
    sock.setblocking(False)
    return sock
