"""What an engine holds while its KV is looked for or moves: questions and transfers, which end by themselves and never raise."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import TYPE_CHECKING, Final, Literal

from kvstore import api
from kvstore.connectors.bounded import Bounded
from kvstore.errors import KVTierError
from kvstore.ids import Link

if TYPE_CHECKING:
    from kvstore.client.direct import Asked

LOOK_S: Final = 0.25  # what is not known by then is a miss
_SPIN_S: Final = 0.0001  # and for that long awake: then the core is the node's, should there be no other
SOON_S: Final = 0.001  # a question is waited for that long: a node that has the answer in memory needs less


class Counts:
    """What became of what an engine asked, since it started. Any thread may add to it.

    Attributes:
        looks: Questions, by `hit`, `partial`, `miss`, `late`, `busy` and `unavailable`.
        blocks: By `loaded`, `lost` (promised by a look-up and not there), `saved`, `known` (stored before) and `dropped`.
        calls: About sessions, by their outcome: `ok`, or the kind of the error.
        nbytes: By `loaded` and `saved`.
    """

    def __init__(self) -> None:
        self.looks, self.blocks = Counter[str](), Counter[str]()
        self.calls, self.nbytes = Counter[str](), Counter[str]()
        self._told: dict[str, dict[str, int]] = {}
        self._adding = threading.Lock()

    def add(self, field: Literal["looks", "blocks", "calls", "nbytes"], outcome: str, many: int = 1) -> None:
        """So many more."""
        with self._adding:
            getattr(self, field)[outcome] += many

    def all(self) -> dict[str, dict[str, int]]:
        """All of it, by attribute and outcome."""
        with self._adding:
            return self._all()

    def news(self) -> dict[str, dict[str, int]]:
        """What was added since this was last asked, by attribute and outcome: for metrics that add it up."""
        with self._adding:
            before, self._told = self._told, self._all()
            now = self._told
        news = {field: dict(Counter(counts) - Counter(before.get(field))) for field, counts in now.items()}
        return {field: counts for field, counts in news.items() if counts}

    def _all(self) -> dict[str, dict[str, int]]:
        return {"looks": dict(self.looks), "blocks": dict(self.blocks), "calls": dict(self.calls), "nbytes": dict(self.nbytes)}


class Look:
    """A question about a chain of blocks. `poll` until it is not None.

    Args:
        at_once: Has the answer where the node knows it at once.
        ask: Asks on another thread, where that takes longer.
        of: How many blocks.
        counts: Where the outcome is counted.
        why: It could not be asked.
    """

    def __init__(
        self, at_once: Asked | None, ask: Callable[[], Future[api.Found] | None], of: int, counts: Counts, *, why: str = "busy"
    ) -> None:
        self._at_once, self._ask, self._of, self._counts, self._why = at_once, ask, of, counts, why
        self._asked = ask() if at_once is None else None
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
        left = max(0.0, min(wait_s, self._ends - time.monotonic()))
        found = None
        if self._at_once is not None:
            found = self._soon(self._at_once, left)
        elif self._asked is None:
            return self._nothing(self._why)
        else:
            try:
                found = self._asked.result(left)
            except TimeoutError:
                pass
            except (CancelledError, Exception):  # noqa: BLE001  whoever asked has said what it was
                return self._nothing("unavailable")
        if found is None:
            return None if time.monotonic() < self._ends else self._nothing("late")
        self._counts.add("looks", "hit" if found.run == self._of else "partial" if found.run else "miss")
        return found

    def _soon(self, asked: Asked, wait_s: float) -> api.Found | None:
        """The answer of a node that knows it."""
        began = time.perf_counter()
        ends = began + wait_s
        try:
            while (found := asked.poll()) is None and (now := time.perf_counter()) < ends:
                if now < began + _SPIN_S:
                    os.sched_yield()
                else:
                    asked.wait(ends - now)
        except KVTierError:
            self._at_once, self._asked = None, self._ask()
            return None
        return found

    def _nothing(self, why: str) -> api.Found:
        if self._at_once is not None:
            self._at_once.drop()
        if self._asked is not None:
            self._asked.cancel()
        self._counts.add("looks", why)
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
