"""Single flight: many ask for one thing, one piece of work gets it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Flight(Generic[T]):
    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiters = 0


class Flights(Generic[T]):
    """At most one piece of work per key.

    A waiter that is cancelled leaves the others and the work alone; the last one to leave cancels the work. An error reaches
    every waiter. The result belongs to all waiters together: when the last has left, it is handed to `dispose`.

    Args:
        dispose: Called once with every result.
    """

    def __init__(self, dispose: Callable[[T], None]) -> None:
        self._dispose = dispose
        self._flights: dict[Hashable, _Flight[T]] = {}
        self._tasks: set[asyncio.Task[T]] = set()  # also those that nobody waits for and that are winding down

    @asynccontextmanager
    async def join(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> AsyncIterator[T]:
        """Wait for the work under this key, starting it if nobody has. The result may be used inside the block.

        Raises:
            Exception: Whatever the work raised.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
            self._tasks.add(flight.task)
            started = flight
            flight.task.add_done_callback(lambda _: self._landed(key, started))
        flight.waiters += 1
        try:
            yield await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters:
                if flight.task in self._tasks:
                    self._forget(key, flight)
                    flight.task.cancel()
                else:
                    self._end(flight)

    async def aclose(self) -> None:
        """Cancel all work, and wait for its end."""
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _landed(self, key: Hashable, flight: _Flight[T]) -> None:
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
