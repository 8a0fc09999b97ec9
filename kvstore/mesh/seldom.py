"""Whether a trouble is worth a line in the log: somebody who makes it again and again must not fill a disk with it."""

from __future__ import annotations

from typing import Final

from cachetools import TTLCache

from kvstore.clock import Clock

_AGAIN_S: Final = 60.0
_TROUBLES: Final = 256


class Seldom:
    """Says yes to the same trouble once a minute."""

    def __init__(self, clock: Clock) -> None:
        self._said: TTLCache[str, None] = TTLCache(_TROUBLES, _AGAIN_S, timer=clock.monotonic)

    def __call__(self, trouble: str) -> bool:
        """Whether to say it now."""
        if trouble in self._said:
            return False
        self._said[trouble] = None
        return True
