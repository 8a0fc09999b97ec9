"""What an engine holds while its KV is looked for or moves: questions and transfers, which end by themselves and never raise."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Final

import msgspec

from kvstore import api
from kvstore.connectors.bounded import Bounded
from kvstore.ids import Link

LOOK_S: Final = 0.25  # what is not known by then is a miss
SOON_S: Final = 0.0015  # a question is waited for that long: a node that has the answer in memory needs less


class Counts(msgspec.Struct):
    """What became of what an engine asked, since it started.

    Attributes:
        looks: Questions, by `hit`, `partial`, `miss`, `late`, `busy` and `unavailable`.
        blocks: By `loaded`, `lost` (promised by a look-up and not there), `saved`, `known` (stored before) and `dropped`.
        calls: About sessions, by their outcome: `ok`, or the kind of the error.
        nbytes: By `loaded` and `saved`.
    """

    looks: Counter[str] = msgspec.field(default_factory=Counter)
    blocks: Counter[str] = msgspec.field(default_factory=Counter)
    calls: Counter[str] = msgspec.field(default_factory=Counter)
    nbytes: Counter[str] = msgspec.field(default_factory=Counter)


class Look:
    """A question about a chain of `of` blocks. `poll` until it is not None."""

    def __init__(self, asked: Future[api.Found] | None, of: int, counts: Counts, *, why: str) -> None:
        self._asked, self._of, self._counts, self._why = asked, of, counts, why
        self._ends = time.monotonic() + LOOK_S
        self._found: api.Found | None = None

    def poll(self, wait_s: float = SOON_S) -> api.Found | None:
        """The leading run that is stored somewhere, and where; None while that is not known: ask again, soon.

        Waits `wait_s` at most, and says that nothing is there when the time for a look-up is over.
        """
        if self._found is None:
            self._found = self._answer(wait_s)
        return self._found

    def _answer(self, wait_s: float) -> api.Found | None:
        if self._asked is None:
            return self._nothing(self._why)
        try:
            found = self._asked.result(max(0.0, min(wait_s, self._ends - time.monotonic())))
        except TimeoutError:
            return None if time.monotonic() < self._ends else self._nothing("late")
        except (CancelledError, Exception):  # noqa: BLE001  whoever asked has said what it was
            return self._nothing("unavailable")
        self._counts.looks["hit" if found.run == self._of else "partial" if found.run else "miss"] += 1
        return found

    def _nothing(self, why: str) -> api.Found:
        if self._asked is not None:
            self._asked.cancel()
        self._counts.looks[why] += 1
        return api.Found(run=0, tiers=[])


class Stopped(Exception):
    """The engine needs the memory for something else."""


class Transfer:
    """Blocks on their way, in either direction.

    Args:
        links: Which ones.
        settle: Waits for copies that were begun and may still run, on a device's stream.

    Attributes:
        links: Which ones.
    """

    def __init__(self, links: Sequence[Link], settle: Callable[[], None] | None = None) -> None:
        self.links = links
        self._settle = settle
        self._future: Future[int] | None = None
        self._stopped = threading.Event()
        self._moving = threading.Lock()

    def begin(self, workers: Bounded, work: Callable[[], int]) -> bool:
        """Hand `work` to them, which returns how many leading blocks arrived; False where they have too much to do."""
        self._future = workers.submit(work)
        return self._future is not None

    def guarded(self, copy: Callable[[int, memoryview], None]) -> Callable[[int, memoryview], None]:
        """`copy`, which raises `Stopped` instead once `stop` was called."""

        def guarded(index: int, view: memoryview) -> None:
            with self._moving:
                if self._stopped.is_set():
                    raise Stopped
                copy(index, view)

        return guarded

    def settle(self) -> None:
        """Wait for copies that were begun."""
        if self._settle is not None:
            with self._moving:
                self._settle()

    @property
    def done(self) -> bool:
        """Whether it is over: from then on the engine's memory is not touched."""
        return self._future is None or self._future.done()

    @property
    def run(self) -> int:
        """How many leading blocks arrived. Ask when it is done."""
        if self._future is None or self._future.cancelled() or self._future.exception() is not None:
            return 0
        return self._future.result()

    def stop(self) -> None:
        """No byte of the engine's memory is touched once this returns; it waits for the copy of one block at most."""
        self._stopped.set()
        if self._future is not None:
            self._future.cancel()
        with self._moving:
            if self._settle is not None:
                self._settle()

    def then(self, call: Callable[[], None]) -> None:
        """Call this when it is over: on some thread, or at once where it is already. It must not raise."""
        if self._future is None:
            call()
        else:
            self._future.add_done_callback(lambda _: call())

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it came."""
        return self._future is None or not wait([self._future], timeout_s).not_done
