"""One peer over TCP: its connections, and how bytes come from it. What is asked of whom is decided elsewhere (`peers`).

A thread for each connection at work. The one that receives also digests, a slice at a time while it is in the cache: meanwhile the
kernel takes in what follows. Handing slices to another thread was no faster on two cores, and two connections use two.
"""

from __future__ import annotations

import asyncio
import ipaddress
import select
import socket
import ssl
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, Generic, Protocol, Self, TypeVar

import msgspec
import numpy as np

from kvstore import codec
from kvstore.errors import Corrupt, KVTierError
from kvstore.ids import pack_prefixes
from kvstore.mesh import frames
from kvstore.mesh.delivery import Delivery
from kvstore.mesh.members import Member
from kvstore.mesh.networks import trusting
from kvstore.mesh.sockets import cut, fill
from kvstore.mesh.tls import PeerTls, vouches
from kvstore.objects.threads import until_over
from tiering import Miss

T = TypeVar("T")
SLICE: Final = 512 << 10  # fits a core's cache; smaller ones cost more calls than they gain
_IDLE_S: Final = 20.0  # shorter than the listener keeps a connection
_HOLDS_S: Final = 0.25


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


class Carried(msgspec.Struct, frozen=True):
    """What one exchange brought.

    Attributes:
        nbytes: On the line.
        seconds: Reading them, without waiting for the peer to have them ready.
        failed: Why it ended early; "" where it did not, or was cut because nobody wanted the rest.
    """

    nbytes: int
    seconds: float
    failed: str = ""


