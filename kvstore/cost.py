"""What computing KV costs, and what loading it costs: learned from what either took.

Both are lines with two coefficients. Computing the KV of token p takes `a + b * p` seconds, because attention looks at everything
before it; loading takes a latency for each request, and seconds for each byte. Pure: no I/O, and the clock is handed in.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

REMEMBERED: Final = 16  # observations of each line
_FADE: Final = 0.8  # what an observation weighs beside the next one
_SPREAD: Final = 0.02  # with less variety among the observations the second coefficient would be noise
_ROUNDS: Final = 2
LEAST_TOKENS: Final = 16  # a pass over fewer, such as a step of decoding, says nothing about reading a prompt
_ENOUGH: Final = 2  # the first pass of a model also chooses kernels, and takes several times as long


class Seen(NamedTuple):
    """`seconds` went by for `much` of the one thing and `more` of the other, at the time `at`."""

    much: float
    more: float
    seconds: float
    at: float


class Line:
    """seconds = first * much + second * more, neither coefficient negative, from the last few observations.

    An observation counts by its relative error, and never for more than that of a total miss: one that has nothing to do with the
    others, such as a warm-up or a value that was nearer than thought, moves the line little. Newer ones count more.

    Args:
        lifetime: Seconds until an observation is forgotten.
    """

    def __init__(self, lifetime: float) -> None:
        self._lifetime = lifetime
        self._seen: deque[Seen] = deque(maxlen=REMEMBERED)
        self._line: tuple[float, float] | None = None

    def add(self, seen: Seen) -> None:
        """One more observation."""
        self._seen.append(seen)
        self._line = None

    def known(self, now: float) -> int:
        """How many observations are not forgotten."""
        while self._seen and self._seen[0].at < now - self._lifetime:
            self._seen.popleft()
            self._line = None
        return len(self._seen)

    def seconds(self, much: float, more: float) -> float:
        """What that would take. There must be an observation."""
        if self._line is None:
            self._line = _fitted(self._seen)
        first, second = self._line
        return first * much + second * more


def _fitted(seen: deque[Seen]) -> tuple[float, float]:
    usual = statistics.median(one.seconds / one.much for one in seen)
    line, expected = (usual, 0.0), [usual * one.much for one in seen]
    for _ in range(_ROUNDS):
        weights = [
            _FADE ** (len(seen) - 1 - index) / max(one.seconds, guess) ** 2
            for index, (one, guess) in enumerate(zip(seen, expected, strict=True))
        ]
        line = _least_squares(seen, weights)
        expected = [line[0] * one.much + line[1] * one.more for one in seen]
    return line


def _least_squares(seen: deque[Seen], weights: list[float]) -> tuple[float, float]:
    pairs = list(zip(seen, weights, strict=True))
    uu = sum(w * one.much * one.much for one, w in pairs)
    uv = sum(w * one.much * one.more for one, w in pairs)
    vv = sum(w * one.more * one.more for one, w in pairs)
    uy = sum(w * one.much * one.seconds for one, w in pairs)
    vy = sum(w * one.more * one.seconds for one, w in pairs)
    apart = uu * vv - uv * uv
    if apart <= _SPREAD * uu * vv:
        return uy / uu, 0.0
    first, second = (uy * vv - vy * uv) / apart, (vy * uu - uy * uv) / apart
    if first < 0:
        return 0.0, vy / vv
    return (uy / uu, 0.0) if second < 0 else (first, second)


class Costs:
    """What was learned of one model on one machine, and of the tiers it loads from.

    Args:
        monotonic: The clock that says how old an observation is.
        lifetime: Seconds until what was seen of a tier is forgotten, so that it is tried again. What was seen of the model lasts
            eight times as long: only its own load changes it.
    """

    def __init__(self, monotonic: Callable[[], float], lifetime: float = 900.0) -> None:
        self._monotonic, self._lifetime = monotonic, lifetime
        self._model = Line(8 * lifetime)
        self._tiers: dict[str, Line] = {}
        self._floors: dict[str, Seen] = {}  # the last request to it that was given up: one as large takes at least as long
        self._answered: dict[str, float] = {}  # when one that was answered in full was last seen, and none was given up since

    def observe_compute(self, start: int, tokens: int, seconds: float) -> None:
        """A pass over `tokens` tokens behind `start` others took so long. Passes over fewer than 16 are not counted."""
        if tokens >= LEAST_TOKENS and seconds > 0:
            self._model.add(Seen(tokens, _positions(start, start + tokens), seconds, self._monotonic()))

    def observe_load(self, tier: str, nbytes: int, seconds: float, *, whole: bool = True) -> None:
        """One request for so many bytes of one tier took so long, or was given up after so long where it is not `whole`."""
        if nbytes <= 0 or seconds <= 0:
            return
        now, known, floor = self._monotonic(), self.load(tier, nbytes), self._floors.get(tier)
        seen = Seen(nbytes, 1.0, seconds, now)
        if whole and floor is not None and nbytes >= floor.much and seconds < floor.seconds:
            del self._floors[tier]
        if not whole:
            if known is not None and known > seconds:
                return  # nothing new
            self._floors[tier] = seen
        if not whole or tier not in self._answered:
            self._tiers[tier] = Line(self._lifetime)  # what was thought of it was wrong, or only that it takes longer than this
        self._tiers[tier].add(seen)
        if whole:
            self._answered[tier] = now
        else:
            self._answered.pop(tier, None)

    def compute(self, start: int, stop: int) -> float | None:
        """Seconds to compute tokens [start, stop); None before two passes were seen."""
        if self._model.known(self._monotonic()) < _ENOUGH:
            return None
        return self._model.seconds(stop - start, _positions(start, stop))

    def load(self, tier: str, nbytes: int, requests: int = 1) -> float | None:
        """Seconds to load so many bytes of a tier; None where nothing was seen of it lately."""
        line = self._tiers.get(tier)
        if line is None or not line.known(self._monotonic()):
            return None
        seconds, floor = line.seconds(nbytes, requests), self._floors.get(tier)
        if floor is not None and nbytes >= floor.much and self._monotonic() - floor.at <= self._lifetime:
            return max(seconds, floor.seconds)
        return seconds

    def trusts(self, tier: str) -> bool:
        """Whether it answers, as far as was seen lately, and in the time that it used to take: `load` is more than a guess."""
        at = self._answered.get(tier)
        return at is not None and self._monotonic() - at < self._lifetime


def _positions(start: int, stop: int) -> float:
    """The sum of the positions [start, stop)."""
    return (stop - start) * (start + stop - 1) / 2
