"""Values on their way to the disk: their room, their bytes, their entries in the index, each after the one before is done."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from tiering.catalog import Catalog
from tiering.index import Index
from tiering.lanes import Lanes, Post
from tiering.prewrite import Prewrite
from tiering.recovery import record
from tiering.slab import Placed, Slab, slot_length
from tiering.stats import TierStats
from tiering.tier import Want

_log = logging.getLogger("tiering.disk")

WRITERS = 4
_LONGEST = 0.25  # seconds that written values wait for their entries while more are being written


class _Batch:
    """What one caller wants stored."""

    __slots__ = ("_over", "kept", "open")

    def __init__(self, count: int) -> None:
        self.kept = [False] * count
        self.open = 0
        self._over: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until nothing of it is under way."""
        if self.open:
            self._over = asyncio.get_running_loop().create_future()
            await self._over

    def end(self, index: int, *, kept: bool) -> None:
        """One value's outcome."""
        self.kept[index] = kept
        self.open -= 1
        if not self.open and self._over is not None and not self._over.done():  # a loop that ends cancels even whoever is shielded
            self._over.set_result(None)


class _Put:
    """A value under way; see :class:`tiering.lanes.Job`."""

    __slots__ = ("at", "batch", "begun", "index", "joins", "nbytes", "over", "placed", "view", "want", "who")

    def __init__(self, batch: _Batch, index: int, want: Want, view: memoryview, who: int) -> None:
        self.batch, self.index, self.who = batch, index, who
        self.want, self.view = want, view
        self.nbytes = slot_length(want.size)
        self.at = -1
        self.begun = self.joins = False
        self.placed: Placed | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Storing:
    """The writing half of a disk tier. Its coroutines run to their end: the owner shields them from cancellation.

    Args:
        name: The tier's.
        slab: Where bytes go.
        index: Where entries go, once the bytes are durable.
        catalog: What is where.
        prewrite: What has pieces of the slab on loan.
        post: Brings outcomes to the loop.
        stats: The tier's.
    """

    def __init__(
        self, name: str, *, slab: Slab, index: Index, catalog: Catalog, prewrite: Prewrite, post: Post, stats: TierStats
    ) -> None:
        self._name, self._stats = name, stats
        self._slab, self._index, self._catalog = slab, index, catalog
        self._prewrite, self._post = prewrite, post
        self._under_way: dict[bytes, _Put] = {}
        self._slots_written = 0
        self._lock = threading.Lock()
        self._in_lanes = 0
        self._unlisted: list[_Put] = []  # written, and not yet in the index
        self._since = 0.0  # when the first of them was written
        self.lanes: Lanes[_Put] = Lanes(f"{name}-write", self._write, WRITERS)

    async def put_many(self, items: Sequence[tuple[Want, memoryview]], *, must: bool, who: int) -> list[bool]:
        """See :meth:`tiering.DiskTier.put_many`."""
        batch = _Batch(len(items))
        for index, (want, view) in enumerate(items):
            if want.size > 0 and view.nbytes == want.size:
                await self._begin(_Put(batch, index, want, view, who), must=must)
        await batch.wait()
        return batch.kept

    async def wait(self, keys: Iterable[bytes]) -> None:
        """Until puts of these keys that are under way have ended."""
        over = [self._under_way[key].over for key in keys if key in self._under_way]
        if over:
            await asyncio.wait(over)

    async def _begin(self, put: _Put, *, must: bool) -> None:
        """Find room for a value and queue its bytes, unless it is here, or nobody wants it here."""
        want = put.want
        while want.key in self._under_way:
            await self.wait([want.key])
        if self._catalog.touch(want):
            put.batch.kept[put.index] = True
            return
        if not must and not self._catalog.admits(want, put.who):
            self._stats.declined += 1
            return
        if not self._catalog.reserve(want, put.who):
            self._stats.drops += 1
            return
        self._under_way[want.key] = put
        put.batch.open += 1
        try:
            offset = await self._place(put)
        except OSError as error:
            self._failed(put, error)
        except BaseException:
            self._end(put, kept=False)
            raise
        else:
            if offset is None:
                self._end(put, kept=False)
            else:
                put.at, put.joins = offset, self._slab.takes(put.view)
                with self._lock:
                    self._in_lanes += 1
                self.lanes.submit(put)

    async def _place(self, put: _Put) -> int | None:
        while (offset := self._catalog.place(put.nbytes)) is None:
            if self._prewrite.lends:  # a piece that is written in advance comes back in a moment: nothing need go for it
                await self._prewrite.returned()
            elif self._catalog.make_way(put.who):
                await self._index.commit([])  # room comes free when the index has caught up
            else:
                break
        return offset

    # On a lane

    def _write(self, run: Sequence[_Put]) -> None:
        """Write neighbours together; where that fails each alone, so that one that does not fit takes no other with it."""
        try:
            slots = [(self._placed(put), put.view) for put in run]
            written = self._slab.write_run(slots) if len(slots) > 1 else [self._slab.write(*slots[0])]
        except Exception as error:  # noqa: BLE001  whatever it is, who waits must hear of it and the lane must go on
            if len(run) > 1:
                for put in run:
                    self._write([put])
                return
            self._post.send(partial(self._not_written, run[0], error))
            self._list([], ended=1)
        else:
            for put, placed in zip(run, written, strict=True):
                put.placed = placed
            self._list(run, ended=len(run))

    def _placed(self, put: _Put) -> Placed:
        return Placed(put.want.key, put.at, put.want.size, self._catalog.next_seq(), b"", who=put.who)

    def _list(self, run: Sequence[_Put], *, ended: int) -> None:
        """Enter what is written into the index, when no more is coming: a commit flushes the device, which stalls writes."""
        now = time.monotonic()
        with self._lock:
            self._in_lanes -= ended
            if run and not self._unlisted:
                self._since = now
            self._unlisted += run
            if not self._unlisted or (self._in_lanes and now - self._since < _LONGEST):
                return
            listing, self._unlisted = self._unlisted, []
        asked = self._index.submit([record(put.placed) for put in listing if put.placed is not None])
        asked.add_done_callback(partial(self._indexed, listing))

    # On the index's thread

    def _indexed(self, run: Sequence[_Put], done: Future[None]) -> None:
        self._post.send(partial(self._written, run, done.exception()))

    # On the loop

    def _written(self, run: Sequence[_Put], error: BaseException | None) -> None:
        for put in run:
            assert put.placed is not None
            self._slots_written += put.nbytes
            if error is None:
                self._catalog.enter(put.placed)
                self._end(put, kept=True)
            else:
                self._catalog.withdraw(put.placed)  # the entry may have landed all the same
                self._failed(put, error)
        self._stats.bytes_written = self._slots_written + self._index.bytes_written

    def _not_written(self, put: _Put, error: Exception) -> None:
        self._catalog.vacate(put.at, put.nbytes)
        self._failed(put, error)

    def _failed(self, put: _Put, error: BaseException) -> None:
        self._stats.failed(error)
        _log.warning("%s: a value was not stored: %s", self._name, error)
        self._end(put, kept=False)

    def _end(self, put: _Put, *, kept: bool) -> None:
        if kept:
            self._stats.bytes_in += put.want.size
        else:
            self._catalog.cancel(put.want, put.who)
            self._stats.drops += 1
        del self._under_way[put.want.key]
        put.over.set_result(None)
        put.batch.end(put.index, kept=kept)
