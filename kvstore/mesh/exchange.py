"""One request and its answer on one connection, in one thread.

The thread that receives also digests, a slice at a time while it is in the cache: meanwhile the kernel takes in what follows.
Handing slices to another thread was no faster on two cores, and two connections use two.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Generic, TypeVar

import msgspec
import numpy as np

from kvstore import codec
from kvstore.errors import Corrupt, KVTierError
from kvstore.ids import pack_prefixes
from kvstore.mesh import frames
from kvstore.mesh.connections import Connections
from kvstore.mesh.delivery import Delivery
from kvstore.mesh.sockets import cut, fill
from kvstore.objects.threads import until_over
from tiering import Miss

T = TypeVar("T")
SLICE: Final = 512 << 10  # fits a core's cache; smaller ones cost more calls than they gain


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


class _Unwanted(Exception):
    """Nobody wants the rest."""


class Dead(Exception):
    """A kept connection was closed by the other side, and nothing was heard on it."""


class Exchange(ABC, Generic[T]):
    """One request on one connection, in one thread. `cut` may come from any other."""

    def __init__(self, connections: Connections, request: bytes) -> None:
        self._connections, self._request = connections, request
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
        """On a thread: all of it. Raises `Dead` where another connection should be tried."""
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
                raise Dead from error
            raise

    def _sent(self, first: int) -> bytes:
        sock = self._sock
        assert sock is not None
        if not self._kept:
            sock = self._connections.prepared(sock)
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
            self._connections.keep(sock)
        else:
            sock.close()

    def _exactly(self, room: memoryview) -> None:
        assert self._sock is not None
        if fill(self._sock, room) < len(room):
            raise EOFError


class Question(Exchange[list[bool]]):
    """Which keys a peer has."""

    def __init__(self, connections: Connections, keys: Sequence[bytes]) -> None:
        super().__init__(connections, frames.request(frames.HOLDS, connections.host, msgspec.msgpack.encode(b"".join(keys))))
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


class Blocks(Exchange[Carried]):
    """Blocks, to their places."""

    def __init__(self, connections: Connections, batch: Sequence[Delivery], *, through: bool, speed: int) -> None:
        ask = _ask(batch, through=through, speed=speed)
        super().__init__(connections, frames.request(frames.BLOCKS, connections.host, msgspec.msgpack.encode(ask)))
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


async def run(threads: ThreadPoolExecutor, work: Callable[[], T], cut: Callable[[], None]) -> T:
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
