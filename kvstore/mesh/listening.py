"""Listens to one engine's KV events over ZeroMQ: in order, without gaps, one life of the engine at a time.

The publisher (vLLM's, and SGLang's after it) numbers its batches from 0 in each life, and sends those of its buffer again when
asked on a second socket. Whatever cannot be made whole is answered by forgetting: a router that believes too little loses a hit,
one that believes too much sends requests to the wrong engine.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Final

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvstore.errors import Invalid
from kvstore.mesh.engine_events import MAX_BATCH_BYTES, decode
from kvstore.mesh.residency import Residency

log = logging.getLogger(__name__)
_WAITING: Final = 100_000  # batches that ZeroMQ keeps for us; what is dropped beyond is seen as a gap
_REPLAY_S, _CATCH_UP_S = 5.0, 1.0
_FIRST_MS, _QUIET_MS = 200, 5_000  # without a batch: then what was missed is asked for, as it may be the last for a while
_MOST_REPLAYED: Final = 100_000


class Heard(msgspec.Struct):
    """Counters of one listener."""

    batches: int = 0
    events: int = 0
    gaps: int = 0
    repaired: int = 0
    forgotten: int = 0
    broken: int = 0


class Listener:
    """Keeps a :class:`Residency` up to date. Run `run` under a supervisor.

    Args:
        endpoint: Where the engine publishes, such as `tcp://10.0.0.7:5557`.
        replay: Where it sends again what was missed; "" where it does not.
        residency: What is told.
        topic: Of the engine's configuration.
    """

    def __init__(self, endpoint: str, replay: str, residency: Residency, *, topic: str = "") -> None:
        self._endpoint, self._replay, self._topic = endpoint, replay, topic.encode()
        self._residency = residency
        self._next = -1  # the batch that should come; -1: this life has not been heard yet
        self._had = range(0)  # batches that were asked for while they may have been on their way
        self.heard = Heard()

    async def run(self) -> None:
        """Listen until cancelled."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, _WAITING)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        socket.setsockopt(zmq.SUBSCRIBE, self._topic)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        watching = asyncio.create_task(self._watch(monitor))
        try:
            socket.connect(self._endpoint)
            patience = _FIRST_MS
            while True:
                waits, patience = patience, _QUIET_MS
                if self._replay and not await socket.poll(waits):
                    await self._catch_up(context)
                    continue
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    await self._came(context, int.from_bytes(frames[1], "big", signed=True), frames[2])
                else:
                    self.heard.broken += 1
                await asyncio.sleep(0)  # what waits here is taken without waiting: a flood must not stop all else
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            socket.disable_monitor()
            context.destroy(linger=0)
            self._forget()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            parse_monitor_message(await monitor.recv_multipart())
            self._forget()  # what connects next may be another life, and its numbers would not show it

    async def _catch_up(self, context: zmq.asyncio.Context) -> None:
        """Nothing comes. Perhaps something came before this listened, or was lost."""
        first = max(self._next, 0)
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                found = await self._again(context, first)
        except (TimeoutError, zmq.ZMQError):
            return  # nobody is there yet
        for number, payload in found:
            await self._came(context, number, payload)
        self._had = range(first, self._next)

    async def _came(self, context: zmq.asyncio.Context, number: int, payload: bytes) -> None:
        if number in self._had:
            return
        self._had = range(0)
        if number < self._next:
            self._forget()
        if number > max(self._next, 0):
            self.heard.gaps += self._next >= 0
            await self._repair(context, max(self._next, 0), number)
        self._apply(payload)
        self._next = number + 1

    async def _repair(self, context: zmq.asyncio.Context, first: int, stop: int) -> None:
        """Have the batches from `first` up to `stop` sent again; where one is lacking, forget what was before it."""
        expected = first
        try:
            async with asyncio.timeout(_REPLAY_S):
                for number, payload in await self._again(context, first, stop) if self._replay else ():
                    if number != expected:
                        self._forget()
                    self._apply(payload)
                    expected = number + 1
                    await asyncio.sleep(0)
        except (TimeoutError, zmq.ZMQError) as error:
            log.warning(
                "%s: KV events %d to %d were not sent again: %s",
                self._endpoint,
                first,
                stop - 1,
                error if str(error) else "no answer",
            )
        if expected == stop:
            self.heard.repaired += 1
        else:
            self._forget()

    async def _again(self, context: zmq.asyncio.Context, first: int, stop: int = sys.maxsize) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        with context.socket(zmq.DEALER) as socket:  # as REQ, but for many answers
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            socket.connect(self._replay)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while len(found) < _MOST_REPLAYED:
                frames = await socket.recv_multipart()
                number = int.from_bytes(frames[-2], "big", signed=True) if len(frames) >= 2 else -1
                if number < 0 or number >= stop:
                    break
                found.append((number, frames[-1]))
        return found

    def _apply(self, payload: bytes) -> None:
        self.heard.batches += 1
        try:
            batch = decode(payload)
            self.heard.events += len(batch.events)
            self.heard.broken += batch.unknown
            self._residency.apply(batch)
        except Invalid as error:
            self.heard.broken += 1
            log.warning("%s: %s", self._endpoint, error)

    def _forget(self) -> None:
        self._next, self._had = -1, range(0)
        self.heard.forgotten += 1
        self._residency.forget()
