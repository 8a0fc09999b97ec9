"""Writing behind: values go on to a slower place after their writer has been answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable

from tiering.budget import Budget
from tiering.stats import TierStats
from tiering.tier import Lease, Want

_log = logging.getLogger("tiering.behind")
_MOST_VALUES = 65_536  # a bound on bookkeeping, should values be tiny

Write = Callable[[Want, Lease], Awaitable[bool]]


class WriteBehind:
    """A bounded queue in front of one target. What does not fit is dropped and counted; nobody ever waits to get in.

    Each queued value is leased, so its bytes stay as they are until they are written.

    Args:
        name: The target's.
        write: Keeps one value. False or an exception: it was not kept.
        ready: Whether writing has a chance now.
        limit: Bytes of values that may be queued or being written.
        writers: How many are written at once.
        stats: Of the target; `drops` counts what did not fit.

    Attributes:
        overflows: How often the queue was full.
    """

    def __init__(self, name: str, write: Write, ready: Callable[[], bool], *, limit: int, writers: int, stats: TierStats) -> None:
        self.name = name
        self._write, self._ready = write, ready
        self._budget = Budget(limit)
        self._writers = asyncio.Semaphore(writers)
        self._stats = stats
        self.overflows = 0
        self._queued: dict[bytes, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def queued(self) -> int:
        """Bytes queued or being written."""
        return self._budget.held

    def put(self, want: Want, lease: Lease) -> bool:
        """Queue a value; the lease is released when it is written or dropped. A repeat of what is queued is True.

        Returns:
            False where it was dropped.
        """
        if want.key in self._queued:
            lease.release()
            return True
        hopeless = self._closed or not self._ready()
        if hopeless or len(self._queued) >= _MOST_VALUES or not self._budget.reserve(want.size):
            self._stats.drops += 1
            self.overflows += not hopeless
            lease.release()
            return False
        task = self._queued[want.key] = asyncio.create_task(self._run(want, lease))
        task.add_done_callback(lambda _: self._over(want, lease))
        return True

    async def wait(self, keys: Iterable[bytes]) -> None:
        """Until none of these keys is queued any more, written or not."""
        tasks = [self._queued[key] for key in keys if key in self._queued]
        if tasks:
            await asyncio.wait(tasks)

    async def aclose(self, seconds: float) -> None:
        """Accept nothing more, write what was accepted for up to `seconds`, and drop the rest."""
        self._closed = True
        tasks = list(self._queued.values())
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=seconds)
        if late:
            _log.warning("%s: %d values were not written within %g s of closing", self.name, len(late), seconds)
            self._stats.drops += len(late)
            for task in late:
                task.cancel()
            await asyncio.wait(late)

    async def _run(self, want: Want, lease: Lease) -> None:
        async with self._writers:
            with contextlib.suppress(asyncio.CancelledError):
                try:
                    await self._write(want, lease)
                except Exception as error:  # noqa: BLE001  a target is foreign code: whatever it raises, the value was not kept
                    self._stats.failed(error)
                    _log.warning("%s: a value was not written: %r", self.name, error)

    def _over(self, want: Want, lease: Lease) -> None:
        """Also for a task that was cancelled before it began."""
        del self._queued[want.key]
        self._budget.cancel(want.size)
        lease.release()
