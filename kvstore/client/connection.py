"""One connection to a node on this host: many requests at a time, answers matched by number, leases given back in batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Self

from kvstore import wire
from kvstore.client.fork import ParentSocket
from kvstore.client.handshake import Met, meet
from kvstore.client.lending import LentBlocks, Run, lend, releases
from kvstore.client.pages import Pages
from kvstore.client.window import Space
from kvstore.errors import Corrupt, KVTierError, Unavailable

log = logging.getLogger(__name__)
CONNECT_S: Final = 5.0
Unwanted = Callable[[wire.ToClient | None], None]


def _nothing_to_undo(_: wire.ToClient | None) -> None:
    """Of requests that take hold of nothing."""


class _Waiting:
    """A request whose answer is still to come. `unwanted` gets the answer when nobody waits for it any more."""

    __slots__ = ("answer", "unwanted")

    def __init__(self, answer: asyncio.Future[wire.ToClient], unwanted: Unwanted) -> None:
        self.answer = answer
        self.unwanted = unwanted


class Connection:
    """A live connection; once `lost`, it stays lost.

    Attributes:
        lost: Why it ended, or None while it lives.
        space: Room in the write window.
        window: The write window.
        window_pages: Its page table.
    """

    def __init__(self, met: Met, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.lost: KVTierError | None = None
        self.node = met.welcome.node
        self.space = Space(met.welcome.window_bytes)
        self.window = memoryview(met.window)
        self.window_pages = Pages(met.window, writable=True)
        self._arena = memoryview(met.arena)
        self._arena_pages = Pages(met.arena, writable=False)
        self._met = met
        self._populating: asyncio.Future[None] | None = None
        self._reader, self._writer = reader, writer
        self._guard = ParentSocket(met.socket.fileno())
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(wire.MAX_IN_FLIGHT)
        self._waiting: dict[int, _Waiting] = {}
        self._draining: dict[int, Callable[[], None]] = {}  # publications that the node still reads from the window
        self._last_id = 0
        self._released: deque[Run] = deque()
        self._flushing = False
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, path: str, tenant: str) -> Self:
        """Connect and shake hands. Raises as :func:`kvstore.client.handshake.meet`."""
        met = await meet(path, tenant, timeout_s=CONNECT_S)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=met.socket)
        except BaseException:
            met.socket.close()
            raise
        return cls(met, reader, writer)

    # --- requests ---

    async def ask(
        self,
        make: Callable[[int], wire.ToNode],
        timeout_s: float,
        unwanted: Unwanted = _nothing_to_undo,
        drained: Callable[[], None] | None = None,
    ) -> wire.ToClient:
        """Send a request and wait for its answer.

        Args:
            make: Builds the message for a request number.
            timeout_s: For the answer.
            unwanted: Called once, now or later, if this call does not return the answer: with the answer that came too late, or
                None where there will be none. From then on the node does nothing more for the request.
            drained: Of a publication: called once the node does not read its extents any more.

        Raises:
            TimeoutError: No answer in time.
            Unavailable: The connection was lost.
            KVTierError: Whatever the node answered.
        """
        async with asyncio.timeout(timeout_s):
            try:
                number, waiting = await self._sent(make, unwanted, drained)
            except BaseException:
                unwanted(None)
                if drained is not None:
                    drained()
                raise
            return await self._answer(number, waiting)

    async def _sent(
        self, make: Callable[[int], wire.ToNode], unwanted: Unwanted, drained: Callable[[], None] | None
    ) -> tuple[int, _Waiting]:
        await self._slots.acquire()
        try:
            self.check()
            number = self._last_id = self._last_id + 1
            frame = wire.frame(make(number))
        except BaseException:
            self._slots.release()
            raise
        waiting = self._waiting[number] = _Waiting(self._loop.create_future(), unwanted)
        if drained is not None:
            self._draining[number] = drained
        if self._released:
            self._flush()  # what was given back before this request makes room for it
        self._writer.write(frame)
        return number, waiting

    def check(self) -> None:
        """Raises the reason where the connection is lost."""
        if self.lost is not None:
            raise self.lost

    async def _answer(self, number: int, waiting: _Waiting) -> wire.ToClient:
        try:
            with contextlib.suppress(ConnectionError):  # the reader is told as well, and fails the answer with the reason
                await self._writer.drain()
            message = await waiting.answer
        except BaseException:
            if waiting.answer.cancel() or waiting.answer.cancelled():
                if self.lost is None:
                    self._writer.write(wire.frame(wire.Cancel(number)))
            else:  # it came at the same moment
                failed = waiting.answer.exception() is not None
                waiting.unwanted(None if failed else waiting.answer.result())
            raise
        if isinstance(message, wire.Fault):
            waiting.unwanted(message)
            raise message.problem.error()
        return message

    # --- answers ---

    async def _read(self) -> None:
        reason = Unavailable("the node closed the connection")
        try:
            while True:
                length = wire.body_length(await self._reader.readexactly(4))
                self._settle(wire.parse_to_client(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lose(reason)
        except KVTierError as error:  # a fault that ends the connection, or bytes that are no answer
            log.warning("connection to node %s ends: %s", self.node, error)
            self._lose(error)
        finally:
            self._lose(reason)

    def _settle(self, message: wire.ToClient) -> None:
        if isinstance(message, wire.Fault) and message.id == 0:
            raise message.problem.error()
        if isinstance(message, wire.Drained):
            self._drained(message.id)
            return
        if isinstance(message, wire.Fault) or (isinstance(message, wire.Published) and message.drained):
            self._drained(message.id)
        waiting = None if isinstance(message, wire.Welcome) else self._waiting.pop(message.id, None)
        if waiting is None:
            raise Corrupt(f"the node answered a request that nobody made ({type(message).__name__})")
        self._slots.release()
        if not waiting.answer.done():
            waiting.answer.set_result(message)
        else:
            waiting.unwanted(message)

    def _drained(self, number: int) -> None:
        free = self._draining.pop(number, None)
        if free is not None:
            free()

    def _lose(self, reason: KVTierError) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        for waiting in self._waiting.values():
            self._slots.release()
            if not waiting.answer.done():
                waiting.answer.set_exception(reason)
                waiting.answer.exception()  # looked at: whoever waited may be cancelled at this very moment
            else:
                waiting.unwanted(None)
        self._waiting.clear()
        self.space.close()
        self._writer.close()
        self._arena_pages.stop()
        self.window_pages.stop()

    # --- leases ---

    @property
    def alive(self) -> bool:
        """Whether the node still holds its leases."""
        return self.lost is None

    def lend(self, leased: wire.Leased) -> LentBlocks:
        """The blocks of an answer, as views of the arena. Nothing is copied.

        Raises:
            Corrupt: An extent is not inside the arena.
        """
        self._populate()
        try:
            return lend(self._arena, leased, self)
        except Corrupt as error:
            self._lose(error)
            raise

    def take_back(self, answer: wire.ToClient | None) -> None:
        """Give back the leases of an answer that nobody waits for."""
        if isinstance(answer, wire.Leased):
            self.give_back([(answer.first, len(answer.offsets))])

    def give_back(self, leases: Sequence[Run]) -> None:
        """Give back leases, from any thread; they are sent together on the loop's next turn."""
        self._released.extend(leases)
        if not self._flushing:
            self._flushing = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the node took the leases back with the connection
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._flushing = False  # first: whoever appends from now on schedules another flush
        given = [self._released.popleft() for _ in range(len(self._released))]
        if given and self.lost is None:
            self._writer.write(releases(given))

    def _populate(self) -> None:
        """Fill the arena's page table in the background, on the first read: a client that only makes calls never pays for it."""
        if self._populating is None:
            self._populating = self._loop.run_in_executor(None, self._arena_pages.fill, len(self._arena))

    async def aclose(self) -> None:
        """Say goodbye; the node takes back every lease. Views that are still out stay mapped until they are dropped."""
        self._flush()
        self._lose(Unavailable("the client closed the connection"))
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        for view, memory in ((self._arena, self._met.arena), (self.window, self._met.window)):
            with contextlib.suppress(BufferError):
                view.release()
                memory.close()
