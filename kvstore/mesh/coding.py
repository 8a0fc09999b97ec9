"""Whether coding a block for a peer pays: only on a link that is slower than the codec is here."""

from __future__ import annotations

from typing import Final

from kvstore.clock import Clock
from kvstore.codec import Codec
from kvstore.repo.choice import FIRST_RATIO, MARGIN, WEIGHT, Rate

CODED: Final[Codec] = "bp-zstd"
_HOPED: Final = 400e6  # raw bytes a second that the codec takes in, until measured


class Worth:
    """As `kvstore.repo.choice` decides for uploads: coding and sending overlap.

    Attributes:
        coding: Raw bytes a second that the codec takes in.
        ratio: Stored by raw bytes of what was coded.
    """

    def __init__(self, clock: Clock) -> None:
        self.coding = Rate(clock)
        self.ratio = FIRST_RATIO

    def pays(self, link: float) -> bool:
        """For a link that carries so many bytes a second; 0: unknown, and never."""
        return bool(link) and min(self.coding.value or _HOPED, link / self.ratio) >= MARGIN * link

    @property
    def measured(self) -> bool:
        """Whether it is known how fast the codec is here; until then one block is coded to see, and not a whole answer."""
        return bool(self.coding.value)

    def coded(self, raw: int, stored: int) -> None:
        """What became of a block's bytes."""
        self.ratio += WEIGHT * (stored / raw - self.ratio)
