"""Whose requests these are, and how a rotated key is noticed without a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from kvstore.clock import Clock
from kvstore.errors import KVTierError

RECHECK_S: Final = 300.0
"""Credentials are looked up again this often, and this long before they expire."""
_HASTE_S: Final = 10.0  # between look-ups when that time has come and nothing newer was there
_FORCED_S: Final = 2.0  # between look-ups that rejected requests ask for: many requests are rejected at once


class Credentials(msgspec.Struct, frozen=True):
    """An access key. Never shown: its repr names the key id only.

    Attributes:
        access_key: Public part.
        secret_key: What signs.
        token: Of a temporary session; empty for a permanent key.
        expires: Seconds since the epoch, or None.
    """

    access_key: str
    secret_key: str
    token: str = ""
    expires: float | None = None

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r}, ***)"


class Rotation:
    """The credentials of the moment.

    Args:
        fetch: Looks them up, blocking; raises `Denied` where there are none. Called in a thread, one call at a time.
        clock: Host's clock.
    """

    def __init__(self, fetch: Callable[[], Credentials], clock: Clock) -> None:
        self._fetch, self._clock = fetch, clock
        self._current: Credentials | None = None
        self._recheck_at = self._forced_at = float("-inf")
        self._lock = asyncio.Lock()

    async def get(self, *, rejected: Credentials | None = None) -> Credentials:
        """What to sign with; looked up again if the store just rejected these (the same come back if there are no newer ones).

        Raises:
            Denied: kind `no_credentials`.
        """
        if (usable := self._usable(rejected)) is not None:
            return usable
        async with self._lock:
            if (usable := self._usable(rejected)) is not None:  # somebody else looked while this call waited
                return usable
            try:
                self._current = await asyncio.to_thread(self._fetch)
            except KVTierError:
                if self._current is None or self._expired(self._current):
                    raise
                # The old ones still work: a source that is away for a moment must not take the store with it.
            finally:
                if rejected is not None:
                    self._forced_at = self._clock.monotonic()
            self._recheck_at = self._clock.monotonic() + self._rest(self._current)
            return self._current

    def _usable(self, rejected: Credentials | None) -> Credentials | None:
        now = self._clock.monotonic()
        if self._current is None:
            return None
        if rejected is not None and rejected == self._current:
            return self._current if now - self._forced_at < _FORCED_S else None
        return self._current if now < self._recheck_at else None

    def _rest(self, credentials: Credentials) -> float:
        if credentials.expires is None:
            return RECHECK_S
        return min(RECHECK_S, max(_HASTE_S, credentials.expires - self._clock.now() - RECHECK_S))

    def _expired(self, credentials: Credentials) -> bool:
        return credentials.expires is not None and credentials.expires <= self._clock.now()
