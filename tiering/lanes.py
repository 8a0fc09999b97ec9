"""Threads that wait for one device in place of the event loop, and tell it how it went."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from tiering.movers import be_nice

_log = logging.getLogger("tiering.lanes")

MOST_JOINED = 1 << 20  # larger requests are no faster, and keep other lanes from sharing the work


class Job(Protocol):
    """One request to the device.

    Attributes:
        at: Where it begins.
        nbytes: How much of the device it covers.
        joins: Whether it may be done together with its neighbour.
        who: Whose it is: each has the next turn in their turn, however many jobs another has waiting.
        begun: Set once a lane has it: it cannot be withdrawn any more.
    """

    at: int
    nbytes: int
    joins: bool
    who: int
    begun: bool


J = TypeVar("J", bound=Job)


class Post:
    """Calls on an event loop from other threads. Those that come close together wake it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._awake = False

    def send(self, call: Callable[[], None]) -> None:
        """Have the loop make this call soon; in the order sent. From any thread."""
        self._calls.append(call)
        if not self._awake:  # two threads may both see this: the loop then wakes twice, and finds nothing the second time
            self._awake = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._awake = False  # before looking: what is sent from here on wakes the loop again
        while self._calls:
            try:
                self._calls.popleft()()
            except Exception:  # noqa: BLE001  one who fails must not keep the others from hearing
                _log.exception("after a request to a device")


class Lanes(Generic[J]):
    """As many requests at a device as it has threads: of one owner in the order given, owners in turns.

    The threads are polite (`movers.be_nice`), and more than there are cores: they wait for the device, they do not compute. A lane
    takes small neighbours together: one request for each costs more than their bytes.

    Args:
        name: Of the threads.
        work: Does jobs that lie one behind the other, on a lane. It tells of the outcome, and never raises.
        threads: How many.
    """

    def __init__(self, name: str, work: Callable[[Sequence[J]], None], threads: int) -> None:
        self._name, self._work, self._count = name, work, threads
        self._jobs: dict[int, deque[J]] = {}  # by owner, of those who have any; whose turn is next comes first
        self._waiting = 0  # bytes of them
        self._open = True
        self._change = threading.Condition()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the threads for as long as the block lasts; leaving it does what is waiting first. Blocking."""
        threads = [threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True) for i in range(self._count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            with self._change:
                self._open = False
                self._change.notify_all()
            for thread in threads:
                thread.join()

    def submit(self, job: J) -> None:
        """Queue a job; its owner bounds how many. From any thread."""
        with self._change:
            jobs = self._jobs.get(job.who)
            if jobs is None:
                jobs = self._jobs[job.who] = deque()
            jobs.append(job)
            self._waiting += job.nbytes
            self._change.notify()

    def withdraw(self, job: J) -> bool:
        """Take a job back. False: a lane has it, and will tell of its outcome."""
        with self._change:
            if job.begun:
                return False
            jobs = self._jobs[job.who]
            jobs.remove(job)
            if not jobs:
                del self._jobs[job.who]
            self._waiting -= job.nbytes
            job.begun = True
            return True

    def _run(self) -> None:
        be_nice()
        while run := self._next():
            self._work(run)

    def _next(self) -> list[J]:
        """The first job, and neighbours behind it, leaving the other lanes their share; none at the end."""
        with self._change:
            while not self._jobs:
                if not self._open:
                    return []
                self._change.wait()
            share = min(MOST_JOINED, self._waiting // self._count)
            who = next(iter(self._jobs))
            jobs = self._jobs.pop(who)
            run = [self._take(jobs)]
            end, size = run[0].at + run[0].nbytes, run[0].nbytes
            while jobs and run[-1].joins and jobs[0].joins:
                following = jobs[0]
                size += following.nbytes
                if following.at != end or size > share:
                    break
                end += following.nbytes
                run.append(self._take(jobs))
            if jobs:
                self._jobs[who] = jobs  # behind the others
            return run

    def _take(self, jobs: deque[J]) -> J:
        job = jobs.popleft()
        self._waiting -= job.nbytes
        job.begun = True
        return job
