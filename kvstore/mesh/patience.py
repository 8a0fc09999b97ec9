"""How long to wait for somebody who does not answer, and when to ask again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvstore.clock import Clock

_T = TypeVar("_T")
_FIRST_S, _LONGEST_S = 1.0, 15.0


async def within(seconds: float, work: Coroutine[Any, Any, _T]) -> _T:
    """The outcome of `work`, if it comes in time. Otherwise it is cancelled, and nobody waits until it has noticed.

    Raises:
        TimeoutError: It did not.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=seconds)
        if task.done() and not task.cancelled():
            return task.result()
        raise TimeoutError(f"no answer within {1000 * seconds:.0f} ms")
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # seen: nobody is interested any more


class Patience:
    """Whether somebody is worth asking. Who did not answer is left alone for a while, longer each time; then one asks for all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until = 0.0
        self._pause = 0.0
        self._trying = False

    @property
    def silent_lately(self) -> bool:
        """Whether it did not answer when it was last asked."""
        return bool(self._pause)

    @property
    def resting(self) -> bool:
        """Whether it is left alone now."""
        return bool(self._pause) and self._clock.monotonic() < self._until

    def ask(self) -> bool:
        """Whether to ask now. True obliges to say how it ended, unless one was cancelled."""
        if not self._pause:
            return True
        now = self._clock.monotonic()
        if now < self._until:
            return False
        self._until, self._trying = now + self._pause, True
        return True

    def answered(self) -> None:
        """It answers."""
        self._pause, self._trying = 0.0, False

    def silent(self) -> None:
        """It did not answer. Several who had asked at the same time count as one."""
        if self._trying or not self._pause:
            self._pause = min(_LONGEST_S, 2 * self._pause or _FIRST_S)
        self._until, self._trying = self._clock.monotonic() + self._pause, False
