"""What a node has promised to take of this client's blocks before it hears of them."""

from __future__ import annotations

import threading
from typing import Final

import msgspec

from kvstore import wire

Kind = tuple[str, str, int]
"""Namespace, shard and tokens of blocks that are alike."""
_BURST_S: Final = 0.1  # puts that are closer than that are one burst
_BYTES: Final = 16 << 20  # to have ready: what a node that is busy copying is late by


class Sent(msgspec.Struct, frozen=True):
    """A publication that the node has not answered."""

    kind: Kind | None
    blocks: int
    at: float


class Ahead:
    """Only a burst has room made ahead: whoever writes a block now and then gets none, and nothing is evicted for it.

    Thread-safe. Times are this process's monotonic clock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[int, Sent] = {}
        self._kind: Kind | None = None
        self._left = 0  # blocks promised, less those that were sent or claimed since
        self._since = 0.0  # when that was asked
        self._claimed = 0
        self._burst, self._last = 0, 0.0

    def wanted(self, blocks: int, nbytes: int, now: float) -> int:
        """How many more to ask for with a publication of these, of so many bytes each."""
        with self._lock:
            self._burst, self._last = (0 if now - self._last > _BURST_S else self._burst + blocks), now
            return min(self._burst, max(1, _BYTES // nbytes), wire.MAX_AHEAD)

    def claim(self, kind: Kind | None, blocks: int, now: float) -> bool:
        """Count on room for these; `sent` or `waive` follows."""
        with self._lock:
            if kind is None or kind != self._kind or self._left < blocks or now - self._since > wire.AHEAD_S:
                return False
            self._left -= blocks
            self._claimed += blocks
            return True

    def waive(self, blocks: int) -> None:
        """What was claimed is not sent."""
        with self._lock:
            self._claimed -= blocks
            self._left += blocks

    def sent(self, number: int, kind: Kind | None, blocks: int, now: float, *, claimed: bool) -> bool:
        """A publication goes out; whether it was claimed and that still holds."""
        with self._lock:
            self._sent[number] = Sent(kind, blocks, now)
            if not claimed:
                if kind == self._kind:
                    self._left -= blocks  # the node uses up what is ready first
                return False
            self._claimed -= blocks
            return kind == self._kind and self._left >= 0 and now - self._since < wire.AHEAD_S

    def answered(self, number: int, ready: int) -> None:
        """The node said how many more it will take behind this publication."""
        with self._lock:
            sent = self._sent.pop(number, None)
            if sent is None:
                return
            later = [each for at, each in self._sent.items() if at > number]
            alike = all(each.kind == sent.kind for each in later)
            self._kind, self._since = sent.kind if alike else None, sent.at
            self._left = ready - sum(each.blocks for each in later) - self._claimed
