"""Single flight: many ask for one thing, one piece of work gets it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Work(NamedTuple, Generic[T]):
    """Something under way, by a task or without one.

    Attributes:
        done: Its outcome. Nobody else cancels it.
        stop: Nobody wants it any more: asks it to end soon. `done` is cancelled, or has a result all the same, when it has ended.
    """

    done: asyncio.Future[T]
    stop: Callable[[], object]


class Flight(Generic[T]):
    """One piece of work. Made and ended by :class:`Flights`, whose own all but `done` is.

    Attributes:
        done: Its outcome.
    """

    __slots__ = ("cost", "done", "key", "landed", "lingers", "stop", "waiters")

    def __init__(self, key: Hashable, work: Work[T], cost: int) -> None:
        self.done = work.done
        self.key, self.cost, self.stop = key, cost, work.stop
        self.waiters = 0
        self.landed = self.lingers = False


class Flights(Generic[T]):
    """At most one piece of work per key.

    A waiter that is cancelled leaves the others and the work alone; the last one to leave stops the work. One that merely ran out
    of time lets the work linger, within bounds: who asks next may find it done. An error reaches every waiter. The result belongs
    to all waiters together: when the last has left, it is handed to `dispose`.

    Args:
        dispose: Called once with every result.
        linger: Pieces of work that may go on with nobody waiting.
        linger_cost: What they may cost together, in the unit of `enter`'s `cost`.
    """

    def __init__(self, dispose: Callable[[T], None], *, linger: int = 0, linger_cost: int = 0) -> None:
        self._dispose = dispose
        self._most, self._most_cost = linger, linger_cost
        self._lingering = self._lingering_cost = 0
        self._flights: dict[Hashable, Flight[T]] = {}
        self._aloft: dict[Flight[T], None] = {}  # also those that nobody waits for and that are winding down

    def enter(self, key: Hashable, begin: Callable[[], Work[T]], *, cost: int = 0) -> Flight[T]:
        """Join the work under this key, or begin it. Whoever enters leaves, once.

        Args:
            key: What is wanted.
            begin: Begins the work.
            cost: Of the work, should it linger.
        """
        flight = self._flights.get(key)
        if flight is None or flight.done.done():  # what is over is no answer for who asks now
            flight = self._flights[key] = Flight(key, begin(), cost)
            self._aloft[flight] = None
            started = flight
            flight.done.add_done_callback(lambda _: self._land(started))
        self._accompany(flight)
        flight.waiters += 1
        return flight

    def leave(self, flight: Flight[T], *, late: bool = False) -> None:
        """Wait for it no longer. The result, if there was one, is not used any more.

        Args:
            flight: From `enter`.
            late: The waiter ran out of time: the work may go on.
        """
        flight.waiters -= 1
        if flight.waiters:
            return
        if flight.landed:
            self._end(flight)
        elif not flight.done.done() and not (late and self._let_linger(flight)):
            self._forget(flight)
            flight.stop()

    @asynccontextmanager
    async def join(
        self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]], *, seconds: float | None = None, cost: int = 0
    ) -> AsyncIterator[T]:
        """Wait for the work under this key, starting it as a task if nobody has. The result may be used inside the block.

        Args:
            key: What is wanted.
            work: Gets it.
            seconds: To wait. Whoever leaves by it never waits for the work's end.
            cost: Of the work, should it linger.

        Raises:
            TimeoutError: The time is over.
            Exception: Whatever the work raised.
        """

        def begin() -> Work[T]:
            task = asyncio.create_task(work())
            return Work(task, task.cancel)

        flight = self.enter(key, begin, cost=cost)
        late = False
        try:
            done, _ = await asyncio.wait((flight.done,), timeout=seconds)
            late = not done
            if late:
                raise TimeoutError
            yield flight.done.result()
        finally:
            self.leave(flight, late=late)

    def running(self, key: Hashable) -> bool:
        """Whether there is work under this key that can be joined."""
        flight = self._flights.get(key)
        return flight is not None and not flight.done.done()

    async def aclose(self) -> None:
        """Stop all work, and wait for its end."""
        for flight in list(self._aloft):
            if not flight.done.done():
                flight.stop()
        while self._aloft:
            await asyncio.wait([flight.done for flight in self._aloft])

    @property
    def lingering(self) -> int:
        """Pieces of work that go on with nobody waiting."""
        return self._lingering

    def _let_linger(self, flight: Flight[T]) -> bool:
        """Let work go on alone; False where the bounds forbid it."""
        if self._lingering >= self._most or self._lingering_cost + flight.cost > self._most_cost:
            return False
        flight.lingers = True
        self._lingering += 1
        self._lingering_cost += flight.cost
        return True

    def _accompany(self, flight: Flight[T]) -> None:
        """It is over, or somebody waits for it again."""
        if flight.lingers:
            flight.lingers = False
            self._lingering -= 1
            self._lingering_cost -= flight.cost

    def _land(self, flight: Flight[T]) -> None:
        flight.landed = True
        self._accompany(flight)
        del self._aloft[flight]
        self._forget(flight)
        if not flight.waiters:
            self._end(flight)

    def _forget(self, flight: Flight[T]) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _end(self, flight: Flight[T]) -> None:
        """Nobody waits and the work is over: exactly one of the last waiter and `_land` gets here."""
        if not flight.done.cancelled() and flight.done.exception() is None:
            self._dispose(flight.done.result())
