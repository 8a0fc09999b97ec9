"""A blocking connection to a node on this host: the calling thread sends, and waits for the answer itself.

Only what the node answers at once goes this way, so one exchange at a time is enough for any number of threads, and none of them
pays for an event loop on another thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstore import wire
from kvstore.client.ahead import Ahead, Kind
from kvstore.client.fork import ParentSocket
from kvstore.client.handshake import Met
from kvstore.client.lending import LentBlocks, Run, lend, releases
from kvstore.client.pages import Pages
from kvstore.client.window import Extents
from kvstore.errors import Corrupt, KVTierError, Unavailable

log = logging.getLogger(__name__)
Extent = tuple[int, int]
"""Offset and length in the write window."""
_PART: Final = 1 << 18
_SOON_S: Final = 0.005
_BEHIND: Final = 8  # questions that are not answered yet: who asks more would fill the socket, and be kept by it
SMALL: Final = 16 << 10  # bytes of a question that the socket takes whole or not at all, and has room for
_SPIN_S: Final = 0.0002  # an answer from memory takes a third of that, half where the node slept; so does being woken


class Line:
    """Once `lost`, it stays lost.

    Args:
        met: The node.
        later: Calls a function after so many seconds, on some thread.

    Attributes:
        lost: Why it ended, or None.
        window: The write window.
        window_pages: Its page table.
        ahead: What the node has promised to take.
        close: Ends it. A second call does nothing.
    """

    def __init__(self, met: Met, later: Callable[[float, Callable[[], None]], None]) -> None:
        self.lost: KVTierError | None = None
        self.window = memoryview(met.window)
        self.window_pages = Pages(met.window, writable=True)
        self.ahead = Ahead()
        self._promised: set[int] = set()  # publications that their callers believe to be taken
        self._room, self._rooms = Extents(len(met.window)), threading.Lock()
        self._arena = memoryview(met.arena)
        self._arena_pages = Pages(met.arena, writable=False)
        self._populating: threading.Thread | None = None
        self._socket = met.socket
        self._socket.setblocking(True)
        self._patience = -1.0
        self._guard = ParentSocket(self._socket.fileno())
        self._turn = threading.Lock()
        self._input = bytearray()
        self._last = 0
        self._unwanted: set[int] = set()  # requests that nobody waits for any more
        self._given: deque[Run] = deque()  # leases to give back
        self._later, self._flushing = later, False
        self._filling: dict[int, wire.ToClient | None] = {}  # what the node said to publications that are being filled
        self._asked: dict[int, wire.ToClient | None] = {}  # and to questions that nobody waits for
        self._dropped: deque[int] = deque()  # questions whose answers are not wanted any more
        self._drained: dict[int, Sequence[Extent]] = {}  # extents that are free when a publication is drained
        self.close = weakref.finalize(self, _close, self._socket, self._arena_pages, self.window_pages)

    @property
    def alive(self) -> bool:
        """Whether the node still holds its leases."""
        return self.lost is None

    # --- exchanges ---

    def ask(self, make: Callable[[int], wire.ToNode], patience_s: float) -> wire.ToClient:
        """One request, and its answer.

        Args:
            make: Builds the message for a request number.
            patience_s: How long to wait for it.

        Raises:
            TimeoutError: It did not come in time.
            Unavailable: The connection was lost.
            KVTierError: Whatever the node answered.
        """
        turn = self._turn
        if not (turn.acquire(blocking=False) or turn.acquire(timeout=patience_s)):
            raise TimeoutError
        try:
            if self.lost is not None:
                raise self.lost
            number = self._last = self._last + 1
            frame = wire.frame(make(number))
            if patience_s != self._patience:
                self._be_patient(patience_s)
            try:
                # Behind the request: the node answers that first.
                self._socket.sendall(frame + self._giving() if self._given else frame)
                while True:
                    while (message := self._message()) is None:
                        self._read(0)
                    if not isinstance(message, wire.Welcome) and message.id == number:
                        break  # nothing else hangs on a number that is as new as this
                    self._heard(message)
            except TimeoutError:
                self._unwanted.add(number)  # its answer is still to come
                raise
        except (OSError, KVTierError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise self._lose(error) from None
        finally:
            turn.release()
        if isinstance(message, wire.Fault):
            raise message.problem.error()
        return message

    def begin(self, make: Callable[[int], wire.ToNode]) -> int | None:
        """Send a question without waiting for anything; `answer` says what became of it.

        Args:
            make: Builds the message for a request number, of no more than `SMALL` bytes.

        Returns:
            A number for `answer`, or for `drop`; None where it was not sent: another exchange is under way, or the node is behind.

        Raises:
            Unavailable: The connection was lost.
        """
        if not self._turn.acquire(blocking=False):
            return None
        try:
            self._check()
            while self._dropped:
                if self._asked.pop(number := self._dropped.popleft(), None) is None:
                    self._unwanted.add(number)
            if self._unwanted or len(self._asked) >= _BEHIND:
                self._hear_all()
                if self._unwanted or len(self._asked) >= _BEHIND:
                    return None
            number = self._last = self._last + 1
            self._socket.send(wire.frame(make(number)), socket.MSG_DONTWAIT)
            self._asked[number] = None
        except BlockingIOError:
            return None
        except (OSError, KVTierError) as error:
            raise self._lose(error) from None
        else:
            return number
        finally:
            self._turn.release()

    def answer(self, number: int) -> wire.ToClient | None:
        """What the node said to the question of that number; None while it has said nothing: ask again, soon.

        Raises:
            Unavailable: The connection was lost.
            KVTierError: Whatever the node answered.
        """
        if self._asked[number] is None:
            self._hear()
        said = self._asked[number]
        if said is not None:
            del self._asked[number]
        if isinstance(said, wire.Fault):
            raise said.problem.error()
        return said

    def drop(self, number: int) -> None:
        """Nobody wants the answer to this question any more."""
        self._dropped.append(number)

    def publish(self, make: Callable[[int], wire.ToNode], extents: Sequence[Extent], kind: Kind | None = None) -> int:
        """Announce what will lie in these extents of the window: the node makes room while they are filled.

        Args:
            make: Builds the message for a request number.
            extents: Where.
            kind: Of all of the blocks.

        Returns:
            A number for `filled`, which must follow. Until the node says so after that, the extents are not free.
        """
        with self._turn:
            try:
                self._check()
                number = self._last = self._last + 1
                self._socket.sendall(wire.frame(make(number)))
                self._filling[number] = None
                self.ahead.sent(number, kind, len(extents), time.monotonic(), claimed=False)
            except (OSError, KVTierError) as error:
                raise self._lose(error) from None
        self._drained[number] = extents
        return number

    def hand_over(self, make: Callable[[int], wire.ToNode], extents: Sequence[Extent], kind: Kind, patience_s: float) -> list[bool]:
        """Publish what lies in these extents, whose blocks are claimed (`ahead`). Waits only where that does not hold any more.

        Returns and raises as `filled`.
        """
        if not self._turn.acquire(timeout=patience_s):
            self.ahead.waive(len(extents))
            self.give_room(extents)
            raise TimeoutError
        number = 0
        try:
            self._check()
            self._be_patient(patience_s)
            number = self._last = self._last + 1
            self._drained[number] = extents
            if self.ahead.sent(number, kind, len(extents), time.monotonic(), claimed=True):
                self._promised.add(number)
            else:
                self._filling[number] = None
            self._socket.sendall(wire.frame(make(number)))
            return [True] * len(extents) if number in self._promised else _taken(self._said(number))
        except (OSError, KVTierError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise self._lose(error) from None
        finally:
            self._filling.pop(number, None)
            self._turn.release()

    def filled(self, number: int, *, good: bool, patience_s: float) -> list[bool]:
        """The extents of a publication are filled, or never will be (`good`).

        Returns:
            Whether each block was taken.

        Raises:
            TimeoutError: The node did not say in time.
            Unavailable: The connection was lost.
            KVTierError: Whatever the node answered.
        """
        if not self._turn.acquire(timeout=patience_s):
            raise TimeoutError
        try:
            self._check()
            self._be_patient(patience_s)
            self._socket.sendall(wire.frame(wire.Filled(number, good)))
            answer = self._said(number)
        except (OSError, KVTierError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise self._lose(error) from None
        finally:
            self._filling.pop(number, None)  # an answer that is still to come is nobody's; what it frees is heard all the same
            if not good:
                self._free(number)  # the node does not look there
            self._turn.release()
        return _taken(answer)

    def _said(self, number: int) -> wire.ToClient:
        """The answer to a publication."""
        while (answer := self._filling[number]) is None:
            while (message := self._message()) is None:
                self._read(0)
            self._heard(message)
        return answer

    def hear(self) -> None:
        """Hear what the node has said of publications by now. Raises `Unavailable`."""
        if self._drained:
            self._hear()

    def listen(self, seconds: float = 0) -> None:
        """Hear what the node has to say unasked; wait that long at most for it to begin. Raises `Unavailable`."""
        with contextlib.suppress(OSError, ValueError):  # closed by another thread, which is said below
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            waiting.poll(seconds * 1e3)
        self._hear()

    def _hear(self) -> None:
        if not self._turn.acquire(blocking=False):
            return  # whoever has the turn hears it
        try:
            self._check()
            self._hear_all()
        except (OSError, KVTierError) as error:
            raise self._lose(error) from None
        finally:
            self._turn.release()

    def _hear_all(self) -> None:
        """What is there by now."""
        while True:
            while (message := self._message()) is not None:  # first what came along with an answer
                self._heard(message)
            if not self._read(socket.MSG_DONTWAIT):
                break

    def _be_patient(self, seconds: float) -> None:
        if seconds != self._patience:  # not settimeout(): that costs a poll() before every call
            whole = int(seconds)
            value = struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self._patience = seconds

    def _read(self, flags: int) -> bool:
        """More input; False where there is none now."""
        try:
            part = self._spun() if not flags else b""
            part = part or self._socket.recv(_PART, flags)
        except BlockingIOError:
            if flags:
                return False
            raise TimeoutError from None
        if not part:
            raise ConnectionResetError
        if self._input:
            self._input += part
        else:
            self._input = bytearray(part)
        return True

    def _spun(self) -> bytes:
        """Input that comes within moments, without going to sleep for it; or nothing."""
        receive, pause, clock = self._socket.recv, os.sched_yield, time.perf_counter
        ends = clock() + _SPIN_S
        while clock() < ends:
            try:
                return receive(_PART, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pause()  # should the node share this core
        return b""

    def _message(self) -> wire.ToClient | None:
        """The next message, where all of it is here."""
        data, here = self._input, len(self._input)
        if here < 4 or here < (end := 4 + wire.body_length(data[:4])):
            return None
        message = wire.parse_to_client(data[4:end])
        del data[:end]
        return message

    def _heard(self, message: wire.ToClient) -> None:
        """What nobody waits for just now."""
        match message:
            case wire.Drained():
                self._free(message.id)
                return
            case wire.Published():
                if message.drained:
                    self._free(message.id)
                self._published(message.id, message.ready, refused=not all(message.taken))
            case wire.Fault():
                if not message.id:
                    raise message.problem.error()
                self._free(message.id)
                self._published(message.id, 0, refused=True)
            case wire.Welcome():
                raise Corrupt("a second welcome")
            case wire.Leased() if message.id in self._unwanted:
                self._given.append((message.first, len(message.offsets)))
        for waiting in (self._filling, self._asked):
            if message.id in waiting:
                waiting[message.id] = message
        self._unwanted.discard(message.id)

    def _published(self, number: int, ready: int, *, refused: bool) -> None:
        self.ahead.answered(number, ready)
        if number in self._promised:
            self._promised.discard(number)
            if refused:  # a namespace that is no more, or this process stood still for long: its caller has gone on
                log.warning("the node did not take blocks that it had promised room for")

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def interrupted(self) -> None:
        """A Ctrl-C came in the middle of something: what was heard and not dealt with is unknown: the node takes it all back."""
        self._lose(Unavailable("a call on this connection was interrupted"))

    def _lose(self, error: OSError | KVTierError) -> KVTierError:
        """The reason, from now on."""
        if self.lost is None:
            self.lost = error if isinstance(error, KVTierError) else Unavailable("the node closed the connection")
            self.close()
        return self.lost

    # --- the write window ---

    def take_room(self, sizes: Iterable[int], most: int) -> list[Extent]:
        """Extents for the first few of these lengths, `most` bytes together or a single one; none where there is no room now."""
        extents = list[Extent]()
        with self._rooms:
            for size in sizes:
                most -= size
                offset = self._room.take(size) if most >= 0 or not extents else None
                if offset is None:
                    break
                extents.append((offset, size))
        return extents

    def give_room(self, extents: Iterable[Extent]) -> None:
        """Give back extents that were not published."""
        with self._rooms:
            for offset, nbytes in extents:
                self._room.give(offset, nbytes)

    def _free(self, number: int) -> None:
        extents = self._drained.pop(number, None)
        if extents is not None:
            self.give_room(extents)

    # --- leases ---

    def lend(self, leased: wire.Leased) -> LentBlocks:
        """The blocks of an answer. Raises `Corrupt`."""
        if self._populating is None:  # in the background, for whom a page fault on first use is no disaster
            self._populating = threading.Thread(target=self._arena_pages.fill, args=(len(self._arena),), daemon=True)
            self._populating.start()
        try:
            return lend(self._arena, leased, self)
        except Corrupt as error:
            self._lose(error)
            raise

    def give_back(self, leases: Sequence[Run]) -> None:
        """Give back leases, from any thread. They ride on the next request; where there is none, they are sent soon."""
        self._given.extend(leases)
        if not self._flushing:  # a message of their own would wake the node, and cost more than the lease
            self._flushing = True
            self._later(_SOON_S, self._flush)

    def _flush(self) -> None:
        self._flushing = False  # first: whoever gives back from now on sees to another flush
        while self._given and self.lost is None and self._turn.acquire(blocking=False):
            try:
                self._socket.sendall(self._giving())
            except OSError as error:
                self._lose(error)
            finally:
                self._turn.release()

    def _giving(self) -> bytes:
        given = self._given
        if len(given) == 1:
            return wire.frame(wire.Release([given.popleft()]))
        return releases([given.popleft() for _ in range(len(given))])


def _taken(answer: wire.ToClient) -> list[bool]:
    if isinstance(answer, wire.Fault):
        raise answer.problem.error()
    if not isinstance(answer, wire.Published):
        raise Unavailable("the node answered a publication with something else")
    return answer.taken


def _close(connection: socket.socket, *pages: Pages) -> None:
    for each in pages:
        each.stop()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it
    connection.close()
