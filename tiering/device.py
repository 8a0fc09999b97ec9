"""The device tier: values in memory of an accelerator, promoted from the memory tier and leased to the engine in this process.

Bytes go from the arena, which the device's driver has registered, straight into device memory, on a stream of their own: part by
part (a model's layers), so that whoever computes layer i waits for layer i alone. Of a value that comes from an origin, a part is
copied as soon as it is verified, while those behind it are still under way. torch is imported by `DeviceTier.open`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Self

from tiering.device_lease import DeviceLease
from tiering.device_pool import Pool, Value
from tiering.early import Early
from tiering.policy import Lru, Policy
from tiering.stats import TierStats
from tiering.streams import Device, open_device
from tiering.tier import Lease, Miss, Want
from tiering.upload import Cargo, Differs, Source, Uploads

if TYPE_CHECKING:
    from torch import Tensor

Cut = Callable[[Want], tuple[int, Sequence[int]]]
"""Of a value: how many leading bytes (its head) tell all others apart, and where its parts end, ascending, the last at its size."""

Run = Callable[..., Awaitable[Any]]


class DeviceTier:
    """A byte-limited map of values in a device's memory: `tiering.Tier`, but for its leases.

    It belongs to one event loop; leases may be released from any thread.

    Attributes:
        name: Its name in leases and statistics.
        stats: Counters since it was opened. Where the device is out of memory, `drops` and `errors` count.
    """

    def __init__(self, name: str, pool: Pool, stats: TierStats, device: Device, run: Run, cut: Cut, early: Early) -> None:
        self.name = name
        self.stats = stats
        self._pool, self._device, self._run, self._cut, self._early = pool, device, run, cut, early
        self._loop = asyncio.get_running_loop()
        self._uploads = Uploads(device, None)
        self._incoming: dict[Value, _Incoming] = {}
        self._finishing: set[asyncio.Task[None]] = set()

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
        early: Early | None = None,
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
            early: Tells of the first parts of values that are on their way to the memory tier (`Stack.early`).

        Raises:
            ValueError: There is no such device.
        """
        found, stats = open_device(device), TierStats()
        pool = Pool(limit, found, policy or Lru(), stats)
        tier = cls(name, pool, stats, found, run, cut or _whole, early or Early())
        try:
            if arena is not None:
                await tier._register(arena)
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
        return self._pool.used

    @property
    def limit(self) -> int:
        """Payload bytes it may hold."""
        return self._pool.limit

    @property
    def allocated(self) -> int:
        """Bytes of the device's memory: `used`, and what is kept for values to come; never above `limit`."""
        return self._pool.allocated

    async def get_many(self, wants: Sequence[Want]) -> list[DeviceLease | Miss]:
        """Each value leased, or why not; in the order asked. It never waits; what is still on its way is absent."""
        found: list[DeviceLease | Miss] = []
        for want in wants:
            got = self._pool.lease(want)
            if isinstance(got, Miss):
                self.stats.miss(got)
                found.append(got)
            else:
                self.stats.hit(want.size)
                found.append(DeviceLease(self._pool, got, self.name))
        return found

    @contextmanager
    def bringing(self, wants: Sequence[Want]) -> Iterator[list[DeviceLease | Miss]]:
        """Room for values that `promote_many` is to complete within the block; what it does not complete is lost at its end.

        Meanwhile their parts are copied as the memory tier's origins tell of them. Several may bring the same value: it is copied
        once, and lost when all have given up.

        Returns:
            Each value leased, here or not (`DeviceLease.arrived`); or why not, FULL where the tier or the device has no room. The
            caller releases what it got.
        """
        found: list[DeviceLease | Miss] = []
        made: list[Value] = []
        try:
            for want in wants:
                got = self._pool.begin(want, self._cut)
                if isinstance(got, Miss):
                    found.append(got)
                    continue
                found.append(DeviceLease(self._pool, got, self.name))
                if got.state != "here":
                    made.append(got)
                    self._listen(got)
            yield found
        except BaseException:
            _release(found)
            raise
        finally:
            for value in made:
                if self._pool.leave(value):
                    self._over(value)

    async def promote_many(self, items: Sequence[tuple[Want, Lease]]) -> list[DeviceLease | Miss]:
        """Bring values up from the memory tier; each leased, or why not: FULL where the tier or the device has no room.

        It is over when the copies are queued, so that whoever called reads what comes next while they run. Also when it fails or is
        cancelled, the leases handed in are released, once their bytes have been copied.
        """
        try:
            return await self._bring([(want, Source(lease.view, lease.offset), lease.source) for want, lease in items])
        finally:
            self._finish([lease for _, lease in items])

    async def put_many(self, items: Sequence[tuple[Want, memoryview]]) -> list[bool]:
        """Keep a copy of each value. False where there was no room, or the view is not `want.size` bytes."""
        kept = []
        for want, view in items:
            got: DeviceLease | Miss = Miss.ABSENT
            if view.nbytes == want.size:
                (got,) = await self._bring([(want, Source(view.cast("B")), "")])
            if isinstance(got, DeviceLease):
                got.release()
            kept.append(isinstance(got, DeviceLease))
        return kept

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are here now."""
        return [key in self._pool for key in keys]

    def discard_many(self, keys: Sequence[bytes]) -> int:
        """Forget these values unless they are leased; how many went."""
        return sum(self._pool.discard(key) for key in keys)

    async def evict(self, nbytes: int) -> int:
        """Drop values until `nbytes` are freed or all that is left is leased; how many were freed. Their memory is given back."""
        return self._pool.evict(nbytes)

    async def aclose(self) -> None:
        """Wait for what is being copied, and let go of the device. Leases that are out stay readable until they are released."""
        self._pool.refuse()
        for value in list(self._incoming):
            if self._pool.lose(value):
                self._over(value)
        try:
            while self._finishing:
                await asyncio.wait(self._finishing)
            await self._run(self._uploads.close)
        except BaseException:
            self._uploads.close()  # whoever is in a hurry waits here: memory must not be unmapped while the driver has it
            raise
        finally:
            self._pool.close()

    # --- bringing values in ---

    async def _register(self, arena: memoryview) -> None:
        memory = _tensor(arena)
        if await self._run(self._device.register, memory):
            self._uploads.arena = memory

    async def _bring(self, items: Sequence[tuple[Want, Source, str]]) -> list[DeviceLease | Miss]:
        with self.bringing([want for want, _, _ in items]) as found:
            values: dict[Value, Source] = {}
            for got, (_, source, name) in zip(found, items, strict=True):
                if isinstance(got, DeviceLease) and not got.here:
                    got.source = name
                    values.setdefault(got.value, source)
            if values:
                await self._copy(values)
            for index, got in enumerate(found):
                if isinstance(got, DeviceLease) and not self._pool.complete(got.value):
                    got.release()
                    found[index] = Miss.UNAVAILABLE
            for value in values:
                self._over(value)
            return found

    async def _copy(self, values: dict[Value, Source]) -> None:
        """Queue what is left of them; what does not get there is lost."""
        batch = {value.cargo: value for value in values}
        lost: Iterable[Cargo]
        try:
            lost = await self._run(self._uploads.queue, [(value.cargo, source) for value, source in values.items()])
        except RuntimeError as error:  # of the device: to the engine it is a miss
            self.stats.failed(error)
            lost = list(batch)
        for cargo in lost:
            self._pool.lose(batch[cargo])

    def _listen(self, value: Value) -> None:
        """Hear of its parts, once, until it is over."""
        if value not in self._incoming:
            self._incoming[value] = incoming = _Incoming(value, self._uploads, self._run, self._moved, self._broke)
            self._early.add(value.key, incoming)

    def _over(self, value: Value) -> None:
        """It is here, or lost."""
        value.changed.set()
        incoming = self._incoming.pop(value, None)
        if incoming is not None:
            self._early.remove(value.key, incoming)

    def _moved(self, value: Value) -> None:
        """Of any thread: another part is queued."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(value.changed.set)

    def _broke(self, value: Value, error: Exception) -> None:
        """Of any thread: it does not come any farther."""
        self.stats.failed(error)
        if self._pool.lose(value):
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._over, value)

    def _finish(self, leases: Sequence[Lease]) -> None:
        """Release these once what is queued by now has been copied."""

        async def finish() -> None:
            try:
                if not mark.passed():
                    await self._run(mark.wait)
            except RuntimeError as error:  # of the device: nothing is copied any more
                self.stats.failed(error)
            finally:
                for lease in leases:
                    lease.release()

        try:
            mark = self._device.mark()
        except RuntimeError as error:
            self.stats.failed(error)
            for lease in leases:
                lease.release()
            return
        task = asyncio.create_task(finish())
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)


