"""The device tier: values in memory of an accelerator, promoted from the memory tier and leased to the engine in this process.

Bytes go from the arena, which the device's driver has registered, straight into device memory, on a stream of their own: part by
part (a model's layers), so that whoever computes layer i waits for layer i alone. Memory that is not registered goes through two
pinned buffers. torch is imported by `DeviceTier.open`.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

from tiering.budget import Budget
from tiering.policy import Lru, Policy
from tiering.stats import TierStats
from tiering.streams import Device, Mark, open_device
from tiering.tier import Lease, Miss, Want
from tiering.upload import Item, Uploads, Value

if TYPE_CHECKING:
    from torch import Tensor

Cut = Callable[[Want], Sequence[int]]
"""Where the parts of a value end, in bytes, ascending; the last one is its size."""

Run = Callable[..., Awaitable[object]]


class DeviceLease:
    """A value that stays where it is until released. Its bytes may still be arriving: `wait` first.

    Attributes:
        key: The value's key.
        size: Length in bytes.
        source: Name of the tier that had it when it was asked for.
        tensor: The bytes, u8 [size], on the device. Do not write there.
    """

    __slots__ = ("_tier", "_value", "key", "size", "source", "tensor")

    def __init__(self, tier: DeviceTier, value: Value, source: str) -> None:
        self._tier = tier
        self._value: Value | None = value
        self.key, self.size, self.tensor, self.source = value.key, value.size, value.tensor, source

    def wait(self, part: int = -1) -> None:
        """What the caller's current stream does from now on waits until a part (by default the last), and all before, is there.

        The host goes on at once. Raises `ValueError` after the release.
        """
        self._mark(part).hold_up()

    def synchronize(self, part: int = -1) -> None:
        """The host waits for it. Raises `ValueError` after the release."""
        self._mark(part).wait()

    def release(self) -> None:
        """Let go, once the work that uses it is queued on the current stream. A second call does nothing."""
        value, self._value = self._value, None
        if value is not None:
            self._tier._release(value)  # noqa: SLF001  a lease is its tier's other half

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _mark(self, part: int) -> Mark:
        value = self._value
        if value is None:
            raise ValueError("this lease was released")
        end = value.ends[part]
        return value.marks[bisect_left(value.marks, end, key=lambda each: each[0])][1]


class DeviceTier:
    """A byte-limited map of values in a device's memory: `tiering.Tier`, but for its leases.

    Memory is kept by size of value (a layout has one size), and reused without asking the device again; what is in use, reserved
    and kept together never passes the limit. It belongs to one event loop; leases may be released from any thread.

    Attributes:
        name: Its name in leases and statistics.
        stats: Counters since it was opened. Where the device is out of memory, `drops` and `errors` count.
    """

    def __init__(self, name: str, limit: int, device: Device, run: Run, policy: Policy, cut: Cut, uploads: Uploads) -> None:
        self.name = name
        self.stats = TierStats()
        self._device, self._run, self._policy, self._cut, self._uploads = device, run, policy, cut, uploads
        self._budget = Budget(limit)
        self._values: dict[bytes, Value] = {}
        self._idle: defaultdict[int, list[tuple[Tensor, list[Mark]]]] = defaultdict(list)
        self._idle_bytes = 0
        self._pinned = 0
        self._coming: dict[bytes, asyncio.Future[None]] = {}  # values whose copies are about to be queued
        self._copying = asyncio.Lock()  # one batch at a time: part i of all its values comes before part i + 1 of any
        self._finishing: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        name: str,
        limit: int,
        device: str,
        run: Run,
        *,
        arena: memoryview | None = None,
        cut: Cut | None = None,
        policy: Policy | None = None,
    ) -> AsyncIterator[Self]:
        """A tier on a device, empty.

        Args:
            name: Its name.
            limit: Bytes of the device's memory, taken as values come.
            device: As torch spells it: `cuda:0`, or `cpu`, where the same code runs in this host's memory.
            run: Runs a function on a thread, to its end also when the caller is cancelled (`Movers.run`).
            arena: The memory tier's, writable; it is registered with the device's driver. Open for longer than this tier.
            cut: The parts of a value; by default it has one.
            policy: Who goes first; least recently used by default.

        Raises:
            ValueError: There is no such device.
        """
        found = open_device(device)
        memory = _tensor(arena) if arena is not None else None
        if memory is not None and not await run(found.register, memory):
            memory = None
        tier = cls(name, limit, found, run, policy or Lru(), cut or _whole, Uploads(found, memory))
        try:
            yield tier
        finally:
            await tier.aclose()

    @property
    def device(self) -> str:
        """Which device, as torch spells it."""
        return self._device.name

    @property
    def registered(self) -> bool:
        """Whether copies leave from the arena itself."""
        return self._uploads.arena is not None

    @property
    def used(self) -> int:
        """Payload bytes held or reserved; never above `limit`."""
        return self._budget.held

    @property
    def limit(self) -> int:
        """Payload bytes it may hold."""
        return self._budget.limit

    @property
    def allocated(self) -> int:
        """Bytes of the device's memory: `used`, and what is kept for values to come; never above `limit`."""
        return self._budget.held + self._idle_bytes

    async def get_many(self, wants: Sequence[Want]) -> list[DeviceLease | Miss]:
        """Each value leased, or why not; in the order asked. It never waits."""
        found: list[DeviceLease | Miss] = []
        with self._lock:
            for want in wants:
                got = self._lease(want, self.name)
                if isinstance(got, Miss):
                    self.stats.miss(got)
                else:
                    self.stats.hit(want.size)
                found.append(got)
        return found

    async def promote_many(self, items: Sequence[tuple[Want, Lease]]) -> list[DeviceLease | Miss]:
        """Bring values up from the memory tier; each leased, or why not: FULL where the tier or the device has no room.

        It is over when the copies are queued, so that whoever called reads what comes next while they run. Also when it fails or is
        cancelled, the leases handed in are released, once their bytes have been copied.
        """
        try:
            return await self._bring([Item(want, lease.view, lease.offset, lease.source) for want, lease in items])
        finally:
            self._finish([lease for _, lease in items])

    async def put_many(self, items: Sequence[tuple[Want, memoryview]]) -> list[bool]:
        """Keep a copy of each value. False where there was no room, or the view is not `want.size` bytes."""
        kept = []
        for want, view in items:
            got: DeviceLease | Miss = Miss.ABSENT
            if view.nbytes == want.size:
                (got,) = await self._bring([Item(want, view.cast("B"))])
            if isinstance(got, DeviceLease):
                got.release()
            kept.append(isinstance(got, DeviceLease))
        return kept

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are here now."""
        values = self._values
        return [key in values for key in keys]

    def discard_many(self, keys: Sequence[bytes]) -> int:
        """Forget these values unless they are leased; how many went."""
        gone = 0
        with self._lock:
            for key in keys:
                value = self._values.get(key)
                if value is not None and not value.leases:
                    self._policy.remove(key)
                    self._forget(value)
                    gone += 1
        return gone

    async def evict(self, nbytes: int) -> int:
        """Drop values until `nbytes` are freed or all that is left is leased; how many were freed. Their memory is given back."""
        with self._lock:
            before = self._budget.used
            while before - self._budget.used < nbytes and self._evict_one():
                pass
            self._shrink(self._idle_bytes)
            return before - self._budget.used

    async def aclose(self) -> None:
        """Wait for what is being copied, and let go of the device. Leases that are out stay readable until they are released."""
        with self._lock:
            self._closed = True
        if self._finishing:
            await asyncio.wait(self._finishing)
        async with self._copying:
            await self._run(self._device.close)
        self._uploads.close()
        with self._lock:
            self._shrink(self._idle_bytes)

    # --- bringing values in ---

    async def _bring(self, items: Sequence[Item]) -> list[DeviceLease | Miss]:
        found, others = await self._bring_new(items)
        try:
            for index in others:
                while (coming := self._coming.get(items[index].want.key)) is not None:
                    await asyncio.wait((coming,))
                (found[index],) = await self._bring([items[index]])
        except BaseException:
            _release_all(found)
            raise
        return found

    async def _bring_new(self, items: Sequence[Item]) -> tuple[list[DeviceLease | Miss], list[int]]:
        """All but those that are on their way already, for somebody else or by this batch: the indices of these."""
        found: list[DeviceLease | Miss] = []
        new: dict[int, Value] = {}
        others: list[int] = []
        try:
            for index, item in enumerate(items):
                if item.want.key in self._coming:
                    others.append(index)
                    found.append(Miss.UNAVAILABLE)
                    continue
                got = self._take(item.want, item.name)
                if isinstance(got, Value):
                    self._coming[got.key] = asyncio.get_running_loop().create_future()
                    new[index], got = got, Miss.UNAVAILABLE
                found.append(got)
            if new:
                await self._copied([(value, items[index]) for index, value in new.items()])
            for index, value in new.items():
                found[index] = self._commit(value, items[index].name)
        except BaseException:
            _release_all(found)
            raise
        finally:
            for value in new.values():
                self._coming.pop(value.key).set_result(None)
                if self._values.get(value.key) is not value:
                    self._abort(value)
        return found, others

    async def _copied(self, batch: Sequence[tuple[Value, Item]]) -> None:
        async with self._copying:
            try:
                await self._run(self._uploads.queue, batch)
            except RuntimeError as error:  # of the device: to the engine it is a miss
                self.stats.failed(error)
                for value, _ in batch:
                    value.marks.clear()

    def _finish(self, leases: Sequence[Lease]) -> None:
        """Release these once what is queued by now has been copied."""

        async def finish() -> None:
            try:
                if not mark.passed():
                    await self._run(mark.wait)
            finally:
                for lease in leases:
                    lease.release()

        try:
            mark = self._device.mark()
        except RuntimeError as error:  # of the device: nothing is copied any more
            self.stats.failed(error)
            for lease in leases:
                lease.release()
            return
        task = asyncio.create_task(finish())
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    # --- room ---

    def _take(self, want: Want, source: str) -> Value | DeviceLease | Miss:
        """A lease where it is here, else room for it, reserved; or why not."""
        with self._lock:
            got = self._lease(want, source)
            if got is not Miss.ABSENT:
                return got
            if want.size <= 0:
                return Miss.ABSENT
            if want.size > self.limit - self._pinned - self._budget.reserved or not self._policy.admit(want.key, want.size):
                return self._full()
            while not self._budget.reserve(want.size):
                if not self._evict_one():
                    return self._full()
            room = self._room(want.size)
            if room is None:
                self._budget.cancel(want.size)
                return self._full()
            return Value(want, room[0], self._cut(want), room[1])

    def _room(self, size: int) -> tuple[Tensor, list[Mark]] | None:
        """Memory for a value whose bytes are reserved: some that is kept, or new."""
        if rooms := self._idle[size]:
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
            self.stats.failed(error)
            return None

    def _shrink(self, nbytes: int) -> None:
        """Give back at least that many bytes of what is kept, as far as there are."""
        for size, rooms in list(self._idle.items()):
            while rooms and nbytes > 0:
                _, busy = rooms.pop()
                for mark in busy:
                    self._device.after(mark)
                self._idle_bytes -= size
                nbytes -= size

    def _commit(self, value: Value, source: str) -> DeviceLease | Miss:
        with self._lock:
            if self._closed or not value.marks:
                return Miss.UNAVAILABLE
            old = self._values.get(value.key)  # of another size
            if old is not None:
                self._policy.remove(old.key)
                self._forget(old)
            self._budget.commit(value.size)
            self._values[value.key] = value
            self.stats.bytes_in += value.size
            return self._leased(value, source)

    def _abort(self, value: Value) -> None:
        with self._lock:
            self._budget.cancel(value.size)
            self._keep(value)

    def _lease(self, want: Want, source: str) -> DeviceLease | Miss:
        if self._closed:
            return Miss.UNAVAILABLE
        value = self._values.get(want.key)
        if value is None or value.size != want.size:
            return Miss.ABSENT
        return self._leased(value, source)

    def _leased(self, value: Value, source: str) -> DeviceLease:
        if not value.leases:
            self._policy.remove(value.key)
            self._pinned += value.size
        value.leases += 1
        return DeviceLease(self, value, source)

    def _release(self, value: Value) -> None:
        mark = self._device.in_use()
        with self._lock:
            value.busy = [each for each in value.busy if not each.passed()]
            if not mark.passed():
                value.busy.append(mark)
            value.leases -= 1
            if value.leases:
                return
            self._pinned -= value.size
            if self._values.get(value.key) is value:
                self._policy.add(value.key)
            else:
                self._free(value)

    def _full(self) -> Miss:
        self.stats.drops += 1
        return Miss.FULL

    def _forget(self, value: Value) -> None:
        """The key leads nowhere now; the room is free when nobody uses it."""
        del self._values[value.key]
        if not value.leases:
            self._free(value)

    def _free(self, value: Value) -> None:
        self._budget.free(value.size)
        self._keep(value)

    def _keep(self, value: Value) -> None:
        self._idle[value.size].append((value.tensor, value.busy))
        self._idle_bytes += value.size
        if self._closed:
            self._shrink(value.size)

    def _evict_one(self) -> bool:
        key = self._policy.victim()
        if key is None:
            return False
        self._forget(self._values[key])
        self.stats.evictions += 1
        return True


def _release_all(found: Iterable[DeviceLease | Miss]) -> None:
    for got in found:
        if isinstance(got, DeviceLease):
            got.release()


def _whole(want: Want) -> Sequence[int]:
    return (want.size,)


def _tensor(memory: memoryview) -> Tensor:
    import torch  # noqa: PLC0415  whoever has no device tier need not have it

    return torch.frombuffer(memory, dtype=torch.uint8)
