"""One engine's connection: its requests, its leases, its write window. Whatever it does, only its own connection ends.

What memory alone can answer is answered in the very call that brings the request in: no task, no time limit, no wait. That is what
makes a lease cost microseconds. Everything else becomes a task.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import termios
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar, cast

import msgspec

from kvstore import api, wire
from kvstore.access import Access
from kvstore.errors import Closed, Corrupt, Invalid, KVTierError, Overloaded, Unavailable
from kvstore.ids import Link, Shard, unpack_prefixes
from kvstore.server.acting import act
from kvstore.server.ahead import Ahead
from kvstore.server.awake import Awake
from kvstore.server.held import Held
from kvstore.server.inflight import READS
from kvstore.server.limits import Limits, check_deadline
from kvstore.server.observe import Observe, observed
from kvstore.server.ports import Pin, Room, Service
from kvstore.server.window import Window

log = logging.getLogger(__name__)
T = TypeVar("T")
_HIGH_WATER: Final = 1 << 20  # answers queued for a client that does not read, beyond which its requests wait
_AT_ONCE: Final = 1024  # blocks in a request that may be answered at once; the loop does nothing else meanwhile
_LATE: Final = 0.2  # of the window in use: from there on it is emptied while its client goes on writing
_lookup: Final = msgspec.msgpack.Decoder(api.Lookup)


class _Filling(NamedTuple):
    """Room that was made for blocks of the window, and how they get there."""

    rooms: Sequence[Room]
    copies: Sequence[Callable[[], None]]
    nbytes: int


class Connection(asyncio.Protocol):
    """A client that was welcomed.

    Args:
        service: What it talks to.
        access: Whom it may act for, and what it may.
        who: For the log.
        accepted: Its socket, non-blocking.
        window: Its write window.
        limits: Bounds.
        observe: Told of every request.
        awake: Told of every request that was answered at once.
    """

    def __init__(
        self,
        *,
        service: Service,
        access: Access,
        who: str,
        accepted: socket.socket,
        window: Window,
        limits: Limits,
        observe: Observe,
        awake: Awake,
    ) -> None:
        self._awake = awake
        self._accepted = accepted
        self._service, self._access, self._who, self._window = service, access, who, window
        self._tenant = tenant = access.tenant
        self._limits, self._observe = limits, observe
        self._plane = service.plane
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._input = bytearray()  # of a frame that is not complete, or must wait
        self._stalled: asyncio.TimerHandle | None = None  # while the client does not read its answers
        self._over = self._loop.create_future()  # no more requests: done, or why
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._abandonable: set[int] = set()  # requests that change nothing, so that they may be cut short
        self._held = Held(self._plane, tenant)
        self._ahead = Ahead(self._plane, tenant, window.size, self.unread)
        self._unaccounted: Sequence[Pin] = ()
        self._filling: dict[int, _Filling] = {}  # publications whose bytes are still to come
        self._early: dict[int, bool] = {}  # and that are filled, or never will be, before there is room for them
        self._draining: dict[int, int] = {}  # publications that are still read from the window, and their bytes
        self._drained = asyncio.Event()
        self._drained.set()
        self._ending = False

    @property
    def leases(self) -> int:
        """Leases it holds."""
        return len(self._held)

    @property
    def tenant(self) -> str:
        """Whom it acts for."""
        return self._tenant

    async def run(self) -> None:
        """Serve until the client goes away or misbehaves, or `stop`; then let go of everything it held."""
        try:
            await asyncio.wait((self._over,))
            error = self._over.exception()
            if isinstance(error, KVTierError):
                log.warning("closing the connection of %s: %s", self._who, error.message)
                self._send(wire.Fault(0, error.problem()))
            elif error is not None:
                raise error
            await self._settle()
        finally:
            self._end(None)
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._held.release_all()
            self._ahead.close()
            for filling in self._filling.values():
                _abort(filling.rooms)
            self._filling.clear()
            if self._transport is not None:
                self._transport.close()
            await self._drained.wait()  # not the client's to hurry: the threads read its window
            self._window.close()

    def unread(self) -> bool:
        """Whether its client has sent something that nobody has looked at."""
        if self._over.done():
            return False
        try:
            fcntl.ioctl(self._accepted, termios.FIONREAD, nbytes := bytearray(4))
        except (OSError, ValueError):  # closed
            return False
        return any(nbytes)

    def stop(self) -> None:
        """Take no more requests; changes that were accepted are still made and answered."""
        self._end(None)

    def abort(self) -> None:
        """Cut it off, and what it has not read with it."""
        if self._transport is not None:
            self._transport.abort()

    async def _settle(self) -> None:
        """Changes to sessions run to their end; reads are cut short."""
        for number in list(self._abandonable):
            self._tasks[number].cancel()
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    def _end(self, error: Exception | None) -> None:
        self._ending = True
        if not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)

    # --- the transport's calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by its methods only
        self._transport.set_write_buffer_limits(_HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        """Requests, or parts of them."""
        if self._over.done():
            return
        try:
            if not self._input:  # whole requests, as nearly always: without a copy
                data = data[self._requests(data) :]
                if not data:
                    return
            self._input += data
            del self._input[: self._requests(self._input)]
        except Exception as error:  # noqa: BLE001  whatever it is, it ends this connection and no other
            self._end(error)

    def eof_received(self) -> bool:
        """The client will send no more; it may still read."""
        self._end(None)
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  a client that dies is no fault
        """It is over."""
        self._flowing()
        self._end(None)

    def pause_writing(self) -> None:
        """Who does not read answers cannot ask for more, and not for ever."""
        assert self._transport is not None
        if not self._over.done():
            self._transport.pause_reading()
        self._stalled = self._loop.call_later(self._limits.stall, self._give_up)

    def resume_writing(self) -> None:
        """It reads again."""
        self._flowing()
        if self._over.done() or self._transport is None or self._transport.is_closing():
            return
        self._transport.resume_reading()
        try:
            del self._input[: self._requests(self._input)]
        except Exception as error:  # noqa: BLE001  as above
            self._end(error)

    def _flowing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _give_up(self) -> None:
        log.warning("closing the connection of %s: it does not read its answers", self._who)
        self.abort()

    # --- requests ---

    def _requests(self, data: bytes | bytearray) -> int:
        """Every request that is here in full; how many bytes they were."""
        start, here = 0, len(data)
        while here - start >= 4 and self._stalled is None and not self._over.done():
            end = start + 4 + wire.body_length(data[start : start + 4])
            if here < end:
                break
            message = wire.parse_to_node(bytes(data[start + 4 : end]))
            start = end
            self._take(message)
        return start

    def _take(self, message: wire.ToNode) -> None:
        match message:
            case wire.Get() | wire.Ask() | wire.Publish():
                self._start(message)
            case wire.Filled():
                self._filled(message)
            case wire.Release():
                self._held.release(message.runs)
            case wire.Cancel():
                if message.id in self._abandonable:
                    self._tasks[message.id].cancel()
            case wire.Hello():
                raise Corrupt("a second hello")

    def _start(self, message: wire.Ask | wire.Get | wire.Publish) -> None:
        number = message.id
        if number < 1 or number in self._tasks or number in self._filling or number in self._draining:
            raise Corrupt(f"request number {number} is in use, or not positive")
        begun, outcome = time.perf_counter(), "ok"
        answer: wire.ToClient | None
        try:
            answer = self._at_once(message)
        except KVTierError as error:
            answer, outcome = wire.Fault(number, error.problem()), error.kind
        except Exception:
            log.exception("request %s of %s failed", _op(message), self._who)
            answer, outcome = wire.Fault(number, KVTierError(f"{_op(message)} failed inside the node").problem()), "internal"
        if answer is not None:
            self._send(answer)
            self._account(message)
            self._awake.asked()
            self._observe(_op(message), outcome, time.perf_counter() - begun)
        elif not isinstance(message, wire.Publish) and not message.wait:
            self._send(wire.Later(number))
        elif len(self._tasks) >= wire.MAX_IN_FLIGHT:
            busy = Overloaded(f"more than {wire.MAX_IN_FLIGHT} requests of one connection are unanswered")
            self._send(wire.Fault(number, busy.problem()))
        else:
            self._begin(message)

    def _at_once(self, message: wire.Ask | wire.Get | wire.Publish) -> wire.ToClient | None:
        """The answer, where memory has all of it."""
        match message:
            case wire.Get():
                return self._pinned(message)
            case wire.Ask(call="lookup"):
                request = _decoded(_lookup, message)
                if len(request.prefix_ids) * len(request.shards) > _AT_ONCE:
                    return None
                found = self._plane.lookup_now(self._tenant, request)
                return None if found is None else _reply(message, found)
            case wire.Publish():
                return self._published(message)
            case _:
                return None

    def _begin(self, message: wire.Ask | wire.Get | wire.Publish) -> None:
        number = message.id
        if isinstance(message, wire.Get) or (isinstance(message, wire.Ask) and message.call in READS):
            self._abandonable.add(number)
        task = self._tasks[number] = asyncio.create_task(self._serve(message))
        task.add_done_callback(partial(self._forget, number))

    def _forget(self, number: int, done: asyncio.Task[None]) -> None:
        del self._tasks[number]
        self._early.pop(number, None)
        if done.cancelled() and number in self._abandonable:  # it was cancelled before its first step
            self._send(wire.Fault(number, self._cut_short(read=True).problem()))
        self._abandonable.discard(number)

    def _cut_short(self, *, read: bool) -> KVTierError:
        if not read:
            return Unavailable("the node stopped before it was done", kind="outcome_unknown")
        return Unavailable("the node is stopping") if self._ending else Closed("the request was cancelled")

    async def _serve(self, message: wire.Ask | wire.Get | wire.Publish) -> None:
        op = _op(message)
        answer: wire.ToClient
        try:
            with observed(self._observe, op):
                answer = await self._answer(message)
        except asyncio.CancelledError:
            answer = wire.Fault(message.id, self._cut_short(read=message.id in self._abandonable).problem())
        except KVTierError as error:
            answer = wire.Fault(message.id, error.problem())
        except Exception:
            log.exception("request %s of %s failed", op, self._who)
            answer = wire.Fault(message.id, KVTierError(f"{op} failed inside the node").problem())
        self._abandonable.discard(message.id)  # from here on it is answered, and a cancellation changes nothing
        self._send(answer)

    async def _answer(self, message: wire.Ask | wire.Get | wire.Publish) -> wire.ToClient:
        match message:
            case wire.Ask():
                return _reply(message, await self._call(message))
            case wire.Get():
                return await self._get(message)
            case wire.Publish():
                return await self._publish(message)

    def _send(self, message: wire.ToClient) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        frame = wire.frame(message)
        if len(frame) > wire.MAX_FRAME and not isinstance(message, wire.Fault):
            error = Overloaded(f"the answer would be {len(frame)} bytes, more than {wire.MAX_FRAME}: ask for less at a time")
            frame = wire.frame(wire.Fault(message.id if not isinstance(message, wire.Welcome) else 0, error.problem()))
        if not self._transport.get_write_buffer_size():
            # At once: a loop may keep what it is given until its turn is over.
            with contextlib.suppress(OSError):  # it is full, or gone: the transport finds out
                frame = frame[self._accepted.send(frame) :]
        if frame:
            self._transport.write(frame)

    # --- calls ---

    async def _call(self, ask: wire.Ask) -> api.Answer:
        call = api.BY_NAME.get(ask.call)
        if call is None:
            raise Invalid(f"unknown call {ask.call[:64]!r}; known: {', '.join(api.BY_NAME)}")
        request: api.Request = _decoded(msgspec.msgpack.Decoder(call.request), ask)
        return await act(self._service, self._access, call, request)

    # --- blocks ---

    def _account(self, message: wire.Ask | wire.Get | wire.Publish) -> None:
        """What a lease means for eviction takes longer than the lease: it is worked out when the reader has its answer."""
        pins, self._unaccounted = self._unaccounted, ()
        if pins and isinstance(message, wire.Get):
            self._plane.pinned(self._tenant, message.namespace, message.shard, pins, message.tokens)

    def _pinned(self, get: wire.Get) -> wire.Leased | None:
        """Leases on blocks that are all in memory."""
        if len(get.tokens) > min(_AT_ONCE, self._limits.leases - len(self._held)):
            return None
        check_deadline(get.deadline_ms)
        pins = self._plane.pin_now(self._tenant, get.namespace, get.shard, get.prefixes, get.tokens)
        if pins is None:
            return None
        first, self._unaccounted = self._held.add(pins), pins
        return wire.Leased(get.id, first, [pin.offset for pin in pins], [pin.size for pin in pins], "")

    async def _get(self, get: wire.Get) -> wire.Leased:
        deadline_ms = check_deadline(get.deadline_ms)
        prefixes = unpack_prefixes(get.prefixes)
        if len(prefixes) != len(get.tokens):
            raise Invalid(f"{len(prefixes)} prefix_ids and {len(get.tokens)} lengths")
        links = list(map(Link, prefixes, get.tokens))
        allowed = links[: max(0, self._limits.leases - len(self._held))]
        leases, miss = await self._plane.get(
            self._tenant, get.namespace, Shard.parse(get.shard), allowed, deadline_ms=deadline_ms, reach=get.reach
        )
        if not miss and len(allowed) < len(links):
            miss = "full"
        first = self._held.add(leases)
        return wire.Leased(get.id, first, [lease.offset for lease in leases], [lease.size for lease in leases], miss)

    def _published(self, publish: wire.Publish) -> wire.Published | None:
        """Room for each block; the bytes are copied out of the window after the answer."""
        for _, offset, length in publish.extents:
            if not self._window.holds(offset, length):
                raise Invalid(f"bytes {offset} to {offset + length} are not inside the window of {self._window.size}")
        tokens = [extent[0] for extent in publish.extents]
        slots = self._ahead.slots(publish)
        rooms = self._plane.rooms_now(self._tenant, publish.namespace, publish.shard, publish.prefixes, tokens, slots)
        if rooms is None:
            return None
        drained = self._landing(publish, rooms)
        return wire.Published(publish.id, [room is not None for room in rooms], drained, self._ahead.promise(publish))

    async def _publish(self, publish: wire.Publish) -> wire.Published:
        """As `_published`, where the namespace must be looked for first."""
        shard, prefixes = Shard.parse(publish.shard), unpack_prefixes(publish.prefixes)
        if len(prefixes) != len(publish.extents):
            raise Invalid(f"{len(prefixes)} prefix_ids and {len(publish.extents)} extents")
        rooms: list[Room | None] = []
        try:
            for prefix, (tokens, _, _) in zip(prefixes, publish.extents, strict=True):
                rooms.append(await self._plane.reserve(self._tenant, publish.namespace, shard, Link(prefix, tokens)))
        except BaseException:
            _abort(rooms)
            raise
        drained = self._landing(publish, rooms)
        return wire.Published(publish.id, [room is not None for room in rooms], drained)

    def _landing(self, publish: wire.Publish, rooms: Sequence[Room | None]) -> bool:
        """Have them filled; whether there is nothing to fill."""
        for room, (tokens, _, length) in zip(rooms, publish.extents, strict=True):
            if room is not None and length != room.payload.nbytes:
                expected = room.payload.nbytes
                _abort(rooms)
                raise Invalid(f"a payload of {tokens} tokens has {expected} bytes here, not {length}")
        found = [room for room in rooms if room is not None]
        if found:
            nbytes = sum(room.payload.nbytes for room in found)
            if not publish.filled and nbytes + sum(each.nbytes for each in self._filling.values()) > self._window.size:
                _abort(rooms)
                raise Overloaded("more is being filled than the window holds")
            copies = [(extent[1], room.payload) for extent, room in zip(publish.extents, rooms, strict=True) if room is not None]
            filling = _Filling(found, self._window.copies(copies), nbytes)
            self._filling[publish.id] = filling
            if publish.filled or publish.id in self._early:
                self._filled(wire.Filled(publish.id, self._early.pop(publish.id, True)))
        return not found

    def _filled(self, message: wire.Filled) -> None:
        filling = self._filling.pop(message.id, None)
        if filling is None and message.id in self._tasks:
            self._early[message.id] = message.good  # there is no room yet
        if filling is not None and message.good:
            self._land(message.id, filling)
        elif filling is not None:
            _abort(filling.rooms)

    def _land(self, number: int, filling: _Filling) -> None:
        self._draining[number] = filling.nbytes
        self._drained.clear()
        soon = sum(self._draining.values()) > self._window.size * _LATE
        self._plane.land(self._tenant, filling.rooms, filling.copies, partial(self._copied, number), soon=soon)

    def _copied(self, number: int) -> None:
        self._send(wire.Drained(number))
        del self._draining[number]
        if not self._draining:
            self._drained.set()


def _decoded(decoder: msgspec.msgpack.Decoder[T], ask: wire.Ask) -> T:
    try:
        return decoder.decode(ask.body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Invalid(f"{ask.call}: {error}") from None


def _reply(ask: wire.Ask, answer: api.Answer) -> wire.Reply:
    return wire.Reply(ask.id, msgspec.Raw(msgspec.msgpack.encode(answer)))


def _abort(rooms: Sequence[Room | None]) -> None:
    for room in rooms:
        if room is not None:
            room.abort()


def _op(message: wire.Ask | wire.Get | wire.Publish) -> str:
    """As metrics call it."""
    match message:
        case wire.Get():
            return "get"
        case wire.Publish():
            return "publish"
        case wire.Ask():
            return message.call if message.call in api.BY_NAME else "unknown"
