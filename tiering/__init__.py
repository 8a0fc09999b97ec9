"""A hierarchy of byte tiers under budgets: leases, single flight, read-through, write-behind.

It moves opaque, immutable byte strings under 32-byte keys between memory, disk and whatever origins are injected, and knows
nothing of what they mean. Names that need LMDB are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tiering.budget import Budget
from tiering.dram import DramSlot, DramTier
from tiering.fetching import Reach
from tiering.flight import Flights
from tiering.movers import Movers, settled
from tiering.policy import SECOND_SIGHT_KEYS, Lru, Policy, SecondSight
from tiering.policy_reuse import Reuse
from tiering.stack import Stack, StackSettings
from tiering.stats import LATENCY_BOUNDS, Histogram, TierStats
from tiering.tier import (
    JournalFull,
    Lease,
    Miss,
    Origin,
    PathInUse,
    SealedOtherwise,
    Slot,
    Tell,
    Tier,
    TierClosed,
    TierError,
    Want,
    Watch,
)

if TYPE_CHECKING:
    from tiering.device import DeviceTier
    from tiering.device_lease import DeviceLease
    from tiering.disk import DiskTier
    from tiering.journal import Journal

__all__ = [
    "LATENCY_BOUNDS",
    "SECOND_SIGHT_KEYS",
    "Budget",
    "DeviceLease",
    "DeviceTier",
    "DiskTier",
    "DramSlot",
    "DramTier",
    "Flights",
    "Histogram",
    "Journal",
    "JournalFull",
    "Lease",
    "Lru",
    "Miss",
    "Movers",
    "Origin",
    "PathInUse",
    "Policy",
    "Reach",
    "Reuse",
    "SealedOtherwise",
    "SecondSight",
    "Slot",
    "Stack",
    "StackSettings",
    "Tell",
    "Tier",
    "TierClosed",
    "TierError",
    "TierStats",
    "Want",
    "Watch",
    "settled",
]

_LAZY = {
    "DeviceLease": "tiering.device_lease",
    "DeviceTier": "tiering.device",
    "DiskTier": "tiering.disk",
    "Journal": "tiering.journal",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
