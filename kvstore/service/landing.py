"""What writers have published and the node has yet to take over: copies first, for they free a writer's window; then digests."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tiering import Movers

log = logging.getLogger(__name__)
_BATCH: Final = 8 << 20  # bytes that one visit to a thread copies: enough to make the visit cheap


class Room(Protocol):
    """Where a payload goes; see :class:`kvstore.service.plane.Room`."""

    @property
    def payload(self) -> memoryview:
        """Writable."""
        ...

    async def publish(self) -> bool:
        """Digest it, and make it visible."""
        ...

    def abort(self) -> None:
        """Give the room back."""
        ...


class _Load:
    """Blocks of one publication. `copied` is told, once, that their source is not read any more."""

    __slots__ = ("copied", "copy", "landed", "nbytes", "rooms", "tenant")

    def __init__(self, tenant: str, rooms: Sequence[Room], copy: Callable[[], None], copied: Callable[[], None]) -> None:
        self.tenant, self.rooms, self.copy, self.copied = tenant, rooms, copy, copied
        self.nbytes = sum(room.payload.nbytes for room in rooms)
        self.landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Landing:
    """Copies and seals behind the writers' backs.

    Digesting costs as much as copying. So a burst of writes is copied at the speed of memory, and digested while the writers
    compute; who asks for one of these blocks meanwhile waits for it (`settled`).

    Args:
        movers: The threads.
        unsealed: Bytes that may be copied and not digested yet; beyond them writers are held up by digests too.
    """

    def __init__(self, movers: Movers, unsealed: int) -> None:
        self._movers, self._limit = movers, unsealed
        self._loads: deque[_Load] = deque()
        self._copied: deque[tuple[_Load, Room]] = deque()
        self._unsealed = 0
        self._pending: dict[_Load, int] = {}  # blocks of each that are not visible yet
        self._working: set[asyncio.Task[None]] = set()

    def take(self, tenant: str, rooms: Sequence[Room], copy: Callable[[], None], copied: Callable[[], None]) -> None:
        """Take blocks over: `copy` fills the rooms, on a thread; then the source is free, and `copied` is called on the loop."""
        load = _Load(tenant, rooms, copy, copied)
        self._loads.append(load)
        self._pending[load] = len(rooms)
        if len(self._working) < self._movers.threads:
            worker = asyncio.create_task(self._work())
            self._working.add(worker)
            worker.add_done_callback(self._working.discard)

    def pending(self, tenant: str) -> bool:
        """Whether blocks of a tenant are on their way."""
        return any(load.tenant == tenant for load in self._pending)

    async def settled(self, tenant: str, seconds: float | None = None) -> None:
        """Wait until what a tenant has published by now is visible, or that long."""
        waiting = [load.landed for load in self._pending if load.tenant == tenant]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)

    async def aclose(self) -> None:
        """Land what was taken."""
        while self._working:
            await asyncio.wait(self._working)

    async def _work(self) -> None:
        while True:
            if self._loads and self._unsealed < self._limit:
                await self._copy()
            elif self._copied:
                load, room = self._copied.popleft()
                await self._seal(load, room)
            else:
                return

    async def _copy(self) -> None:
        """Copy the loads that come next, a batch of them in one visit to a thread."""
        batch, nbytes = [self._loads.popleft()], 0
        while self._loads and (nbytes := nbytes + batch[-1].nbytes) < _BATCH:
            batch.append(self._loads.popleft())
        self._unsealed += sum(load.nbytes for load in batch)
        try:
            await self._movers.run(_copy_all, batch)
        except Exception:
            log.exception("published blocks could not be copied")
            for load in batch:
                self._drop(load)
            return
        finally:
            for load in batch:
                load.copied()
        for load in batch:
            self._copied.extend((load, room) for room in load.rooms)

    async def _seal(self, load: _Load, room: Room) -> None:
        nbytes = room.payload.nbytes
        try:
            await room.publish()
        except Exception:
            log.exception("a published block was dropped")
        finally:
            self._unsealed -= nbytes
            self._done(load, 1)

    def _drop(self, load: _Load) -> None:
        for room in load.rooms:
            room.abort()
        self._unsealed -= load.nbytes
        self._done(load, len(load.rooms))

    def _done(self, load: _Load, blocks: int) -> None:
        self._pending[load] -= blocks
        if not self._pending[load]:
            del self._pending[load]
            load.landed.set_result(None)


def _copy_all(batch: Sequence[_Load]) -> None:
    for load in batch:
        load.copy()
