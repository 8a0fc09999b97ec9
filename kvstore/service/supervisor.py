"""Background tasks, one by one: a failing one is started again after a while and never stops the others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

from kvstore.clock import Clock, Ids

log = logging.getLogger(__name__)
_FIRST_WAIT, _LONGEST_WAIT, _WELL_S = 1.0, 60.0, 300.0


class Supervisor:
    """Keeps tasks running until closed. `restarts` counts failures by task."""

    def __init__(self, clock: Clock, ids: Ids) -> None:
        self._clock, self._ids = clock, ids
        self._tasks: list[asyncio.Task[None]] = []
        self.restarts: Counter[str] = Counter()

    def run(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Keep `work` running; it ends for good by returning."""
        self._tasks.append(asyncio.create_task(self._keep(name, work), name=name))

    async def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        wait = _FIRST_WAIT
        while True:
            begun = self._clock.monotonic()
            try:
                await work()
            except Exception:  # any failure of one task is its own: it is logged, counted and tried again
                if self._clock.monotonic() - begun > _WELL_S:
                    wait = _FIRST_WAIT  # it had recovered from what was wrong before
                log.exception("background task %s failed; next try in about %.0f s", name, wait)
                self.restarts[name] += 1
                await self._clock.sleep(wait * (0.5 + self._ids.jitter()))
                wait = min(wait * 2, _LONGEST_WAIT)
            else:
                return

    async def stop(self, names: Collection[str]) -> None:
        """Stop some of them."""
        await self._end([task for task in self._tasks if task.get_name() in names])

    async def aclose(self) -> None:
        """Stop them all."""
        await self._end(self._tasks)

    @staticmethod
    async def _end(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
