"""What a disk tier holds and where: the bookkeeping, without any I/O."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from tiering.budget import Budget
from tiering.owners import Owner, Owners
from tiering.slab import Placed
from tiering.space import Space
from tiering.stats import TierStats
from tiering.tier import Want, Watch

Unlist = Callable[[Placed, Callable[[], None]], object]


class Entry:
    """A value on disk.

    Its room is free again when its key leads nowhere (`gone`), the index durably says so (`unlisted`) and nobody reads it.
    """

    __slots__ = ("gone", "owner", "pinned", "placed", "readers", "unlisted")

    def __init__(self, placed: Placed, owner: Owner) -> None:
        self.placed = placed
        self.owner = owner
        self.readers = 0
        self.pinned = False
        self.gone = False
        self.unlisted = False


class Catalog:
    """Keys, payload bytes, room and eviction order of a slab; from any thread.

    Args:
        limit: Payload bytes.
        placed: What is there, oldest first.
        space: The slab's room, in which `placed` is taken.
        owners: Whose values these are, and which goes first.
        unlist: Has the index forget a slot: ``unlist(placed, then)`` returns at once and calls `then` when that is durable.
        stats: Where evictions are counted.

    Attributes:
        watch: Told of what comes and goes; see :data:`tiering.tier.Watch`.
    """

    def __init__(
        self, limit: int, placed: Sequence[Placed], *, space: Space, owners: Owners, unlist: Unlist, stats: TierStats
    ) -> None:
        self.budget = Budget(limit)
        self._space = space
        self._owners = owners
        self._unlist = unlist
        self._stats = stats
        self.watch: Watch | None = None
        self._entries: dict[bytes, Entry] = {}
        self._holds: Counter[bytes] = Counter()
        self._pinned = 0  # bytes of values that are read or held: they cannot make room
        self._leaving = 0  # slots whose room is not free yet, because the index still names them
        self._seq = max((one.seq for one in placed), default=0)
        self._lock = threading.Lock()
        for one in placed:
            if not self.budget.reserve(one.size):
                raise ValueError(f"{len(placed)} values do not fit {limit} bytes")
            owners.of(one.who).held += one.size
            self.enter(one)

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, key: bytes) -> bool:
        """Whether a value is there, durably."""
        return key in self._entries

    def keys(self) -> list[bytes]:
        """All that is there, at one moment."""
        return list(self._entries)

    def has(self, want: Want) -> bool:
        """Whether this value, by key and size, is there."""
        entry = self._entries.get(want.key)
        return entry is not None and entry.placed.size == want.size

    def touch(self, want: Want) -> bool:
        """As `has`; and it was of use. Another value under this key, of another size, is forgotten."""
        with self._lock:
            entry = self._entries.get(want.key)
            if entry is None:
                return False
            if entry.placed.size == want.size:
                entry.owner.policy.touch(want.key)
                return True
            self._forget(entry)
            return False

    def asked(self, keys: Sequence[bytes], told: int, who: int) -> None:
        """One request of an owner wants these, here or not."""
        with self._lock:
            self._owners.of(who).policy.asked(keys, told)

    # Values that must stay

    def pin(self, want: Want) -> Entry | None:
        """Keep a value where it is while it is read; None where it is not there. `unpin` ends it."""
        with self._lock:
            entry = self._entries.get(want.key)
            if entry is None or entry.placed.size != want.size:
                return None
            entry.readers += 1
            self._rank(entry)
            return entry

    def unpin(self, entry: Entry) -> None:
        """One reader is done."""
        with self._lock:
            entry.readers -= 1
            if entry.gone:
                self._free_if_over(entry)
            else:
                self._rank(entry)

    def hold(self, keys: Sequence[bytes]) -> None:
        """Protect keys from eviction, there or not yet; holds count."""
        with self._lock:
            for key in keys:
                self._holds[key] += 1
                if key in self._entries:
                    self._rank(self._entries[key])

    def release(self, keys: Sequence[bytes]) -> None:
        """Undo one hold of each; a key that is not held is ignored."""
        with self._lock:
            for key in keys:
                if self._holds[key] > 1:
                    self._holds[key] -= 1
                    continue
                del self._holds[key]
                if key in self._entries:
                    self._rank(self._entries[key])

    # Values that come

    def admits(self, want: Want, who: int) -> bool:
        """Whether the policy finds a value worth its place, and the wear of writing it. Asked once for each that comes."""
        with self._lock:
            return self._owners.of(who).policy.admit(want.key, want.size)

    def reserve(self, want: Want, who: int) -> bool:
        """Set payload bytes aside, evicting where needed; False where pinned values, or owners who have less, leave no room.

        Then nothing goes.
        """
        with self._lock:
            if want.size > self.budget.limit - self._pinned - self.budget.reserved:
                return False
            owner = self._owners.of(who)
            owner.held += want.size  # before anything goes: at equal parts it is who asks for more that gives way
            if not self._make_room(want.size, owner):
                owner.held -= want.size
                return False
            return self.budget.reserve(want.size)

    def place(self, nbytes: int) -> int | None:
        """Take room in the slab for reserved payload. None: not now, though it may come when the index has caught up.

        The room that an evicted value leaves is used only when the index has durably forgotten that value: at whatever
        instant the process dies, no entry points at another value's bytes.
        """
        with self._lock:
            return self._space.allocate(nbytes)

    def make_way(self, who: int) -> bool:
        """Room is there, but in pieces: get more of it on its way for an owner. False where nothing more can go."""
        with self._lock:
            return self._leaving > 0 or self._evict_one(self._owners.of(who))

    def next_seq(self) -> int:
        """A number for the next slot."""
        with self._lock:
            self._seq += 1
            return self._seq

    def cancel(self, want: Want, who: int) -> None:
        """Give back what `reserve` set aside."""
        with self._lock:
            self.budget.cancel(want.size)
            self._owners.of(who).held -= want.size

    def vacate(self, offset: int, nbytes: int) -> None:
        """Give back what `place` took, where nothing could be written and no index entry ever named it."""
        with self._lock:
            self._space.free_unwritten(offset, nbytes)

    def enter(self, placed: Placed) -> None:
        """A value is there now; it was reserved before."""
        with self._lock:
            self.budget.commit(placed.size)
            entry = self._entries[placed.key] = Entry(placed, self._owners.of(placed.who))
            entry.owner.policy.add(placed.key)
            self._rank(entry)
            if self.watch is not None:
                self.watch(placed.key, 1, None)

    def withdraw(self, placed: Placed) -> None:
        """A value that may or may not have reached the index must not be there; its payload stays reserved."""
        with self._lock:
            self._leave(Entry(placed, self._owners.of(placed.who)))

    # Values that go

    def evict(self, nbytes: int) -> int:
        """Drop values until `nbytes` of payload are freed or the rest is pinned; how many were freed."""
        with self._lock:
            before = self.budget.used
            while before - self.budget.used < nbytes and self._evict_one():
                pass
            return before - self.budget.used

    def discard(self, keys: Sequence[bytes]) -> int:
        """Forget values that are not pinned; how many went."""
        gone = 0
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and not entry.pinned:
                    self._forget(entry)
                    gone += 1
        return gone

    def spoil(self, entry: Entry) -> None:
        """Its bytes are wrong: forget it, pinned or not."""
        with self._lock:
            if not entry.gone:
                self._forget(entry)

    # Pages that are written in advance

    def borrow(self, nbytes: int) -> tuple[int, int] | None:
        """Up to `nbytes` of pages that were never written: (offset, length). None where there are none."""
        with self._lock:
            return self._space.borrow(nbytes)

    def give_back(self, offset: int, length: int, *, written: bool) -> None:
        """What `borrow` lent."""
        with self._lock:
            if written:
                self._space.free(offset, length)
            else:
                self._space.free_unwritten(offset, length)

    # Below: the lock is held.

    def _rank(self, entry: Entry) -> None:
        """Let the policy know whether this value may go."""
        pinned = entry.readers > 0 or entry.placed.key in self._holds
        if pinned == entry.pinned:
            return
        entry.pinned = pinned
        if pinned:
            self._pinned += entry.placed.size
            entry.owner.policy.remove(entry.placed.key)
        else:
            self._pinned -= entry.placed.size
            entry.owner.policy.add(entry.placed.key)

    def _make_room(self, nbytes: int, asking: Owner) -> bool:
        """Evict until so many bytes can be reserved. Where all that may go is not enough, everything stays, in its order."""
        going: list[Entry] = []
        missing = nbytes - self.budget.room
        while missing > 0 and (key := self._owners.victim(asking)) is not None:
            going.append(entry := self._entries[key])
            entry.owner.held -= entry.placed.size  # it decides whose goes next
            missing -= entry.placed.size
        for entry in reversed(going):
            entry.owner.held += entry.placed.size
            if missing > 0:
                entry.owner.policy.first(entry.placed.key)
        if missing > 0:
            return False
        for entry in going:
            self._evict(entry)
        return True

    def _evict_one(self, asking: Owner | None = None) -> bool:
        key = self._owners.victim(asking)
        if key is None:
            return False
        self._evict(self._entries[key])
        return True

    def _evict(self, entry: Entry) -> None:
        self._forget(entry)
        self._stats.evictions += 1

    def _forget(self, entry: Entry) -> None:
        placed = entry.placed
        del self._entries[placed.key]
        if self.watch is not None:
            self.watch(placed.key, -1, None)
        entry.owner.policy.remove(placed.key)
        entry.owner.held -= placed.size
        self.budget.free(placed.size)
        if entry.pinned:
            self._pinned -= placed.size
        self._leave(entry)

    def _leave(self, entry: Entry) -> None:
        def unlisted() -> None:
            with self._lock:
                self._leaving -= 1
                entry.unlisted = True
                self._free_if_over(entry)

        entry.gone = True
        self._leaving += 1
        self._unlist(entry.placed, unlisted)

    def _free_if_over(self, entry: Entry) -> None:
        if entry.unlisted and not entry.readers:
            self._space.free(entry.placed.offset, entry.placed.length)
