"""Keeps the event loop awake between requests that come close together."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Final

_CLOSE_S: Final = 0.0001  # who copies what it got, or fills what it puts, needs the core for that


class Awake:
    """Turns the loop without letting it sleep, while requests are less than 0.1 ms apart, and as long after the last.

    Being woken costs more than a lease does, and draws both sides to one core. A node that is asked less often pays nothing.

    Args:
        busy: Whether threads have work that somebody waits for: the core is theirs then.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._loop = asyncio.get_running_loop()
        self._asked = 0.0
        self._turning = False

    def asked(self) -> None:
        """A request was answered."""
        before, self._asked = self._asked, time.perf_counter()
        if not self._turning and self._asked - before < _CLOSE_S and not self._busy():
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if time.perf_counter() - self._asked > _CLOSE_S or self._busy():
            self._turning = False
            return
        os.sched_yield()  # should the client share this core
        self._loop.call_soon(self._turn)
