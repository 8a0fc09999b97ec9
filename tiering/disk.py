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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from tiering.catalog import Catalog, Entry
from tiering.extents import rounded, with_slack
from tiering.index import JOURNAL, META, SLOTS, Change, Index
from tiering.journal import Journal
from tiering.lanes import Lanes, Post
from tiering.movers import Movers, settled
from tiering.owners import Owners
from tiering.policy import Lru, Policy
from tiering.prewrite import Prewrite, was_prewritten
from tiering.recovery import recover, stopped
from tiering.sealer import Seals
from tiering.slab import Placed, ShortRead, Slab, slot_length
from tiering.space import Space
from tiering.stats import TierStats
from tiering.storing import Storing
from tiering.tier import Lease, Miss, PathInUse, Want, Watch

_log = logging.getLogger("tiering.disk")

READERS = 6  # four reads keep a device busy while others are digested


class _Files(NamedTuple):
    slab: Slab
    tables: Index
    placed: list[Placed]
    records: dict[bytes, bytes]
    prewritten: bool


class Read:
    """A read that was asked for; see :class:`tiering.lanes.Job`. Its owner may withdraw it."""

    __slots__ = ("asked", "at", "begun", "entry", "into", "joins", "nbytes", "outcome", "then", "who")

    def __init__(self, entry: Entry, into: memoryview, then: Callable[[Miss | None], None], who: int) -> None:
        self.entry, self.into, self.then, self.who = entry, into, then, who
        self.at, self.nbytes = entry.placed.offset, slot_length(entry.placed.size)
        self.joins, self.begun = not entry.placed.salt, False  # sealed ones are opened one by one
        self.outcome: bool | Exception = False  # whether the bytes are right, or what happened
        self.asked = time.monotonic()


