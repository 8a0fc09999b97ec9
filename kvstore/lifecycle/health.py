"""What a node cannot promise just now, and why: the parts that readiness names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from kvstore.api import CollectorStats
from kvstore.clock import Clock, Ids
from kvstore.errors import Denied, KVTierError
from kvstore.objects.breaker import Breaker
from kvstore.objects.counting import CountingStore
from kvstore.objects.window import Window
from kvstore.repo.choice import CodecChoice

SKEW_S: Final = 300.0
"""Clocks further apart than this are a fault: destructive work refuses, and from 900 s on stores refuse every request."""
_LATELY_S: Final = 60.0
_REMEMBERED_S: Final = 300.0
_SAMPLED_S: Final = 10.0
_UNMENDED: Final = frozenset({"clock_skew", "no_bucket", "untrusted_certificate", "wrong_region", "unsupported"})


class Health:
    """Everything that is degraded, by part. It only knows what it is told: asking it never does I/O.

    Args:
        parts: Reasons that somebody sets and clears.
    """

    def __init__(self, parts: dict[str, str]) -> None:
        self.parts = parts
        self._asked: list[tuple[str, Callable[[], str]]] = []

    def ask(self, part: str, reason: Callable[[], str]) -> None:
        """Have `reason` say why a part is degraded, whenever somebody wants to know; "" while it is not."""
        self._asked.append((part, reason))

    def degraded(self) -> dict[str, str]:
        """Reasons by part; several of one part in one sentence."""
        found = dict(self.parts)
        for part, reason in self._asked:
            why = reason()
            if why and why not in found.get(part, ""):
                found[part] = f"{found[part]}; {why}" if part in found else why
        return found

    async def watch(self, clock: Clock) -> None:
        """Look now and then, so that trouble is dated also while nobody asks. Runs until cancelled."""
        while True:
            self.degraded()
            await clock.sleep(_SAMPLED_S)


class Lately:
    """A count of trouble that is news while it grows, and for a minute after.

    Args:
        count: Trouble so far.
        clock: Dates it.
        say: What to tell people, given how much came in that time.
    """

    def __init__(self, count: Callable[[], int], clock: Clock, say: Callable[[int], str]) -> None:
        self._count, self._clock, self._say = count, clock, say
        self._seen = self._before = 0
        self._grew: float | None = None

    def __call__(self) -> str:
        """The news, or ""."""
        now, count = self._clock.monotonic(), self._count()
        if self._grew is not None and now - self._grew > _LATELY_S:
            self._grew, self._before = None, self._seen
        if count > self._seen:
            self._seen, self._grew = count, now
        return "" if self._grew is None else self._say(count - self._before)


class StoreFaults:
    """Answers of the store that waiting does not mend: credentials, rights, a clock, a bucket that is not there.

    To a reader each is a miss. A node whose every read is one must say so instead of looking like an empty cache.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[str, float]] = {}

    def saw(self, error: KVTierError | None) -> None:
        """How a request ended."""
        if error is None:
            # It proves credentials, clock and bucket; a right it may lack for other keys and verbs all the same.
            for kind in [kind for kind in self._seen if kind != "access_denied"]:
                del self._seen[kind]
        elif isinstance(error, Denied) or error.kind in _UNMENDED:
            self._seen[error.kind] = error.message, self._clock.monotonic()

    def __call__(self) -> str:
        """What is wrong, by kind; ""."""
        now = self._clock.monotonic()
        self._seen = {kind: seen for kind, seen in self._seen.items() if now - seen[1] <= _REMEMBERED_S}
        return "; ".join(f"{kind}: {message}" for kind, (message, _) in self._seen.items())


class StoreSigns:
    """What is known about the bucket's store from this node's requests to it, over all its connections.

    Attributes:
        counters: Requests by verb and outcome, one for each connection.
        breaker: Whether requests are sent at all.
        hedges: Second GETs: `sent`, and those that `won`.
        faults: What waiting does not mend.
        corrupt_reads: Registers and manifests that were not what they claim to be, by folder.
        window: How much may be under way; None where there is no network between.
        choice: Which codec new blocks get; None until the repository is open.
    """

    def __init__(self, clock: Clock, ids: Ids) -> None:
        self.counters: list[CountingStore] = []
        self.breaker = Breaker(clock, ids)
        self.hedges: Counter[str] = Counter()
        self.corrupt_reads: Counter[str] = Counter()
        self.faults = StoreFaults(clock)
        self.window: Window | None = None
        self.choice: CodecChoice | None = None


def collector_reason(stats: CollectorStats, interval: int) -> str:
    """What to say of collections by this node, one every `interval` seconds; "" where they succeed, and none was left out."""
    if stats.error:
        return f"the last collection failed: {stats.error}"
    return f"a collection is {stats.late_s:.0f} s overdue" if interval and stats.late_s > interval else ""


def skew_reason(seconds: float) -> str:
    """What to say of the store's clock minus this host's; "" where they agree well enough."""
    if abs(seconds) <= SKEW_S:
        return ""
    word = "behind" if seconds > 0 else "ahead of"
    return f"clock_skew: this host's clock is {abs(seconds):.0f} s {word} the store's; nothing is collected until it is set right"
