"""Writing behind: values go on to a slower place after their writer has been answered."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from tiering.budget import Budget
from tiering.stats import TierStats
from tiering.tier import Lease, Want

_log = logging.getLogger("tiering.behind")
_MOST_VALUES = 65_536  # a bound on bookkeeping, should values be tiny

Write = Callable[[Sequence[tuple[Want, Lease]]], Awaitable[None]]


class WriteBehind:
    """A bounded queue in front of one target. What does not fit is dropped and counted; nobody ever waits to get in.

    Each queued value is leased, so its bytes stay as they are until they are written.

    Args:
        name: The target's.
        write: Keeps some values, or not. An exception: they were not kept.
        ready: Whether writing has a chance now.
        limit: Bytes of values that may be queued or being written.
        writers: How many calls of `write` at once.
        batch: How many values in one.
        stats: Of the target; `drops` counts what did not fit.

    Attributes:
        overflows: How often the queue was full.
    """

    def __init__(
        self, name: str, write: Write, ready: Callable[[], bool], *, limit: int, writers: int, batch: int, stats: TierStats
    ) -> None:
        self.name = name
        self._write, self._ready = write, ready
        self._budget = Budget(limit)
        self._most, self._batch = writers, batch
        self._stats = stats
        self.overflows = 0
        self._queued: dict[bytes, asyncio.Future[None]] = {}  # also those that are being written
        self._waiting: deque[tuple[Want, Lease]] = deque()
        self._writers: set[asyncio.Task[None]] = set()
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
        self._queued[want.key] = asyncio.get_running_loop().create_future()
        self._waiting.append((want, lease))
        if len(self._writers) < self._most:
            self._writers.add(asyncio.create_task(self._run()))
        return True

    async def wait(self, keys: Iterable[bytes]) -> None:
        """Until none of these keys is queued any more, written or not."""
        over = [self._queued[key] for key in keys if key in self._queued]
        if over:
            await asyncio.wait(over)

    async def aclose(self, seconds: float) -> None:
        """Accept nothing more, write what was accepted for up to `seconds`, and drop the rest."""
        self._closed = True
        if not self._queued:
            return
        await asyncio.wait(list(self._queued.values()), timeout=seconds)
        if self._queued:
            _log.warning("%s: %d values were not written within %g s of closing", self.name, len(self._queued), seconds)
            self._stats.drops += len(self._queued)
            late = list(self._writers)
            for writer in late:
                writer.cancel()
            await asyncio.wait(late)
            self._over(self._waiting)
            self._waiting.clear()

    async def _run(self) -> None:
        """Until nothing is waiting. A cancellation ends it with what it has at hand."""
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
                try:
                    await self._write(batch)
                except Exception as error:  # noqa: BLE001  a target is foreign code: whatever it raises, the values were not kept
                    self._stats.failed(error)
                    _log.warning("%s: a value was not written: %r", self.name, error)
                finally:
                    self._over(batch)
        except asyncio.CancelledError:
            pass
        finally:
            self._writers.discard(asyncio.current_task())  # at once: whoever puts next must see that nobody is at work

    def _over(self, batch: Iterable[tuple[Want, Lease]]) -> None:
        for want, lease in batch:
            self._queued.pop(want.key).set_result(None)
            self._budget.cancel(want.size)
            lease.release()
