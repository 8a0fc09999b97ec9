"""How much may be under way at a store: what it bears, found out by asking for a little more, and for much less when it balks."""

from __future__ import annotations

from types import TracebackType
from typing import Final

import msgspec

from kvstore.clock import Clock
from kvstore.objects.gate import ByteGate

_TELLING: Final = 1 << 20  # smaller requests take as long as their round trip, and registers as long as their rivals
_WEIGHT: Final = 0.125  # of the newest answer in the usual time
_FORGET: Final = 1.01  # the fastest time is forgotten that slowly, so that a store that has become slower is not pressed for ever


class WindowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the window moves.

    Attributes:
        first: Bytes at the start.
        least: It never gets smaller: with fewer bytes under way even a willing store would be idle.
        step: Bytes it grows by, once all of it was carried and somebody had to wait.
        busy: What is left of it when the store says SlowDown.
        slow: What is left of it when answers have become slow.
        slower: Answers are slow when they usually take so many times as long as the fastest of their size lately, each by the
            number that shared the link with it: where a link is full, twice as many take twice as long, and nothing is wrong.
        pause_s: It shrinks no more often: what was under way before still gets the old answers.
    """

    first: int = 128 << 20
    least: int = 64 << 20
    step: int = 8 << 20
    busy: float = 0.5
    slow: float = 0.75
    slower: float = 4.0
    pause_s: float = 1.0


class Carried:
    """A request under way, for the length of a block."""

    __slots__ = ("_begun", "_nbytes", "_verb", "_window")

    def __init__(self, window: Window, nbytes: int, verb: str) -> None:
        self._window, self._nbytes, self._verb = window, nbytes, verb

    async def __aenter__(self) -> None:
        self._begun = await self._window.begin(self._nbytes)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._window.end(self._nbytes, self._verb, self._begun, well=kind is None)


class Window:
    """Bytes under way in both directions, bounded by additive increase and multiplicative decrease.

    Args:
        most: It never gets larger.
        patience_s: As :class:`kvstore.objects.gate.ByteGate`.
        clock: Measures answers.
        settings: How it moves.

    Attributes:
        shrunk: How often it did, by reason: `busy`, `slow`.
    """

    def __init__(self, most: int, patience_s: float, clock: Clock, settings: WindowSettings | None = None) -> None:
        self._settings = settings or WindowSettings()
        self._most, self._clock = most, clock
        self._least = min(self._settings.least, most)
        self._gate = ByteGate(max(self._least, min(self._settings.first, most)), patience_s)
        self._carried = self._together = 0
        self._waited = False
        self._shrunk_at = float("-inf")
        self._times: dict[tuple[str, int], _Times] = {}
        self.shrunk = {"busy": 0, "slow": 0}

    @property
    def limit(self) -> int:
        """Bytes that may be under way now."""
        return self._gate.limit

    @property
    def gate(self) -> ByteGate:
        """For small bodies, which count and of which nothing is learnt."""
        return self._gate

    def hold(self, nbytes: int, verb: str) -> Carried:
        """Wait for room, and keep it for the length of an `async with` block: a request that carries so many bytes.

        Raises:
            Overloaded: There was none for too long.
        """
        return Carried(self, nbytes, verb)

    async def begin(self, nbytes: int) -> tuple[int, float, int]:
        """Wait for room: how much was taken, when that was, and how many are under way now."""
        self._waited |= not self._gate.has_room(nbytes)
        room = min(nbytes, self.limit)
        await self._gate.take(room)
        self._together += 1
        return room, self._clock.monotonic(), self._together

    def end(self, nbytes: int, verb: str, begun: tuple[int, float, int], *, well: bool) -> None:
        """It is over."""
        room, since, together = begun
        together = max(together, self._together)
        self._together -= 1
        try:
            if well:
                self.answered(nbytes, verb, self._clock.monotonic() - since, together)
        finally:
            self._gate.give_back(room)

    def answered(self, nbytes: int, verb: str, seconds: float, together: int = 1) -> None:
        """A request went well; so many were under way with it, itself included."""
        self._carried += nbytes
        if self._carried >= self.limit:
            if self._waited:  # else the window is not what keeps the store from more
                self._gate.resize(min(self._most, self.limit + self._settings.step))
            self._carried, self._waited = 0, False
        if nbytes < _TELLING or 2 * together * nbytes < self.limit:
            return  # the window is not in use, so its size is not to blame
        seconds /= together
        times = self._times.setdefault((verb, nbytes.bit_length()), _Times(seconds))
        if times.usual(seconds) > self._settings.slower * times.fastest and self._shrink("slow", self._settings.slow):
            self._times.clear()  # measured with more under way

    def busy(self) -> None:
        """The store said that it is asked too much."""
        self._shrink("busy", self._settings.busy)

    def _shrink(self, why: str, left: float) -> bool:
        now = self._clock.monotonic()
        if self.limit <= self._least or now - self._shrunk_at < self._settings.pause_s:
            return False
        self._gate.resize(max(self._least, int(self.limit * left)))
        self._shrunk_at, self._carried, self._waited = now, 0, False
        self.shrunk[why] += 1
        return True


class _Times:
    """How long requests of one kind and size class take."""

    def __init__(self, seconds: float) -> None:
        self.fastest = self._usual = seconds

    def usual(self, seconds: float) -> float:
        """With one more taken in."""
        self.fastest = min(self.fastest * _FORGET, seconds)
        self._usual += _WEIGHT * (seconds - self._usual)
        return self._usual
