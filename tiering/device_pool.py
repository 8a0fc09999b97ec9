"""Rooms in a device's memory, and the values in them: what is held, what is leased, what goes when another needs room."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tiering.budget import Budget
from tiering.policy import Policy
from tiering.stats import TierStats
from tiering.streams import Device, Mark
from tiering.tier import Miss, Want
from tiering.upload import Cargo

if TYPE_CHECKING:
    from torch import Tensor


class Value:
    """A value on the device, or on its way there.

    Attributes:
        key: Its key.
        size: Length in bytes.
        cargo: Its room, and how far it has come.
        state: It is `coming`, then `here`; or it failed, and is `lost`.
        leases: How many use it, or will.
        makers: How many bring it: when the last has gone, what is not here is lost.
        changed: On the pool's loop: set when it has come farther, or is lost.
    """

    __slots__ = ("cargo", "changed", "key", "leases", "makers", "size", "state")

    def __init__(self, want: Want, cargo: Cargo) -> None:
        self.key, self.size, self.cargo = want.key, want.size, cargo
        self.state = "coming"
        self.leases = self.makers = 0
        self.changed = asyncio.Event()


class Pool:
    """A byte-limited map of values. Rooms are kept by size (a layout has one) and used again without asking the device.

    What is in use, reserved and kept together never passes the limit. Any thread may call it.

    Args:
        limit: Bytes.
        device: Whose memory.
        policy: Who goes first.
        stats: Where refusals, evictions and errors are counted.
    """

    def __init__(self, limit: int, device: Device, policy: Policy, stats: TierStats) -> None:
        self._device, self._policy, self._stats = device, policy, stats
        self._budget = Budget(limit)
        self._values: dict[bytes, Value] = {}
        self._coming: dict[bytes, Value] = {}
        self._idle: defaultdict[int, list[tuple[Tensor, list[Mark]]]] = defaultdict(list)
        self._idle_bytes = 0
        self._pinned = 0
        self._lock = threading.Lock()
        self._closed = False

    @property
    def used(self) -> int:
        """Bytes of values, here or coming."""
        return self._budget.held

    @property
    def limit(self) -> int:
        """Most bytes of everything."""
        return self._budget.limit

    @property
    def allocated(self) -> int:
        """Bytes of `used`, and of what is kept for values to come."""
        return self._budget.held + self._idle_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._values

    # --- leases ---

    def lease(self, want: Want) -> Value | Miss:
        """A value that is here, or why not."""
        with self._lock:
            return self._find(want)

    def release(self, value: Value) -> None:
        """Use it no longer, but for what is queued on the caller's current stream."""
        mark = self._use()
        with self._lock:
            if mark is not None:
                value.cargo.busy.append(mark)
            value.leases -= 1
            if value.leases:
                return
            if value.state == "here":
                self._pinned -= value.size
                if self._values.get(value.key) is value:
                    self._policy.add(value.key)
                else:
                    self._budget.free(value.size)
                    self._keep(value)
            elif value.state == "lost":
                self._budget.cancel(value.size)
                self._keep(value)

    # --- what comes ---

    def begin(self, want: Want, cut: Callable[[Want], tuple[int, Sequence[int]]]) -> Value | Miss:
        """Lease a value that is here, one that comes already, or a room for it: FULL where there is none.

        Of one that is not here, the caller is a maker, and ends with `leave`.

        Args:
            want: Which.
            cut: Its head and the ends of its parts.
        """
        with self._lock:
            value = self._find(want)
            if value is Miss.ABSENT and want.size > 0:
                value = self._coming.get(want.key) or self._room(want, cut)
                if isinstance(value, Value):
                    if value.size != want.size:
                        return Miss.UNAVAILABLE  # another has its key, and is not over yet
                    value.leases += 1
                    value.makers += 1
            return value

    def complete(self, value: Value) -> bool:
        """All of it is queued: others find it now. Whether it is here."""
        with self._lock:
            if value.state == "coming" and value.cargo.complete and not self._closed:
                old = self._values.get(value.key)  # of another size
                if old is not None:
                    self._policy.remove(old.key)
                    self._forget(old)
                del self._coming[value.key]
                self._budget.commit(value.size)
                self._values[value.key] = value
                self._pinned += value.size  # its makers have it leased
                value.state = "here"
                self._stats.bytes_in += value.size
            return value.state == "here"

    def leave(self, value: Value) -> bool:
        """Bring it no longer; whether it is lost by that."""
        with self._lock:
            value.makers -= 1
            return not value.makers and self._lose(value)

    def lose(self, value: Value) -> bool:
        """Its bytes are not what they should be, or did not come; whether this is news."""
        with self._lock:
            return self._lose(value)

    # --- room ---

    def discard(self, key: bytes) -> bool:
        """Forget a value unless it is leased."""
        with self._lock:
            value = self._values.get(key)
            if value is None or value.leases:
                return False
            self._policy.remove(key)
            self._forget(value)
            return True

    def evict(self, nbytes: int) -> int:
        """Forget values until so many bytes are free, or all that is left is leased; give all memory back that nobody uses."""
        with self._lock:
            before = self._budget.used
            while before - self._budget.used < nbytes and self._evict_one():
                pass
            self._shrink(self._idle_bytes)
            return before - self._budget.used

    def refuse(self) -> None:
        """Nothing is found, and nothing comes in any more; what is leased stays."""
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """Give memory back: of values that nobody leases now, of the others when they are released."""
        with self._lock:
            self._closed = True
            while self._evict_one():
                pass
            self._shrink(self._idle_bytes)

    # --- inside, under the lock ---

    def _find(self, want: Want) -> Value | Miss:
        if self._closed:
            return Miss.UNAVAILABLE
        value = self._values.get(want.key)
        if value is None or value.size != want.size:
            return Miss.ABSENT
        if not value.leases:
            self._policy.remove(value.key)
            self._pinned += value.size
        value.leases += 1
        return value

    def _room(self, want: Want, cut: Callable[[Want], tuple[int, Sequence[int]]]) -> Value | Miss:
        if want.size > self.limit - self._pinned - self._budget.reserved or not self._policy.admit(want.key, want.size):
            return self._full()
        head, ends = cut(want)
        while not self._budget.reserve(want.size):
            if not self._evict_one():
                return self._full()
        memory = self._memory(want.size)
        if memory is None:
            self._budget.cancel(want.size)
            return self._full()
        value = self._coming[want.key] = Value(want, Cargo(memory[0], ends, head, memory[1]))
        return value

    def _memory(self, size: int) -> tuple[Tensor, list[Mark]] | None:
        """Some that is kept, or new."""
        if rooms := self._idle.get(size):
            self._idle_bytes -= size
            return rooms.pop()
        self._shrink(self.allocated - self.limit)
        try:
            return self._device.allocate(size), []
        except RuntimeError:
            self._shrink(self._idle_bytes)
        try:
            return self._device.allocate(size), []
        except RuntimeError as error:
            self._stats.failed(error)
            return None

    def _full(self) -> Miss:
        self._stats.drops += 1
        return Miss.FULL

    def _lose(self, value: Value) -> bool:
        if value.state != "coming":
            return False
        del self._coming[value.key]
        value.state, value.cargo.closed = "lost", True
        if not value.leases:
            self._budget.cancel(value.size)
            self._keep(value)
        return True

    def _forget(self, value: Value) -> None:
        """The key leads nowhere now; the room is free when nobody uses it."""
        del self._values[value.key]
        if not value.leases:
            self._budget.free(value.size)
            self._keep(value)

    def _keep(self, value: Value) -> None:
        self._idle[value.size].append((value.cargo.tensor, value.cargo.busy))
        self._idle_bytes += value.size
        if self._closed:
            self._shrink(value.size)

    def _shrink(self, nbytes: int) -> None:
        """Give back at least that many bytes of what is kept, as far as there are."""
        for size, rooms in list(self._idle.items()):
            while rooms and nbytes > 0:
                _, busy = rooms.pop()
                self._idle_bytes -= size
                nbytes -= size
                self._behind(busy)
            if not rooms:
                del self._idle[size]

    def _behind(self, busy: Sequence[Mark]) -> None:
        """Memory that is given back is used again, by whomever, behind its last users."""
        try:
            for mark in busy:
                self._device.after(mark)
        except RuntimeError as error:  # of the device: nothing is used any more
            self._stats.failed(error)

    def _use(self) -> Mark | None:
        """Where the caller's stream is now; None where nothing is queued there, or the device has failed."""
        try:
            mark = self._device.in_use()
            return None if mark.passed() else mark
        except RuntimeError as error:
            self._stats.failed(error)
            return None

    def _evict_one(self) -> bool:
        key = self._policy.victim()
        if key is None:
            return False
        self._forget(self._values[key])
        self._stats.evictions += 1
        return True