class DiskTier:
    """A byte-limited map of values on one file system; see :class:`tiering.Tier`.

    A put is durable when it returns True. Every read is checked against the value's xxh3_128: bytes that changed on disk are a
    CORRUPT miss, and the value is dropped. The limit counts payload; headers, padding and the index lie outside it.

    All but `open`, `contains_many`, `keys`, `watch`, `hold`, `release`, `discard_many` and the properties belongs to one event
    loop.

    Attributes:
        name: Its name in leases, statistics and logs.
        stats: Counters since it was opened.
        journal: Durable records beside the values.
        direct: Whether the file system takes O_DIRECT.
    """

    def __init__(self, name: str, limit: int, movers: Movers, files: _Files, owners: Owners) -> None:
        self.name = name
        self.stats = TierStats()
        self.journal = Journal(files.tables, files.records)
        self.direct = files.slab.direct
        self._movers = movers
        self._slab = files.slab
        self._index = files.tables
        used = [(placed.offset, placed.length) for placed in files.placed]
        space = Space(files.slab.size, used, written=files.prewritten)
        self._catalog = Catalog(limit, files.placed, space=space, owners=owners, unlist=self._unlist, stats=self.stats)
        self._prewrite = Prewrite(name, slab=self._slab, index=self._index, catalog=self._catalog, movers=movers)
        self._post = Post(asyncio.get_running_loop())
        self._storing = Storing(
            name,
            slab=self._slab,
            index=self._index,
            catalog=self._catalog,
            prewrite=self._prewrite,
            post=self._post,
            stats=self.stats,
        )
        self._lanes: Lanes[Read] = Lanes(f"{name}-read", self._read, READERS)
        self._at_work = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        path: Path,
        limit: int,
        movers: Movers,
        *,
        name: str = "nvme",
        policy: Callable[[], Policy] = Lru,
        seals: Seals | None = None,
        owners: Sequence[int] = (0,),
    ) -> AsyncIterator[Self]:
        """Open or create a tier in the folder `path`, for `limit` payload bytes.

        A new slab is written once in the background, so that its pages are real; the tier works meanwhile.

        Args:
            path: The folder.
            limit: Payload bytes.
            movers: Threads.
            name: In leases, statistics and logs.
            policy: Makes a ranking of what goes first; least recently used by default.
            seals: Makes what seals values, their keys and the journal. A folder is sealed from its beginning, or never.
            owners: Who shares it, as numbers below 2^64 that outlive a restart: `who` of what is put and read. Room is taken from
                whoever has most. Where it is one's alone, so is all that is found.

        Raises:
            PathInUse: Another tier has the folder open.
            TierError: Another version of this software wrote it.
            SealedOtherwise: It is sealed and `seals` is None, or the other way round.
            OSError: The folder cannot be used.
        """
        with contextlib.ExitStack() as closing:
            files = await movers.run(_open_files, closing, path, limit, seals, owners)
            tier = cls(name, limit, movers, files, Owners(owners, policy))
            for lanes in (tier._lanes, tier._storing.lanes):
                closing.enter_context(lanes.running())
            prewriting = asyncio.create_task(tier._prewrite.run())
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

    @property
    def prewritten(self) -> bool:
        """Whether a new slab has been written once: until then puts share the disk with that."""
        return self._prewrite.over

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are here now, durably."""
        return [self._catalog.contains(key) for key in keys]

    def keys(self) -> list[bytes]:
        """What is here at this moment: for 100,000 values half a millisecond, during which nothing else runs."""
        return self._catalog.keys()

    def watch(self, told: Watch | None) -> None:
        """Tell one listener of every value that comes and goes from now on; None ends it."""
        self._catalog.watch = told

    def asked(self, keys: Sequence[bytes], told: int = 0, *, who: int = 0) -> None:
        """One request of an owner wants these, here or not; see :class:`tiering.policy.Policy`."""
        self._catalog.asked(keys, told, who)

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
        """Drop values as room is made, until `nbytes` are freed or all that is left is pinned; how many bytes were freed."""
        return 0 if self._closed else self._catalog.evict(nbytes)

    async def get_many(self, wants: Sequence[Want]) -> list[Lease | Miss]:
        """Read each value into memory of its own; the caller bounds how much it asks for at once."""
        return list(await asyncio.gather(*map(self._get, wants)))

    async def read_into(self, want: Want, into: memoryview) -> Miss | None:
        """As `read`, and wait for it. After a cancellation too, `into` is the caller's again when this has ended."""
        landed: asyncio.Future[Miss | None] = asyncio.get_running_loop().create_future()
        read = self.read(want, into, landed.set_result)
        if isinstance(read, Miss):
            return read
        try:
            await asyncio.wait((landed,))
        except asyncio.CancelledError:
            if not self.withdraw(read):
                await settled(landed)
            raise
        return landed.result()

    def read(self, want: Want, into: memoryview, then: Callable[[Miss | None], None], *, who: int = 0) -> Read | Miss:
        """Read a value straight into a page-aligned buffer of whole pages, such as `Slot.padded`. Reads start in the order asked.

        Args:
            want: The value.
            into: Nobody else's until `then`, or a `withdraw` that succeeds.
            then: Called on the loop, once. None: the first `want.size` bytes are the value. CORRUPT: it was dropped. UNAVAILABLE:
                the disk failed.
            who: For whom: those who share a disk take turns.

        Returns:
            Something to withdraw; or at once ABSENT, or UNAVAILABLE when the tier is closed, and `then` is never called.
        """
        entry = None if self._closed else self._catalog.pin(want)
        if entry is None:
            miss = Miss.UNAVAILABLE if self._closed else Miss.ABSENT
            self.stats.miss(miss)
            return miss
        read = Read(entry, into, then, who)
        self._enter()
        self._lanes.submit(read)
        return read

    def withdraw(self, read: Read) -> bool:
        """Nobody wants it any more. False: it has begun, and `then` will be called; the buffer is in use until then."""
        if not self._lanes.withdraw(read):
            return False
        self._catalog.unpin(read.entry)
        self._leave()
        return True

    async def put_many(self, items: Sequence[tuple[Want, memoryview]], *, must: bool = False, who: int = 0) -> list[bool]:
        """Store each value; True when it is durable. False where there was no room, the policy declined, or the disk refused.

        Page-aligned views are written from where they are. A cancelled call ends when nothing uses the views any more.

        Args:
            items: Values and their bytes.
            must: Somebody relies on it: the policy is not asked.
            who: Whose they are: it has the turns as in `read`, and the room.

        Raises:
            TypeError: A view is not contiguous.
        """
        if not all(view.c_contiguous for _, view in items):
            raise TypeError("a value's view must be contiguous")
        if self._closed:
            return [False] * len(items)
        self._enter()
        try:
            return await settled(asyncio.ensure_future(self._storing.put_many(items, must=must, who=who)))
        finally:
            self._leave()

    async def flush(self, keys: Sequence[bytes]) -> list[bool]:
        """Wait for puts of these keys that are under way; then, which of them are durable."""
        await self._storing.wait(keys)
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

    def _read(self, run: Sequence[Read]) -> None:
        """On a lane: neighbours together, and each alone where that does not tell which of them is wrong."""
        try:
            together = len(run) > 1 and self._slab.read_run([(read.entry.placed, read.into) for read in run])
        except Exception:  # noqa: BLE001  each alone tells what it is
            together = False
        for read in run:
            try:
                read.outcome = together or self._slab.read(read.entry.placed, read.into)
            except Exception as error:  # noqa: BLE001  whatever it is, who waits must hear of it and the lane must go on
                read.outcome = error
            self._post.send(partial(self._landed, read))

    def _landed(self, read: Read) -> None:
        self._catalog.unpin(read.entry)
        self._leave()
        miss = self._judge(read)
        if miss is None:
            self.stats.hit(read.entry.placed.size)
            self.stats.reads.observe(time.monotonic() - read.asked)
        else:
            self.stats.miss(miss)
        read.then(miss)

    def _judge(self, read: Read) -> Miss | None:
        if read.outcome is True:
            return None
        problem, error = "its digest is wrong", read.outcome
        if isinstance(error, Exception):
            problem = str(error)
            if not isinstance(error, ShortRead):
                self.stats.failed(error)
            if not isinstance(error, OSError) or error.errno != errno.EIO:
                _log.warning("%s: reading failed: %s", self.name, error)
                return Miss.UNAVAILABLE
        _log.warning("%s: dropped %s: %s", self.name, read.entry.placed.key.hex(), problem)
        self.stats.corruptions += 1
        self._catalog.spoil(read.entry)
        return Miss.CORRUPT

    def _unlist(self, placed: Placed, then: Callable[[], None]) -> None:
        self._index.submit([Change(SLOTS, placed.name, None)], then)

    def _enter(self) -> None:
        self._at_work += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._at_work -= 1
        if not self._at_work:
            self._idle.set()


def _open_files(closing: contextlib.ExitStack, path: Path, limit: int, seals: Seals | None, owners: Sequence[int]) -> _Files:
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
    index = Index.open(path / "index", reserve=(1 << 20) + slab.size // 256, barrier=slab.sync, seals=seals)
    slab.sealer = index.sealer
    closing.callback(index.close)
    meta = dict(index.load(META))
    records = dict(index.load(JOURNAL))
    placed, lost = recover(index, slab, limit, owners)
    if lost:
        _log.warning("%s: %d values did not survive the last stop", path, lost)
    return _Files(slab, index, placed, records, was_prewritten(meta, slab.size))