class Link(Protocol):
    """How bytes come from one peer. TCP's is :class:`TcpLink`."""

    async def carry(self, batch: Sequence[Delivery], *, through: bool, speed: int) -> Carried:
        """Ask for blocks of one shard of one namespace, and fill their places as they come.

        What was begun has ended when this returns. What was not, because the exchange failed or was cut, is as it was.
        Whoever is cancelled cuts it. Raises nothing else.

        Args:
            batch: At most `frames.MOST_BLOCKS`.
            through: See :class:`kvstore.mesh.frames.Ask`, as `speed`.
            speed: Bytes a second.
        """
        ...

    async def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these the peer has in its tiers.

        Raises:
            OSError: It is out of reach, or does not say so in time (`TimeoutError`).
            Malformed: What it says is no answer.
        """
        ...


class Links:
    """Links to the members of a mesh, and the threads that they share."""

    def __init__(self, settings: LinkSettings, trusted: Callable[[str], bool], tls: PeerTls | None) -> None:
        self.settings, self.trusted, self.tls = settings, trusted, tls
        self.threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="kvtier-peer")
        # Who waits for a bucket must not keep others from what is there; questions are short, and must not wait for blocks.
        self.waiters = ThreadPoolExecutor(settings.threads, thread_name_prefix="kvtier-peer-through")
        self.askers = ThreadPoolExecutor(settings.threads, thread_name_prefix="kvtier-peer-ask")
        self._links: dict[Member, TcpLink] = {}

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: LinkSettings | None = None, *, networks: Sequence[str] = (), tls: PeerTls | None = None
    ) -> AsyncIterator[Self]:
        """For the length of the block. Whoever uses them has left by its end.

        Args:
            settings: Bounds.
            networks: Where members may be, whatever a directory says; none: on this host.
            tls: What members have to show, and are shown; without, connections are plain.

        Raises:
            Invalid: No such network.
        """
        links = cls(settings or LinkSettings(), trusting(networks), tls)
        try:
            yield links
        finally:
            links.keep(())
            for pool in (links.threads, links.waiters, links.askers):
                await asyncio.to_thread(pool.shutdown)

    def to(self, member: Member) -> TcpLink:
        """The link to a member."""
        link = self._links.get(member)
        if link is None:
            link = self._links[member] = TcpLink(member, self)
        return link

    def keep(self, members: Sequence[Member]) -> None:
        """Forget all others."""
        for member in self._links.keys() - set(members):
            self._links.pop(member).close()

    async def holds(self, member: Member, keys: Sequence[bytes]) -> list[bool]:
        """See :meth:`Link.holds`."""
        return await self.to(member).holds(keys)


class TcpLink:
    """See :class:`Link`."""

    def __init__(self, member: Member, links: Links) -> None:
        self._member, self._links = member, links
        self._idle: deque[tuple[socket.socket, float]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    async def carry(self, batch: Sequence[Delivery], *, through: bool, speed: int) -> Carried:
        """See :meth:`Link.carry`."""
        exchange = _Blocks(self, batch, _ask(batch, through=through, speed=speed))
        for delivery in batch:
            delivery.left = exchange.left
        try:
            return await self._exchanged(self._links.waiters if through else self._links.threads, exchange)
        except OSError as error:  # no connection could be made
            return Carried(0, 0.0, f"{type(error).__name__}: {error}")

    async def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """See :meth:`Link.holds`."""
        answers: list[bool] = []
        for at in range(0, len(keys), frames.MOST_KEYS):
            part = keys[at : at + frames.MOST_KEYS]
            question = _Question(self, part)
            async with asyncio.timeout(_HOLDS_S):
                said = await self._exchanged(self._links.askers, question)
            answers += said
        return answers

    def close(self) -> None:
        """Let go of idle connections, and keep none from now on."""
        with self._lock:
            self._closed = True
            idle = [sock for sock, _ in self._idle]
            self._idle.clear()
        for sock in idle:
            sock.close()

    async def _exchanged(self, threads: ThreadPoolExecutor, exchange: _Exchange[T]) -> T:
        """On a kept connection; where there is none, or it turns out dead, a new one. Raises `OSError` where none can be made."""
        kept = self.take()
        if kept is not None:
            try:
                return await _run(threads, partial(exchange.run, kept, kept=True), exchange.cut)
            except _Dead:
                pass
        fresh = await self._dialled()  # here: a peer that is not there must hold no thread
        return await _run(threads, partial(exchange.run, fresh), exchange.cut)

    async def _dialled(self) -> socket.socket:
        """A new connection, which does not block. Raises `OSError`."""
        host, port = self._member.host, self._member.port
        loop, failed = asyncio.get_running_loop(), OSError(f"{self.host!r} is no address")
        async with asyncio.timeout(self._links.settings.connect_s):
            try:
                found = _known(host, port)
                if not found:
                    looked_up = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                    found = [(each[0], (str(each[4][0]), port)) for each in looked_up]
            except (ValueError, OverflowError) as error:  # whoever said that it is an address
                raise OSError(f"{self.host!r} is no address: {error}") from None
            for family, where in found:
                if not self._links.trusted(str(where[0])):
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
            if not self._closed and len(self._idle) < self._links.settings.connections:
                self._idle.append((sock, time.monotonic()))
                return
        sock.close()

    def prepared(self, sock: socket.socket) -> socket.socket:
        """A new one, as an exchange needs it. Raises `OSError`."""
        settings = self._links.settings
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._links.tls is not None:
            return self._secured(sock, self._links.tls)
        # Wait in the kernel, and for so long at most: Python's own timeouts would poll before every read.
        sock.settimeout(None)
        most = struct.pack("@ll", int(settings.silent_s), int(settings.silent_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, most)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, most)
        return sock

    def _secured(self, sock: socket.socket, tls: PeerTls) -> ssl.SSLSocket:
        """With TLS on it, to whom it is meant for. Raises `OSError`."""
        sock.settimeout(self._links.settings.connect_s)
        secured = tls.client.wrap_socket(sock)
        if not vouches(secured, self._member):
            secured.close()
            raise OSError(f"the certificate at {self.host} names neither that address nor {self._member.node}")
        secured.settimeout(self._links.settings.silent_s)
        return secured


class _Unwanted(Exception):
    """Nobody wants the rest."""


class _Dead(Exception):
    """A kept connection was closed by the other side, and nothing was heard on it."""


class _Exchange(ABC, Generic[T]):
    """One request on one connection, in one thread. `cut` may come from any other."""

    def __init__(self, link: TcpLink, request: bytes) -> None:
        self._link, self._request = link, request
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._given_up = self._kept = self._reusable = False

    def cut(self) -> None:
        """Whatever the thread waits for ends now."""
        with self._lock:
            self._given_up = True
            if self._sock is not None:
                with suppress(OSError):  # it may be over already
                    cut(self._sock)

    def run(self, sock: socket.socket, *, kept: bool = False) -> T:
        """On a thread: all of it. Raises `_Dead` where another connection should be tried."""
        self._kept = kept
        with self._lock:
            self._sock = sock
        try:
            return self._exchange()
        finally:
            self._over()

    @abstractmethod
    def _exchange(self) -> T: ...

    def _begin(self, first: int) -> bytes:
        """Send the request; the first so many bytes of its answer."""
        try:
            return self._sent(first)
        except (ConnectionError, EOFError, ssl.SSLError) as error:
            if self._kept and not self._given_up:
                raise _Dead from error
            raise

    def _sent(self, first: int) -> bytes:
        sock = self._sock
        assert sock is not None
        if not self._kept:
            sock = self._link.prepared(sock)
        with self._lock:
            self._sock = sock
            if self._given_up:
                raise ConnectionAbortedError("given up before it was sent")
        sock.sendall(self._request)
        room = bytearray(first)
        answer = bytes(room[: fill(sock, memoryview(room))])
        if not answer:
            raise EOFError
        if len(answer) < first:
            raise frames.Malformed(f"it answers {answer[:80]!r}")
        return answer

    def _over(self) -> None:
        with self._lock:
            sock, self._sock = self._sock, None
        if sock is None:
            return
        if self._reusable and not self._given_up:
            self._link.keep(sock)
        else:
            sock.close()

    def _exactly(self, room: memoryview) -> None:
        assert self._sock is not None
        if fill(self._sock, room) < len(room):
            raise EOFError


class _Question(_Exchange[list[bool]]):
    """Which keys a peer has."""

    def __init__(self, link: TcpLink, keys: Sequence[bytes]) -> None:
        super().__init__(link, frames.request(frames.HOLDS, link.host, msgspec.msgpack.encode(b"".join(keys))))
        self._keys = len(keys)

    def _exchange(self) -> list[bool]:
        head = frames.held_head(self._keys)
        try:
            answer = self._begin(len(head) + self._keys)
            if not answer.startswith(head):
                raise frames.Malformed(f"it answers {answer[:80]!r}")
            self._reusable = True
            return [byte == 1 for byte in answer[len(head) :]]
        except EOFError:
            raise ConnectionResetError("the connection ended") from None


class _Blocks(_Exchange[Carried]):
    """Blocks, to their places."""

    def __init__(self, link: TcpLink, batch: Sequence[Delivery], ask: frames.Ask) -> None:
        super().__init__(link, frames.request(frames.BLOCKS, link.host, msgspec.msgpack.encode(ask)))
        self._batch = batch
        self._nbytes, self._seconds = 0, 0.0

    def left(self) -> None:
        """Nobody waits for one of them any more. Where that is so of all, the peer's silence must not keep a thread."""
        if not any(each.wanted and not each.over for each in self._batch):
            self.cut()

    def _exchange(self) -> Carried:
        failed = ""
        try:
            self._receive()
            self._reusable = True
        except _Unwanted:
            pass
        except EOFError:
            failed = "the connection ended"
        except (OSError, frames.Malformed) as error:
            failed = f"{type(error).__name__}: {error}"
        return Carried(self._nbytes, self._seconds, "" if self._given_up else failed)

    def _receive(self) -> None:
        if not any(each.wanted for each in self._batch):
            raise _Unwanted
        first = self._begin(len(frames.ANSWER) + frames.FRAME_BYTES)
        if not first.startswith(frames.ANSWER):
            raise frames.Malformed(f"it answers {first[:80]!r}")
        head = first[len(frames.ANSWER) :]
        for place, delivery in enumerate(self._batch):
            if place:
                head = self._line(frames.FRAME_BYTES)
            frame = frames.parse_frame(head)
            if frame.place != place:
                raise frames.Malformed("a frame out of place")
            self._take(delivery, frame, place)
        if self._line(len(frames.LAST)) != frames.LAST:
            raise frames.Malformed("no end of the answer")

    def _line(self, nbytes: int) -> bytes:
        """So many bytes behind the end of a chunk."""
        room = bytearray(len(frames.LINE_END) + nbytes)
        self._exactly(memoryview(room))
        if not room.startswith(frames.LINE_END):
            raise frames.Malformed("a chunk without an end")
        return bytes(room[len(frames.LINE_END) :])

    def _take(self, delivery: Delivery, frame: frames.Frame, place: int) -> None:
        plan = codec.layout(delivery.block.namespace, delivery.block.name.shard, delivery.block.name.tokens)
        fits = frame.nbytes <= plan.stored_limit if frame.coded else frame.nbytes == plan.raw_bytes
        if frame.miss is None and not fits:
            raise frames.Malformed(f"an object of {frame.nbytes} bytes where {plan.raw_bytes} were expected")
        if not delivery.begin(self.cut):
            self._drain(frame.nbytes, place)
            return
        outcome: Miss | None = Miss.UNAVAILABLE
        try:
            begun = time.perf_counter()
            outcome = frame.miss or self._land(delivery, frame, place)
            self._seconds += time.perf_counter() - begun
        except KVTierError as error:  # such as no zstandard here
            raise frames.Malformed(str(error)) from error
        finally:
            delivery.end(outcome)

    def _land(self, delivery: Delivery, frame: frames.Frame, place: int) -> Miss | None:
        """To its place, verified."""
        block, into = delivery.block, delivery.into
        # A coded one lies beside it first. numpy asks for huge pages, and its memory is real only as far as it is filled.
        stored = np.empty(frame.nbytes, np.uint8).data if frame.coded else into
        arriving = codec.Arriving(stored, block.name, block.namespace, into, delivery.tell)
        for at in range(0, frame.nbytes, SLICE):
            if not delivery.wanted:
                self._drain(frame.nbytes - at, place)
                return Miss.TIMEOUT
            end = min(at + SLICE, frame.nbytes)
            self._exactly(stored[at:end])
            self._nbytes += end - at
            arriving.arrived(at, end)
        try:
            arriving.finish(frame.nbytes)
        except Corrupt:
            return Miss.CORRUPT
        return None

    def _drain(self, nbytes: int, place: int) -> None:
        """Read what nobody wants, to come to what somebody does."""
        if not any(each.wanted for each in self._batch[place + 1 :]):
            raise _Unwanted
        scratch = memoryview(bytearray(min(nbytes, SLICE)))
        while nbytes:
            part = scratch[: min(nbytes, SLICE)]
            self._exactly(part)
            nbytes -= len(part)


async def _run(threads: ThreadPoolExecutor, work: Callable[[], T], cut: Callable[[], None]) -> T:
    """The work's result; whoever is cancelled cuts it, and waits for its real end."""
    queued = threads.submit(work)
    ended = asyncio.wrap_future(queued)
    try:
        await asyncio.wait({ended})
    except asyncio.CancelledError:
        cut()
        await until_over(ended)
        if not ended.cancelled():
            ended.exception()  # nobody else will look at it
        raise
    return ended.result()


def _ask(batch: Sequence[Delivery], *, through: bool, speed: int) -> frames.Ask:
    block = batch[0].block
    return frames.Ask(
        namespace=block.namespace,
        shard=str(block.name.shard),
        prefixes=pack_prefixes([each.block.name.prefix_id for each in batch]),
        tokens=tuple(each.block.name.tokens for each in batch),
        through=through,
        speed=speed,
    )


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