class _Incoming:
    """Copies a value's parts on as they come to memory; see :class:`tiering.early.Watch`."""

    def __init__(
        self,
        value: Value,
        uploads: Uploads,
        run: Run,
        moved: Callable[[Value], None],
        broke: Callable[[Value, Exception], None],
    ) -> None:
        self._value, self._uploads, self._run, self._moved, self._broke = value, uploads, run, moved, broke

    def told(self, view: memoryview, offset: int, end: int) -> None:
        value = self._value
        if value.state != "coming":
            return
        try:
            if self._uploads.advance(value.cargo, Source(view, offset), end):
                self._moved(value)
        except (Differs, RuntimeError) as error:
            self._broke(value, error)

    def left(self) -> None:
        with contextlib.suppress(RuntimeError):  # of the device: it reads nothing any more
            if marks := self._value.cargo.marks:
                marks[-1][1].wait()

    async def drained(self) -> None:
        with contextlib.suppress(RuntimeError):
            if (marks := self._value.cargo.marks) and not marks[-1][1].passed():
                await self._run(marks[-1][1].wait)


def _release(found: Iterable[DeviceLease | Miss]) -> None:
    for got in found:
        if isinstance(got, DeviceLease):
            got.release()


def _whole(want: Want) -> tuple[int, Sequence[int]]:
    return 0, (want.size,)


def _tensor(memory: memoryview) -> Tensor:
    import torch  # noqa: PLC0415  whoever has no device tier need not have it

    return torch.frombuffer(memory, dtype=torch.uint8)
