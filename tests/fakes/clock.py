"""A clock that a test moves by hand: whoever sleeps on it wakes when the time has come, and not before."""

import asyncio
import heapq
from itertools import count


class HandClock:
    def __init__(self, wall: float = 1_700_000_000.0) -> None:
        self.wall, self._monotonic = wall, 0.0
        self._sleeping: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def now(self) -> float:
        return self.wall + self._monotonic

    def monotonic(self) -> float:
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        entry = (self._monotonic + seconds, next(self._order), woken)
        heapq.heappush(self._sleeping, entry)
        try:
            await woken
        finally:
            if entry in self._sleeping:
                self._sleeping.remove(entry)
                heapq.heapify(self._sleeping)

    @property
    def sleepers(self) -> int:
        return len(self._sleeping)

    def next(self) -> float:
        """Seconds until the first sleeper wakes."""
        return self._sleeping[0][0] - self._monotonic

    async def advance(self, seconds: float) -> None:
        """Let time pass, waking sleepers in order, and let everybody run."""
        await turns()  # who has just begun may be about to sleep
        end = self._monotonic + seconds
        while self._sleeping and self._sleeping[0][0] <= end:
            self._monotonic, _, woken = heapq.heappop(self._sleeping)
            if not woken.done():
                woken.set_result(None)
            await turns()
        self._monotonic = end
        await turns()


async def turns(n: int = 20) -> None:
    """Let other tasks run."""
    for _ in range(n):
        await asyncio.sleep(0)
