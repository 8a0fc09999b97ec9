"""One engine's connection: its requests, its leases, its write window. Whatever it does, only its own connection ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstore import api, wire
from kvstore.errors import Closed, Corrupt, Invalid, KVTierError, Overloaded, Unavailable
from kvstore.ids import Link, PrefixId, Shard
from kvstore.server.inflight import READS
from kvstore.server.limits import Limits, check_deadline
from kvstore.server.observe import Observe, observed
from kvstore.server.ports import Room, Service
from kvstore.server.window import Window
from tiering import Lease

log = logging.getLogger(__name__)
_HIGH_WATER: Final = 1 << 20  # answers queued for a client that does not read, beyond which its requests wait


class Connection:
    """A client that was welcomed.

    Args:
        service: What it talks to.
        tenant: Whom it may act for.
        who: For the log.
        window: Its write window.
        reader: What it sends.
        writer: What it is answered.
    """

    def __init__(
        self,
        *,
        service: Service,
        tenant: str,
        who: str,
        window: Window,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: Limits,
        observe: Observe,
    ) -> None:
        self._service, self._tenant, self._who, self._window = service, tenant, who, window
        self._reader, self._writer, self._limits, self._observe = reader, writer, limits, observe
        self._writer.transport.set_write_buffer_limits(_HIGH_WATER)
        self._reading: asyncio.Task[None] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._abandonable: set[int] = set()  # requests that change nothing, so that they may be cut short
        self._leases: dict[int, Lease] = {}
        self._last_lease = 0
        self._ending = False

    @property
    def leases(self) -> int:
        """Leases it holds."""
        return len(self._leases)

    async def run(self) -> None:
        """Serve until the client goes away or misbehaves, or `stop`; then let go of everything it held."""
        self._reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait((self._reading,))
            error = None if self._reading.cancelled() else self._reading.exception()
            if isinstance(error, KVTierError):
                log.warning("closing the connection of %s: %s", self._who, error.message)
                await self._send(wire.Fault(0, error.problem()))
            elif error is not None:
                raise error
            await self._settle()
        finally:
            self._ending = True
            for task in (self._reading, *self._tasks.values()):
                task.cancel()
            await asyncio.gather(self._reading, *self._tasks.values(), return_exceptions=True)
            for lease in self._leases.values():
                lease.release()
            self._leases.clear()
            self._writer.close()
            self._window.close()

    def stop(self) -> None:
        """Take no more requests; changes that were accepted are still made and answered."""
        self._ending = True
        if self._reading is not None:
            self._reading.cancel()

    async def _settle(self) -> None:
        """Publications and changes to sessions run to their end, for their bytes are all here; reads are cut short."""
        self._ending = True
        for number in list(self._abandonable):
            self._tasks[number].cancel()
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    # --- requests ---

    async def _read(self) -> None:
        while True:
            try:
                length = wire.body_length(await self._reader.readexactly(4))
                body = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            await self._take(wire.parse_to_node(body))

    async def _take(self, message: wire.ToNode) -> None:
        match message:
            case wire.Release():
                for number in message.leases:
                    lease = self._leases.pop(number, None)
                    if lease is not None:
                        lease.release()
            case wire.Cancel():
                if message.id in self._abandonable:
                    self._tasks[message.id].cancel()
            case wire.Hello():
                raise Corrupt("a second hello")
            case _:
                await self._start(message)

    async def _start(self, message: wire.Ask | wire.Get | wire.Publish) -> None:
        number = message.id
        if number < 1 or number in self._tasks:
            raise Corrupt(f"request number {number} is in use, or not positive")
        await self._drain()  # who does not read answers cannot ask for more
        if len(self._tasks) >= wire.MAX_IN_FLIGHT:
            error = Overloaded(f"more than {wire.MAX_IN_FLIGHT} requests of one connection are unanswered")
            await self._send(wire.Fault(number, error.problem()))
            return
        if isinstance(message, wire.Get) or (isinstance(message, wire.Ask) and message.call in READS):
            self._abandonable.add(number)
        task = self._tasks[number] = asyncio.create_task(self._serve(message))
        task.add_done_callback(lambda done: self._forget(number, done))

    def _forget(self, number: int, done: asyncio.Task[None]) -> None:
        del self._tasks[number]
        unanswered = done.cancelled() and number in self._abandonable  # it was cancelled before its first step
        if unanswered and not self._writer.is_closing():
            self._writer.write(wire.frame(wire.Fault(number, self._cut_short(read=True).problem())))
        self._abandonable.discard(number)

    def _cut_short(self, *, read: bool) -> KVTierError:
        if not read:
            return Unavailable("the node stopped before it was done", kind="outcome_unknown")
        return Unavailable("the node is stopping") if self._ending else Closed("the request was cancelled")

    async def _serve(self, message: wire.Ask | wire.Get | wire.Publish) -> None:
        op = message.call if isinstance(message, wire.Ask) else type(message).__name__.lower()
        answer: wire.ToClient
        try:
            with observed(self._observe, op if op in _OPS else "unknown"):
                answer = await self._answer(message)
        except asyncio.CancelledError:
            answer = wire.Fault(message.id, self._cut_short(read=message.id in self._abandonable).problem())
        except KVTierError as error:
            answer = wire.Fault(message.id, error.problem())
        except Exception:
            log.exception("request %s of %s failed", op, self._who)
            answer = wire.Fault(message.id, KVTierError(f"{op} failed inside the node").problem())
        self._abandonable.discard(message.id)  # from here on it is answered, and a cancellation changes nothing
        await self._send(answer)

    async def _answer(self, message: wire.Ask | wire.Get | wire.Publish) -> wire.ToClient:
        match message:
            case wire.Ask():
                return wire.Reply(message.id, msgspec.Raw(msgspec.msgpack.encode(await self._call(message))))
            case wire.Get():
                return await self._get(message)
            case wire.Publish():
                return wire.Published(message.id, await self._publish(message))

    async def _send(self, message: wire.ToClient) -> None:
        if self._writer.is_closing():
            return
        frame = wire.frame(message)
        if len(frame) > wire.MAX_FRAME and not isinstance(message, wire.Fault):
            error = Overloaded(f"the answer would be {len(frame)} bytes, more than {wire.MAX_FRAME}: ask for less at a time")
            frame = wire.frame(wire.Fault(message.id if not isinstance(message, wire.Welcome) else 0, error.problem()))
        self._writer.write(frame)
        await self._drain()

    async def _drain(self) -> None:
        """Wait for a client that reads its answers slowly."""
        try:
            async with asyncio.timeout(self._limits.stall):
                await self._writer.drain()
        except TimeoutError:
            log.warning("closing the connection of %s: it does not read its answers", self._who)
            self._writer.transport.abort()
        except ConnectionError:
            pass  # it is gone; the reader sees that too

    # --- calls ---

    async def _call(self, ask: wire.Ask) -> api.Answer:
        call = api.BY_NAME.get(ask.call)
        if call is None:
            raise Invalid(f"unknown call {ask.call[:64]!r}; known: {', '.join(api.BY_NAME)}")
        try:
            request: api.Request = msgspec.msgpack.decode(ask.body, type=call.request)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise Invalid(f"{call.name}: {error}") from None
        return await self._service.call(self._tenant, call.name, request)

    # --- blocks ---

    async def _get(self, get: wire.Get) -> wire.Leased:
        deadline_ms = check_deadline(get.deadline_ms)
        links = [Link(PrefixId(text), tokens) for text, tokens in get.blocks]
        allowed = links[: max(0, self._limits.leases - len(self._leases))]
        leases, miss = await self._service.plane.get(
            self._tenant, get.namespace, Shard.parse(get.shard), allowed, deadline_ms=deadline_ms, reach=get.reach
        )
        if not miss and len(allowed) < len(links):
            miss = "full"
        return wire.Leased(get.id, [self._hold(lease) for lease in leases], miss)

    def _hold(self, lease: Lease) -> tuple[int, int, int]:
        self._last_lease += 1
        self._leases[self._last_lease] = lease
        return self._last_lease, lease.offset, lease.view.nbytes

    async def _publish(self, publish: wire.Publish) -> list[bool]:
        plane, shard = self._service.plane, Shard.parse(publish.shard)
        lengths: dict[int, int] = {}
        for _, tokens, offset, length in publish.blocks:
            if tokens not in lengths:
                lengths[tokens] = await plane.payload_bytes(self._tenant, publish.namespace, shard, tokens)
            if length != lengths[tokens]:
                raise Invalid(f"a payload of {tokens} tokens has {lengths[tokens]} bytes here, not {length}")
            if not self._window.holds(offset, length):
                raise Invalid(f"bytes {offset} to {offset + length} are not inside the window of {self._window.size}")
        rooms: list[Room | None] = []
        done = 0
        try:
            for text, tokens, _, _ in publish.blocks:
                rooms.append(await plane.reserve(self._tenant, publish.namespace, shard, Link(PrefixId(text), tokens)))
            extents = [(block[2], room.payload) for block, room in zip(publish.blocks, rooms, strict=True) if room is not None]
            await plane.run(self._window.copy_out, extents)
            done = len(rooms)
            return await self._published(rooms)
        finally:
            for room in rooms[done:]:
                if room is not None:
                    room.abort()

    async def _published(self, rooms: Sequence[Room | None]) -> list[bool]:
        outcomes = await asyncio.gather(*(room.publish() for room in rooms if room is not None), return_exceptions=True)
        results = iter(outcomes)
        taken = []
        for room in rooms:
            outcome = False if room is None else next(results)
            if isinstance(outcome, BaseException):
                log.error("a block of %s was dropped", self._who, exc_info=outcome)
            taken.append(outcome is True)
        return taken


_OPS: Final = frozenset({"get", "publish", *api.BY_NAME})
