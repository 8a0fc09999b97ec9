"""Time and identity, injected everywhere, so that a node's whole behaviour can be replayed under a virtual clock and a seed.

This is the only module that may read the system's clock or its randomness.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """Where code learns the time and waits."""

    def now(self) -> float:
        """Seconds since the epoch, by this host. For retention and display, never for safety."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back; deadlines are points on this line."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let that much monotonic time pass."""
        ...


class Ids(Protocol):
    """Where code gets names that nobody used before."""

    def new(self) -> str:
        """128 random bits as 32 hex digits."""
        ...

    def jitter(self) -> float:
        """A number in [0, 1), for spreading retries."""
        ...


class SystemClock:
    """The host's clock."""

    def now(self) -> float:
        """Wall-clock seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait on the event loop."""
        await asyncio.sleep(seconds)


class RandomIds:
    """Ids from the operating system's randomness."""

    def new(self) -> str:
        """128 random bits as 32 hex digits."""
        return secrets.token_hex(16)

    def jitter(self) -> float:
        """A number in [0, 1)."""
        return random.random()  # noqa: S311  spreads retries; nothing is secret about it


class SeededIds:
    """Ids that repeat for a seed: simulations and tests replay the same history."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  replayable by intent

    def new(self) -> str:
        """The seed's next 128 bits as 32 hex digits."""
        return f"{self._random.getrandbits(128):032x}"

    def jitter(self) -> float:
        """The seed's next number in [0, 1)."""
        return self._random.random()


class VirtualClock:
    """A clock that moves only when told to, or when somebody sleeps on it."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._wall, self._monotonic = start, 0.0

    def now(self) -> float:
        """Virtual wall-clock seconds."""
        return self._wall

    def monotonic(self) -> float:
        """Virtual monotonic seconds."""
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        """Advance, and let other tasks run."""
        self.advance(seconds)
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        """Let time pass, on both lines."""
        self._wall += seconds
        self._monotonic += max(0.0, seconds)

    def set(self, wall: float) -> None:
        """Jump the wall clock, as an operator or NTP may; monotonic time does not notice."""
        self._wall = wall
