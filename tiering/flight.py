"""Single flight: many ask for one thing, one piece of work gets it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Flight(Generic[T]):
    __slots__ = ("cost", "lingers", "task", "waiters")

    def __init__(self, task: asyncio.Task[T], cost: int) -> None:
        self.task = task
        self.waiters = 0
        self.cost = cost
        self.lingers = False


class Flights(Generic[T]):
    """At most one piece of work per key.

    A waiter that is cancelled leaves the others and the work alone; the last one to leave cancels the work. One that merely ran out
    of time lets the work linger, within bounds: who asks next may find it done. An error reaches every waiter. The result belongs
    to all waiters together: when the last has left, it is handed to `dispose`.

    Args:
        dispose: Called once with every result.
        linger: Pieces of work that may go on with nobody waiting.
        linger_cost: What they may cost together, in the unit of `join`'s `cost`.
    """

    def __init__(self, dispose: Callable[[T], None], *, linger: int = 0, linger_cost: int = 0) -> None:
        self._dispose = dispose
        self._most, self._most_cost = linger, linger_cost
        self._lingering = self._lingering_cost = 0
        self._flights: dict[Hashable, _Flight[T]] = {}
        self._tasks: set[asyncio.Task[T]] = set()  # also those that nobody waits for and that are winding down

    @asynccontextmanager
    async def join(
        self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]], *, seconds: float | None = None, cost: int = 0
    ) -> AsyncIterator[T]:
        """Wait for the work under this key, starting it if nobody has. The result may be used inside the block.

        Args:
            key: What is wanted.
            work: Gets it.
            seconds: To wait. Whoever leaves by it never waits for the work's end.
            cost: Of the work, should it linger.

        Raises:
            TimeoutError: The time is over.
            Exception: Whatever the work raised.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()), cost)
            self._tasks.add(flight.task)
            started = flight
            flight.task.add_done_callback(lambda _: self._landed(key, started))
        self._accompany(flight)
        flight.waiters += 1
        late = False
        try:
            done, _ = await asyncio.wait((flight.task,), timeout=seconds)
            late = not done
            if late:
                raise TimeoutError
            yield flight.task.result()
        finally:
            flight.waiters -= 1
            if not flight.waiters:
                if flight.task not in self._tasks:
                    self._end(flight)
                elif not late or not self._let_linger(flight):
                    self._forget(key, flight)
                    flight.task.cancel()

    def running(self, key: Hashable) -> bool:
        """Whether there is work under this key that can be joined."""
        return key in self._flights

    async def aclose(self) -> None:
        """Cancel all work, and wait for its end."""
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def lingering(self) -> int:
        """Pieces of work that go on with nobody waiting."""
        return self._lingering

    def _let_linger(self, flight: _Flight[T]) -> bool:
        """Let work go on alone; False where the bounds forbid it."""
        if self._lingering >= self._most or self._lingering_cost + flight.cost > self._most_cost:
            return False
        flight.lingers = True
        self._lingering += 1
        self._lingering_cost += flight.cost
        return True

    def _accompany(self, flight: _Flight[T]) -> None:
        """It is over, or somebody waits for it again."""
        if flight.lingers:
            flight.lingers = False
            self._lingering -= 1
            self._lingering_cost -= flight.cost

    def _landed(self, key: Hashable, flight: _Flight[T]) -> None:
        self._accompany(flight)
        self._tasks.discard(flight.task)
        self._forget(key, flight)
        if not flight.waiters:
            self._end(flight)

    def _forget(self, key: Hashable, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    def _end(self, flight: _Flight[T]) -> None:
        """Nobody waits and the work is over: exactly one of the last waiter and `_landed` gets here."""
        if not flight.task.cancelled() and flight.task.exception() is None:
            self._dispose(flight.task.result())
