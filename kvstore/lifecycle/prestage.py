"""Who may move bytes now, and how long it will take: what keeps work ahead of a request out of the way of requests."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Final

_AT_WORK: Final = 64  # restores that move bytes at once: more would only share the same link, and all be late
_GUESS: Final = 50e6  # bytes per second, until something was measured
_WEIGHT: Final = 0.2  # of the newest measurement


class Ticket:
    """A restore's place among others. `speculative` may be changed by `Turns.promote` only.

    Args:
        deadline: A point on the monotonic clock: the nearest goes first.
        order: Which came first, among equals.
        speculative: Nobody waits for it.
    """

    __slots__ = ("deadline", "granted", "order", "speculative")

    def __init__(self, deadline: float, order: int, *, speculative: bool) -> None:
        self.deadline, self.order, self.speculative = deadline, order, speculative
        self.granted: asyncio.Future[bool] | None = None

    def __lt__(self, other: Ticket) -> bool:
        return (self.deadline, self.order) < (other.deadline, other.order)


class Turns:
    """Steps of restores, one turn each. While a request reads, or an interactive restore works or waits, no speculative one begins.

    So interactive work never waits for speculative work, and shares the link at most with the steps that had begun.

    Args:
        speculative: Speculative restores that move bytes at once.
    """

    def __init__(self, *, speculative: int) -> None:
        self._most = {False: _AT_WORK, True: speculative}
        self._at_work = {False: 0, True: 0}
        self._waiting: dict[bool, list[Ticket]] = {False: [], True: []}
        self._requests = 0

    @property
    def pressed(self) -> bool:
        """Whether anybody wants bytes now."""
        return bool(self._requests or self._at_work[False] or self._waiting[False])

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around a read that somebody waits for; it begins at once."""
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._grant()

    @asynccontextmanager
    async def turn(self, ticket: Ticket, seconds: float | None) -> AsyncIterator[None]:
        """Wait for a turn, and have it for the block.

        Raises:
            TimeoutError: It did not come within `seconds`.
        """
        granted = ticket.granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[ticket.speculative], ticket)
        self._grant()
        try:
            async with asyncio.timeout(seconds):
                await granted
            yield
        finally:
            ticket.granted = None
            if granted.done() and not granted.cancelled():
                self._at_work[granted.result()] -= 1
            else:
                self._leave(ticket)
            self._grant()

    def promote(self, ticket: Ticket, deadline: float) -> None:
        """Somebody waits for it now, until that point on the monotonic clock."""
        waits = ticket.granted is not None and not ticket.granted.done()
        if waits:
            self._leave(ticket)
        ticket.deadline, ticket.speculative = min(deadline, ticket.deadline), False
        if waits:
            heapq.heappush(self._waiting[False], ticket)
            self._grant()

    def _leave(self, ticket: Ticket) -> None:
        waiting = self._waiting[ticket.speculative]
        if ticket in waiting:
            waiting.remove(ticket)
            heapq.heapify(waiting)

    def _grant(self) -> None:
        for speculative, waiting in self._waiting.items():
            while waiting and self._at_work[speculative] < self._most[speculative] and not (speculative and self.pressed):
                granted = heapq.heappop(waiting).granted
                if granted is not None and not granted.done():
                    self._at_work[speculative] += 1
                    granted.set_result(speculative)


class Rates:
    """Bytes per second at which values came, by the tier they came from: moving averages."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def observe(self, source: str, nbytes: int, seconds: float) -> None:
        """Something was measured."""
        if nbytes > 0 and seconds > 0:
            rate = nbytes / seconds
            self._rates[source] = rate * _WEIGHT + self._rates.get(source, rate) * (1 - _WEIGHT)

    def seconds(self, by_source: Mapping[str, int]) -> float:
        """How long that many bytes of each source will take."""
        return sum(nbytes / self._rates.get(source, _GUESS) for source, nbytes in by_source.items())
