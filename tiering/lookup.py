"""One look-up at work: what is missing in memory is fetched, a window at a time and in order, without a task for each value."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tiering.dram import DramTier
from tiering.fetching import Fetcher, Reach
from tiering.flight import Flight, Flights
from tiering.tier import Lease, Miss, Want


class LookUp:
    """Fills the holes in what memory answered.

    Args:
        dram: The memory tier.
        flights: Of all look-ups: each value is fetched once, however many want it.
        fetcher: Brings values.
        wants: In prefix order.
        found: What memory had; filled in place. Whoever made it releases what is in it.
        deadline: See `Stack.get_many`, as the others.
        stop_at_miss: The answer ends with the first miss: what is behind it is given up.
        reach: How far down to look.
        ahead: Nobody wants it yet.
        window: Values to fetch at once.
        monotonic: The clock of the deadline.
    """

    def __init__(
        self,
        dram: DramTier,
        flights: Flights[Lease | Miss],
        fetcher: Fetcher,
        wants: Sequence[Want],
        found: list[Lease | Miss],
        *,
        deadline: float | None,
        stop_at_miss: bool,
        reach: Reach,
        ahead: bool,
        window: int,
        monotonic: Callable[[], float],
    ) -> None:
        self._dram, self._flights, self._fetcher = dram, flights, fetcher
        self._wants, self._found = wants, found
        self._deadline, self._stop_at_miss, self._reach, self._ahead = deadline, stop_at_miss, reach, ahead
        self._window, self._monotonic = window, monotonic
        self._end = len(wants)  # nothing from here on is wanted any more
        self._open: dict[int, tuple[Flight[Lease | Miss], bool]] = {}  # by place; whether it was begun by who wants it only later
        self._landed: deque[int] = deque()
        self._news: asyncio.Future[None] | None = None

    async def run(self, missing: Iterable[int]) -> None:
        """Fetch what is missing at these places, in this order."""
        todo = iter(missing)
        try:
            following = next(todo, self._end)
            while True:
                while following < self._end and len(self._open) < self._window:
                    if self._left() == 0.0:
                        break
                    self._join(following)
                    following = next(todo, self._end)
                if self._open and not self._landed:
                    await self._wait()
                while self._landed:
                    self._take(self._landed.popleft())
                if self._left() == 0.0:
                    self._give_up_late([following, *todo])
                    return
                if not self._open and following >= self._end:
                    return
        finally:
            self._let_go(range(len(self._wants)))

    def _join(self, place: int) -> None:
        """Join the flight for a value, or start it."""
        want, key = self._wants[place], (self._wants[place].key, self._wants[place].size, self._reach)
        # Who wants a value now joins whoever fetches it for later, and the other way round.
        ahead = not self._flights.running((*key, False)) if self._ahead else self._flights.running((*key, True))
        self._enter(place, want, ahead=ahead)

    def _enter(self, place: int, want: Want, *, ahead: bool) -> None:
        begin = partial(self._fetcher.begin, want, self._reach, ahead=ahead)
        flight = self._flights.enter((want.key, want.size, self._reach, ahead), begin, cost=want.size)
        self._open[place] = (flight, ahead)
        if flight.done.done():
            self._landed.append(place)
        else:
            flight.done.add_done_callback(partial(self._note, place))

    def _note(self, place: int, _: object) -> None:
        self._landed.append(place)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _wait(self) -> None:
        """Until something has landed, or the time is over."""
        self._news = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._news,), timeout=self._left())

    def _take(self, place: int) -> None:
        """One flight has landed."""
        if place not in self._open:
            return  # it was given up
        flight, ahead = self._open.pop(place)
        want = self._wants[place]
        try:
            got = self._lease(flight, want)
        finally:
            self._flights.leave(flight)
        if got is Miss.FULL and ahead and not self._ahead:  # who wants it now may make more room than who was fetching it
            self._enter(place, want, ahead=False)
            return
        self._found[place] = got
        if self._stop_at_miss and isinstance(got, Miss):
            self._end = min(self._end, place + 1)
            self._let_go(range(self._end, len(self._wants)))

    def _lease(self, flight: Flight[Lease | Miss], want: Want) -> Lease | Miss:
        if flight.done.cancelled():
            return Miss.UNAVAILABLE  # nobody cancels work that is waited for, but who closes the stack
        fetched = flight.done.result()
        if isinstance(fetched, Miss):
            return fetched
        lease = self._dram.lease(want, use=not self._ahead)
        if isinstance(lease, Lease):
            lease.source = fetched.source
        return lease

    def _give_up_late(self, rest: Iterable[int]) -> None:
        """The time is over: what is under way may go on alone, for who asks next."""
        for place in [*self._open, *rest]:
            if place < self._end:
                self._found[place] = Miss.TIMEOUT
        for flight, _ in self._open.values():
            self._flights.leave(flight, late=True)
        self._open.clear()

    def _let_go(self, places: Iterable[int]) -> None:
        for place in places:
            if place in self._open:
                self._flights.leave(self._open.pop(place)[0])

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._monotonic())
