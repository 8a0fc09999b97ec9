"""The memory tier: values in one shared arena, leased without a copy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Self

from tiering.arena import Arena
from tiering.budget import Budget
from tiering.extents import Extents, rounded, with_slack
from tiering.movers import Movers
from tiering.policy import Policy
from tiering.policy_reuse import Reuse
from tiering.prefetch import Holds
from tiering.ranking import NEVER, Ranking
from tiering.stats import TierStats
from tiering.tier import Lease, Miss, TierClosed, Want, Watch

_log = logging.getLogger("tiering.dram")
_POPULATE_STEP = 8 << 20  # a few milliseconds of a mover thread


class DramValue:
    """A value in the arena, as `pin_all` hands it out.

    Attributes:
        key: Its key.
        offset: Where it starts in the arena.
        size: Bytes.
        leases: How many read it; see :class:`tiering.ranking.Ranked`, also for `used`.
        gone: Whether its key leads nowhere by now; the bytes stay as long as somebody reads them.
        borrowed: Whether it is easily had again, and was not used since it came: it makes way before what is not.
    """

    __slots__ = ("borrowed", "gone", "key", "leases", "offset", "size", "used")

    def __init__(self, key: bytes, offset: int, size: int) -> None:
        self.key = key
        self.offset = offset
        self.size = size
        self.leases = 0
        self.gone = self.borrowed = False
        self.used = NEVER


class DramSlot:
    """Room in the arena for one value; see :class:`tiering.Slot`."""

    __slots__ = ("_ahead", "_open", "_tier", "offset", "padded", "view", "want")

    def __init__(self, tier: DramTier, want: Want, offset: int, padded: memoryview, *, ahead: bool) -> None:
        self.want = want
        self.offset = offset
        self.padded = padded
        self.view = padded[: want.size]
        self._tier = tier
        self._ahead = ahead
        self._open = True

    def commit(self, *, borrowed: bool = False) -> Lease:
        """Make the value visible, and lease it to the writer.

        `borrowed`: it is easily had again, and the next to go when nobody reads it, until it is used once more.

        If the key got a value meanwhile, that one is kept and leased, and this room is given back: equal keys mean equal values.

        Raises:
            ValueError: The slot was ended before.
            TierClosed: The tier was closed meanwhile.
        """
        if not self._open:
            raise ValueError("this slot was committed or aborted before")
        # A page's rest holds what was here before. It goes to disk with the value: let it be zeros.
        self.padded[self.want.size :] = bytes(self.padded.nbytes - self.want.size)
        self._close()
        tier, used = self._tier, not self._ahead
        return tier._commit(self.want, self.offset, use=used, borrowed=borrowed)  # noqa: SLF001  a slot is its tier's other half

    def abort(self) -> None:
        """Give the room back; nothing after `commit`."""
        if self._open:
            self._close()
            self._tier._abort(self.want, self.offset)  # noqa: SLF001  a slot is its tier's other half

    def _close(self) -> None:
        self._open = False
        for view in (self.view, self.padded):
            with contextlib.suppress(BufferError):  # an array made from it is alive; its owner promised not to write any more
                view.release()


class DramTier:
    """A byte-limited map of values in one arena; see :class:`tiering.Tier`.

    Everything but the coroutines may be called from any thread.

    Attributes:
        name: Its name in leases, statistics and logs.
        stats: Counters since it was opened.
    """

    def __init__(self, name: str, limit: int, arena: Arena, values: dict[bytes, DramValue], ranking: Ranking) -> None:
        self.name = name
        self.stats = TierStats()
        self._arena = arena
        self._ranking = ranking
        self._budget = Budget(limit)
        self._extents = Extents(arena.size)
        self._values = values
        self._watch: Watch | None = None
        self._leases = 0
        self._pinned = 0  # bytes in use that are leased: they cannot make room
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        name: str,
        limit: int,
        movers: Movers,
        *,
        policy: Policy | None = None,
        held: float = 0.5,
        recent_s: float = 60.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> AsyncIterator[Self]:
        """Map an arena for `limit` payload bytes. Its pages are made real in the background, while it is in use.

        Args:
            name: Its name.
            limit: Payload bytes.
            movers: Threads that make the pages.
            policy: Who goes first; by default what promises the fewest uses for its room (:class:`tiering.policy_reuse.Reuse`).
            held: The part of it that may be held (`hold`), 0 to 1.
            recent_s: What was used within that many seconds does not make way for what is brought in ahead of its use, and for
                others only when nothing is held any more.
            monotonic: The clock of uses and holds.

        Raises:
            OSError: The system refuses the memory.
        """
        arena = Arena.create(name, with_slack(limit))
        values: dict[bytes, DramValue] = {}
        ranking = Ranking(values, policy or Reuse(), Holds(int(limit * held)), recent_s=recent_s, monotonic=monotonic)
        tier = cls(name, limit, arena, values, ranking)
        populating = asyncio.create_task(tier._populate(movers))
        try:
            yield tier
        finally:
            populating.cancel()
            await asyncio.wait((populating,))
            await tier.aclose()

    @property
    def fd(self) -> int:
        """The arena, for a reader on this host to map read-only."""
        return self._arena.fd

    @property
    def size(self) -> int:
        """Bytes a reader maps."""
        return self._arena.size

    @property
    def memory(self) -> memoryview:
        """All of the arena, writable, for a device's driver to register. What nobody leased may change at any time."""
        return self._arena.view

    @property
    def used(self) -> int:
        """Payload bytes held or reserved."""
        return self._budget.held

    @property
    def limit(self) -> int:
        """Payload bytes it may hold."""
        return self._budget.limit

    @property
    def leases(self) -> int:
        """How many leases are out."""
        return self._leases

    @property
    def count(self) -> int:
        """How many values are here."""
        return len(self._values)

    @property
    def held(self) -> int:
        """Bytes that are held ahead of their use."""
        with self._lock:
            return self._ranking.held

    def lease(self, want: Want, *, use: bool = False) -> Lease | Miss:
        """One value, without counting a hit or a miss: for who put it here a moment ago."""
        with self._lock:
            return self._lease(want, use=use)

    def lease_many(self, wants: Sequence[Want], *, use: bool = True, after: Sequence[bytes] = ()) -> list[Lease | Miss]:
        """Each value leased, or why not; in the order asked.

        Args:
            wants: What.
            use: A use ends its hold; bringing values in ahead is none.
            after: What the same request asked for before, in prefix order.
        """
        found: list[Lease | Miss] = []
        with self._lock:
            if use:
                self._ranking.asked([*after, *(want.key for want in wants)], len(after))
            for want in wants:
                got = self._lease(want, use=use)
                if isinstance(got, Miss):
                    self.stats.miss(got)
                else:
                    self.stats.hit(want.size)
                found.append(got)
        return found

    def asked(self, keys: Sequence[bytes], told: int = 0) -> None:
        """One request wants these; see :class:`tiering.policy.Policy`. For what no look-up of this tier tells by itself."""
        with self._lock:
            self._ranking.asked(keys, told)

    def pin_all(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[DramValue] | None:
        """All of these values leased, without an object for each lease; None, and nothing counted, where one is not here.

        The short way for a reader in another process, which needs offsets only. Whoever gets values gives them to `pinned`, which
        costs more than this and can wait until the reader has its answer, and in the end to `unpin_all`.
        """
        with self._lock:
            if self._closed:
                return None
            found = []
            for value, size in zip(map(self._values.get, keys), sizes, strict=True):
                if value is None or value.size != size:
                    return None
                found.append(value)
            for value in found:
                if not value.leases:
                    self._pinned += value.size
                    value.borrowed = False
                value.leases += 1
            self._leases += len(found)
            self.stats.hits += len(found)
            self.stats.bytes_out += sum(sizes)
            return found

    def pinned(self, values: Sequence[DramValue]) -> None:
        """The other half of `pin_all`: somebody wanted these, in this order; and they have no rank while they are read."""
        with self._lock:
            self._ranking.asked([value.key for value in values])
            self._ranking.lease_all(value for value in values if not value.gone)

    def unpin_all(self, values: Sequence[DramValue]) -> None:
        """Give back what `pin_all` gave, each value as often as it was given."""
        with self._lock:
            free = []
            for value in values:
                value.leases -= 1
                if value.leases:
                    continue
                self._pinned -= value.size
                if value.gone:
                    self._free(value)
                else:
                    free.append(value)
            self._leases -= len(values)
            self._ranking.release_all(free)

    def reserve(self, want: Want, *, ahead: bool = False) -> DramSlot | Miss:
        """Room for a value that is about to be written, evicting what nobody leases.

        Args:
            want: The value.
            ahead: Nobody wants it yet: evict only what was not used lately and is not held.

        Returns:
            A slot whose `padded` view is page-aligned; or FULL where leases leave no room, ABSENT for a size below 1.
        """
        with self._lock:
            if self._closed:
                return Miss.UNAVAILABLE
            if want.size <= 0:
                return Miss.ABSENT
            if want.size > self.limit - self._pinned - self._budget.reserved or not self._ranking.admit(want.key, want.size):
                return self._full()
            while not self._budget.reserve(want.size):
                if not self._evict_one(ahead=ahead):
                    return self._full()
            while (offset := self._extents.allocate(want.size)) is None:  # room enough, but in pieces
                if not self._evict_one(ahead=ahead):
                    self._budget.cancel(want.size)
                    return self._full()
            return DramSlot(self, want, offset, self._arena.view[offset : offset + rounded(want.size)], ahead=ahead)

    def hold(self, owner: Hashable, keys: Sequence[bytes], *, seconds: float, yielding: bool) -> int:
        """Spare values from eviction until they are used, as long as anything that was not used lately can go instead.

        Args:
            owner: Whose hold; calling again adds to it, and it ends that many seconds from now.
            keys: In prefix order.
            seconds: How long.
            yielding: These go before what others hold, and fill at most half of what may be held.

        Returns:
            How many leading keys are held: the next one is not here, or the limit is reached.
        """
        with self._lock:
            return self._ranking.hold(owner, keys, seconds=seconds, yielding=yielding)

    def let_go(self, owner: Hashable) -> None:
        """End what this owner holds."""
        with self._lock:
            self._ranking.let_go(owner)

    def demote(self, keys: Sequence[bytes]) -> None:
        """Nobody is expected to use these any more: unless leased or held they are the next to go, the last of them first."""
        with self._lock:
            self._ranking.demote(keys)

    async def get_many(self, wants: Sequence[Want]) -> list[Lease | Miss]:
        """See :class:`tiering.Tier`; it never waits."""
        return self.lease_many(wants)

    async def put_many(self, items: Sequence[tuple[Want, memoryview]]) -> list[bool]:
        """Copy each value in. False where leases leave no room, or the view is not `want.size` bytes.

        Raises:
            TypeError: A view is not contiguous.
        """
        kept = []
        with self._lock:
            self._ranking.asked([want.key for want, _ in items])
        for want, view in items:
            kept.append(self._put(want, view))
            await asyncio.sleep(0)  # a copy holds the loop for 0.1 ms per MiB; let others run between two
        return kept

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are here now."""
        values = self._values
        return [key in values for key in keys]

    def keys(self) -> list[bytes]:
        """What is here at this moment: for 100,000 values half a millisecond, during which nothing else runs."""
        return list(self._values)

    def watch(self, told: Watch | None) -> None:
        """Tell one listener of every value that comes and goes from now on; None ends it."""
        self._watch = told

    def discard_many(self, keys: Sequence[bytes]) -> int:
        """Forget these values unless they are leased; how many went."""
        gone = 0
        with self._lock:
            for key in keys:
                value = self._values.get(key)
                if value is not None and not value.leases:
                    self._forget(value)
                    gone += 1
        return gone

    async def evict(self, nbytes: int) -> int:
        """Drop values, least useful first, until `nbytes` are freed or all that is left is leased; how many bytes were freed."""
        with self._lock:
            before = self._budget.used
            while before - self._budget.used < nbytes and self._evict_one():
                pass
            return before - self._budget.used

    async def aclose(self) -> None:
        """Stop. Leases that are out stay readable until they are released."""
        with self._lock:
            self._closed = True
            self._arena.close()

    async def _populate(self, movers: Movers) -> None:
        try:
            for offset in range(0, self._arena.size, _POPULATE_STEP):
                await movers.run(self._arena.populate, offset, _POPULATE_STEP)
        except OSError as error:
            _log.warning("arena %s: pages are made on first use: %s", self.name, error)

    def _put(self, want: Want, view: memoryview) -> bool:
        if view.nbytes != want.size:
            return False
        with self._lock:
            value = self._values.get(want.key)
            if value is not None and value.size == want.size:
                self._ranking.use(value)
                return True
        slot = self.reserve(want)
        if isinstance(slot, Miss):
            return False
        try:
            slot.view[:] = view.cast("B")
            slot.commit().release()
        finally:
            slot.abort()
        return True

    # Below: the lock is held.

    def _lease(self, want: Want, *, use: bool) -> Lease | Miss:
        if self._closed:
            return Miss.UNAVAILABLE
        value = self._values.get(want.key)
        if value is None or value.size != want.size:
            return Miss.ABSENT
        return self._leased(value, use=use)

    def _leased(self, value: DramValue, *, use: bool) -> Lease:
        if use:
            self._ranking.use(value)
        if not value.leases:
            value.borrowed &= not use  # whoever it came for reads it before this
            self._ranking.pin(value)
            self._pinned += value.size
        value.leases += 1
        self._leases += 1
        view = self._arena.view[value.offset : value.offset + value.size]
        return Lease(value.key, view, value.offset, partial(self._release, value, use=use), self.name)

    def _full(self) -> Miss:
        self.stats.drops += 1
        return Miss.FULL

    def _forget(self, value: DramValue) -> None:
        """The key leads nowhere now; the room is free when nobody reads it."""
        del self._values[value.key]
        self._ranking.forget(value)
        value.gone = True
        if self._watch is not None:
            self._watch(value.key, -1, None)
        if not value.leases:
            self._free(value)

    def _free(self, value: DramValue) -> None:
        self._budget.free(value.size)
        self._extents.free(value.offset, value.size)

    def _evict_one(self, *, ahead: bool = False) -> bool:
        key = self._ranking.victim(ahead=ahead)
        while key is not None and self._values[key].leases:  # leased, and not `pinned` yet: it has lost its rank by this
            self._ranking.pin(self._values[key])
            key = self._ranking.victim(ahead=ahead)
        if key is None:
            return False
        self._forget(self._values[key])
        self.stats.evictions += 1
        return True

    # Below: called by slots and leases, on any thread.

    def _commit(self, want: Want, offset: int, *, use: bool, borrowed: bool) -> Lease:
        with self._lock:
            old = self._values.get(want.key)
            same = old is not None and old.size == want.size
            if same or self._closed:
                self._budget.cancel(want.size)
                self._extents.free(offset, want.size)
            if self._closed:
                raise TierClosed(f"{self.name} was closed")
            if old is not None and same:
                return self._leased(old, use=use)
            if old is not None:
                self._forget(old)
            self._budget.commit(want.size)
            value = self._values[want.key] = DramValue(want.key, offset, want.size)
            self.stats.bytes_in += want.size
            if self._watch is not None:
                self._watch(want.key, 1, want.ref)
            lease = self._leased(value, use=use)
            value.borrowed = borrowed
            return lease

    def _abort(self, want: Want, offset: int) -> None:
        with self._lock:
            self._budget.cancel(want.size)
            self._extents.free(offset, want.size)

    def _release(self, value: DramValue, *, use: bool) -> None:
        with self._lock:
            if use:
                self._ranking.touch(value)
            self._leases -= 1
            value.leases -= 1
            if value.leases:
                return
            self._pinned -= value.size
            if value.gone:
                self._free(value)
                return
            if value.borrowed:
                value.used = NEVER
            self._ranking.unpin(value)
