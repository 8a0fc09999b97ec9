"""Who may move bytes now, and how long it will take: what keeps work ahead of a request out of the way of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Literal

from kvstore.fairness import Lines

Lane = Literal["near", "far", "speculative"]
_AT_WORK: Final = 2
"""Interactive restores in each lane. Each has sixteen values on their way, which together fill a link; what more of them would have
under way arrives together all the same, and one turn of the loop that takes in too much of it is the latency of everything else."""
_GUESS: Final = 50e6  # bytes per second, until something was measured
_WEIGHT: Final = 0.2  # of the newest measurement


class Ticket:
    """A restore's place among others.

    Args:
        deadline: A point on the monotonic clock: of one tenant's, the nearest goes first.
        order: Which came first, among equals.
        speculative: Nobody waits for it. Only `Turns.promote` changes that.
        tenant: Whose: tenants take turns, so that nobody waits for all that another has asked for.

    Attributes:
        far: Its next step waits for the bucket. That is a lane of its own, so that a slow bucket keeps nobody from memory and disk.
    """

    __slots__ = ("deadline", "far", "granted", "order", "speculative", "tenant")

    def __init__(self, deadline: float, order: int, *, speculative: bool, tenant: str = "") -> None:
        self.deadline, self.order, self.speculative, self.tenant = deadline, order, speculative, tenant
        self.far = False
        self.granted: asyncio.Future[Lane] | None = None

    @property
    def lane(self) -> Lane:
        """Where it waits. Not to be changed while it does."""
        return "speculative" if self.speculative else "far" if self.far else "near"


class Turns:
    """Steps of restores, one turn each. While a request reads, or an interactive restore works or waits, no speculative one begins.

    So interactive work never waits for speculative work, and shares the link at most with the steps that had begun.

    Args:
        speculative: Speculative restores that move bytes at once.
    """

    def __init__(self, *, speculative: int) -> None:
        self._most: dict[Lane, int] = {"near": _AT_WORK, "far": _AT_WORK, "speculative": speculative}
        self._at_work: dict[Lane, int] = {"near": 0, "far": 0, "speculative": 0}
        self._waiting: dict[Lane, Lines[Ticket]] = {"near": Lines(), "far": Lines(), "speculative": Lines()}
        self._requests = 0

    @property
    def pressed(self) -> bool:
        """Whether anybody wants bytes now."""
        lanes: tuple[Lane, Lane] = ("near", "far")
        return bool(self._requests) or any(self._at_work[lane] or bool(self._waiting[lane]) for lane in lanes)

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
        self._wait(ticket)
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
                self._waiting[ticket.lane].remove(ticket)
            self._grant()

    def promote(self, ticket: Ticket, deadline: float) -> None:
        """Somebody waits for it now, until that point on the monotonic clock."""
        waits = ticket.granted is not None and not ticket.granted.done()
        if waits:
            self._waiting[ticket.lane].remove(ticket)
        ticket.deadline, ticket.speculative = min(deadline, ticket.deadline), False
        if waits:
            self._wait(ticket)
            self._grant()

    def _wait(self, ticket: Ticket) -> None:
        self._waiting[ticket.lane].put(ticket.tenant, ticket, rank=(ticket.deadline, ticket.order))

    def _grant(self) -> None:
        for lane, waiting in self._waiting.items():
            while waiting and self._at_work[lane] < self._most[lane] and not (lane == "speculative" and self.pressed):
                granted = waiting.take().granted
                if granted is not None and not granted.done():
                    self._at_work[lane] += 1
                    granted.set_result(lane)


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
