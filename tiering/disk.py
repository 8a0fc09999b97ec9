"""The disk tier: values in one slab file, found through an index that is never ahead of the bytes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import mmap
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Self

import xxhash

from tiering.catalog import Catalog, Entry
from tiering.extents import rounded, with_slack
from tiering.index import JOURNAL, META, SLOTS, Change, Index
from tiering.journal import Journal
from tiering.movers import Movers, settled
from tiering.policy import Lru, Policy
from tiering.recovery import record, recover, stopped
from tiering.slab import Placed, ShortRead, Slab, slot_length
from tiering.space import Space
from tiering.stats import TierStats
from tiering.tier import Lease, Miss, PathInUse, Want

_log = logging.getLogger("tiering.disk")
_PREWRITE_STEP = 4 << 20
_PREWRITTEN = b"prewritten"  # size of the slab whose every page was written once


class _Files(NamedTuple):
    slab: Slab
    tables: Index
    placed: list[Placed]
    records: dict[bytes, bytes]
    prewritten: bool


class DiskTier:
    """A byte-limited map of values on one file system; see :class:`tiering.Tier`.

    A put is durable when it returns True. Every read is checked against the value's xxh3_128: bytes that changed on disk are a
    CORRUPT miss, and the value is dropped. The limit counts payload; headers, padding and the index lie outside it.

    Coroutines belong to one event loop; the plain methods may be called from any thread.

    Attributes:
        name: Its name in leases, statistics and logs.
        stats: Counters since it was opened.
        journal: Durable records beside the values.
        direct: Whether the file system takes O_DIRECT.
    """

    def __init__(self, name: str, limit: int, movers: Movers, files: _Files, policy: Policy) -> None:
        self.name = name
        self.stats = TierStats()
        self.journal = Journal(files.tables, files.records)
        self.direct = files.slab.direct
        self._movers = movers
        self._slab = files.slab
        self._index = files.tables
        used = [(placed.offset, placed.length) for placed in files.placed]
        space = Space(files.slab.size, used, written=files.prewritten)
        self._catalog = Catalog(limit, files.placed, space=space, policy=policy, unlist=self._unlist, stats=self.stats)
        self._storing: dict[bytes, asyncio.Future[None]] = {}
        self._writers = asyncio.Semaphore(max(1, movers.threads // 2))  # readers always find a thread
        self._lent: asyncio.Event | None = None  # set when a piece of the slab that is being written in advance is back
        self._at_work = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls, path: Path, limit: int, movers: Movers, *, name: str = "nvme", policy: Policy | None = None
    ) -> AsyncIterator[Self]:
        """Open or create a tier in the folder `path`, for `limit` payload bytes.

        A new slab is written once in the background, so that its pages are real; the tier works meanwhile.

        Raises:
            PathInUse: Another tier has the folder open.
            TierError: Another version of this software wrote it.
            OSError: The folder cannot be used.
        """
        with contextlib.ExitStack() as closing:
            files = await movers.run(_open_files, closing, path, limit)
            tier = cls(name, limit, movers, files, policy or Lru())
            prewriting = asyncio.create_task(tier._prewrite())
            try:
                yield tier
            finally:
                prewriting.cancel()
                await asyncio.wait((prewriting,))
                await tier.aclose()
                await movers.run(closing.close)

    @property
    def used(self) -> int:
        """Payload bytes held or reserved."""
        return self._catalog.budget.held

    @property
    def limit(self) -> int:
        """Payload bytes it may hold."""
        return self._catalog.budget.limit

    @property
    def count(self) -> int:
        """How many values are here."""
        return len(self._catalog)

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are here now, durably."""
        return [self._catalog.contains(key) for key in keys]

    def hold(self, keys: Sequence[bytes]) -> None:
        """Protect these keys from eviction, whether they are here yet or not. Holds count; `release` undoes one."""
        self._catalog.hold(keys)

    def release(self, keys: Sequence[bytes]) -> None:
        """Undo one `hold` of each."""
        self._catalog.release(keys)

    def discard_many(self, keys: Sequence[bytes]) -> int:
        """Forget these values unless they are being read or held; how many went."""
        return 0 if self._closed else self._catalog.discard(keys)

    async def evict(self, nbytes: int) -> int:
        """Drop least recently used values until `nbytes` are freed or all that is left is pinned; how many bytes were freed."""
        return 0 if self._closed else self._catalog.evict(nbytes)

    async def get_many(self, wants: Sequence[Want]) -> list[Lease | Miss]:
        """Read each value into memory of its own; the caller bounds how much it asks for at once."""
        return list(await asyncio.gather(*map(self._get, wants)))

    async def read_into(self, want: Want, into: memoryview) -> Miss | None:
        """Read a value straight into a page-aligned buffer of whole pages, such as `Slot.padded`.

        Returns:
            None when the first `want.size` bytes are the value. ABSENT; CORRUPT: it was dropped; UNAVAILABLE: the disk failed.
        """
        started = time.monotonic()
        miss: Miss | None = Miss.UNAVAILABLE
        if not self._closed:
            entry = self._catalog.pin(want)
            miss = Miss.ABSENT if entry is None else await self._read(entry, into)
        if miss is None:
            self.stats.hit(want.size)
            self.stats.reads.observe(time.monotonic() - started)
        else:
            self.stats.miss(miss)
        return miss

    async def put_many(self, items: Sequence[tuple[Want, memoryview]]) -> list[bool]:
        """Store each value; True when it is durable. False where there was no room or the disk refused.

        Page-aligned views are written from where they are. A cancelled call ends when nothing uses the views any more.

        Raises:
            TypeError: A view is not contiguous.
        """
        results = await asyncio.gather(*(self._put(want, view) for want, view in items), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result is True for result in results]

    async def flush(self, keys: Sequence[bytes]) -> list[bool]:
        """Wait for puts of these keys that are under way; then, which of them are durable."""
        storing = [self._storing[key] for key in keys if key in self._storing]
        if storing:
            await asyncio.wait(storing)
        return self.contains_many(keys)

    async def aclose(self) -> None:
        """Stop, when what is under way has ended. Everything put before is there at the next open."""
        if not self._closed:
            self._closed = True
            await self._idle.wait()
            with contextlib.suppress(OSError):  # then a start after a reboot checks every header, which is only slower
                await self._index.commit([stopped()])

    async def _get(self, want: Want) -> Lease | Miss:
        if not self._catalog.has(want):
            self.stats.miss(Miss.ABSENT)
            return Miss.ABSENT
        padded = memoryview(mmap.mmap(-1, rounded(want.size)))
        miss = await self.read_into(want, padded)
        return miss or Lease(want.key, padded[: want.size], -1, padded.release, self.name)

    async def _read(self, entry: Entry, into: memoryview) -> Miss | None:
        try:
            with self._working():
                right = await self._movers.run(self._slab.read, entry.placed, into)
            if right:
                return None
            problem = "its digest is wrong"
        except OSError as error:
            if error.errno != errno.EIO:
                self.stats.failed(error)
                _log.warning("%s: reading failed: %s", self.name, error)
                return Miss.UNAVAILABLE
            if not isinstance(error, ShortRead):
                self.stats.failed(error)
            problem = str(error)
        finally:
            self._catalog.unpin(entry)
        _log.warning("%s: dropped %s: %s", self.name, entry.placed.key.hex(), problem)
        self.stats.corruptions += 1
        self._catalog.spoil(entry)
        return Miss.CORRUPT

    async def _put(self, want: Want, view: memoryview) -> bool:
        if not view.c_contiguous:
            raise TypeError("a value's view must be contiguous")
        if self._closed or want.size <= 0 or view.nbytes != want.size:
            return False
        with self._working():
            return await settled(asyncio.ensure_future(self._store(want, view)))

    async def _store(self, want: Want, view: memoryview) -> bool:
        """Runs to its end whatever happens to the caller, so that room and index agree at every await."""
        while want.key in self._storing:
            await asyncio.wait((self._storing[want.key],))
        if self._catalog.touch(want):
            return True
        done = self._storing[want.key] = asyncio.get_running_loop().create_future()
        reserved = kept = False
        try:
            reserved = self._catalog.reserve(want)
            kept = reserved and await self._write(want, view)
        except OSError as error:
            self.stats.failed(error)
            _log.warning("%s: a value was not stored: %s", self.name, error)
        finally:
            if reserved and not kept:
                self._catalog.cancel(want)
            del self._storing[want.key]
            done.set_result(None)
        if kept:
            self.stats.bytes_in += want.size
        else:
            self.stats.drops += 1
        return kept

    async def _write(self, want: Want, view: memoryview) -> bool:
        """Write a value whose payload is reserved: its room, its bytes, its entry, each after the one before is done."""
        offset = await self._place(want)
        if offset is None:
            return False
        try:
            async with self._writers:
                placed = await self._movers.run(self._write_slot, want, offset, view)
        except BaseException:
            self._catalog.vacate(offset, slot_length(want.size))
            raise
        try:
            await self._index.commit([record(placed)])
        except BaseException:
            self._catalog.withdraw(placed)  # the entry may have landed all the same
            raise
        self._catalog.enter(placed)
        return True

    async def _place(self, want: Want) -> int | None:
        while (offset := self._catalog.place(slot_length(want.size))) is None:
            if self._lent is not None:  # a piece that is written in advance comes back in a moment: nothing need go for it
                await self._lent.wait()
            elif self._catalog.make_way():
                await self._index.commit([])  # room comes free when the index has caught up
            else:
                break
        return offset

    def _write_slot(self, want: Want, offset: int, view: memoryview) -> Placed:
        placed = Placed(want.key, offset, want.size, self._catalog.next_seq(), xxhash.xxh3_128_digest(view))
        self._slab.write(placed, view)
        return placed

    def _unlist(self, placed: Placed, then: Callable[[], None]) -> None:
        self._index.submit([Change(SLOTS, placed.key, None)], then)

    async def _prewrite(self) -> None:
        try:
            while (piece := self._catalog.borrow(_PREWRITE_STEP)) is not None:
                written, back = False, asyncio.Event()
                self._lent = back
                try:
                    await self._movers.run(self._slab.zero, *piece)
                    written = True
                finally:
                    self._catalog.give_back(*piece, written=written)
                    self._lent = None
                    back.set()
            await self._index.commit([Change(META, _PREWRITTEN, b"%d" % self._slab.size)])
        except OSError as error:
            _log.warning("%s: stopped writing the new slab in advance: %s", self.name, error)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self._at_work += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._at_work -= 1
            if not self._at_work:
                self._idle.set()


def _open_files(closing: contextlib.ExitStack, path: Path, limit: int) -> _Files:
    """Open everything a tier needs, and leave it to `closing`. Blocking."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    closing.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PathInUse(f"{path} is open already, by this process or another: give each node a folder of its own") from None
    slab = Slab.open(path / "slab", with_slack(limit))
    closing.callback(slab.close)
    # An entry takes about 120 bytes: this is enough for values of 32 KiB, and the file may grow to eight times as much.
    index = Index.open(path / "index", reserve=(1 << 20) + slab.size // 256, barrier=slab.sync)
    closing.callback(index.close)
    meta = dict(index.load(META))
    records = dict(index.load(JOURNAL))
    placed, lost = recover(index, slab, limit)
    if lost:
        _log.warning("%s: %d values did not survive the last stop", path, lost)
    return _Files(slab, index, placed, records, meta.get(_PREWRITTEN) == b"%d" % slab.size)
