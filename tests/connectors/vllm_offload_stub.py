"""The names of vLLM 0.32 that its secondary tiers use, so that ours can be tested where no engine is installed.

`scripts/test-engines` runs the same class under the real one.
"""

import enum
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


@dataclass
class OffloadingEvent:
    keys: list
    medium: Medium
    removed: bool
    locality: Locality | None = None


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self.block_size_bytes = primary_kv_view.strides[0]
        self.tier_type = tier_type


@contextmanager
def installed():
    """The modules, importable until the block ends."""
    base, tiering, platforms, vllm = (types.ModuleType(name) for name in ("base", "tiering", "platforms", "vllm"))
    for each in (Medium, Locality, LookupResult, OffloadingEvent, RequestOffloadingContext):
        setattr(base, each.__name__, each)
    base.get_offload_group_idx = lambda key: int.from_bytes(key[-4:], "big")
    tiering.JobResult, tiering.SecondaryTierManager = JobResult, SecondaryTierManager
    platforms.current_platform = types.SimpleNamespace(device_type="cpu")
    vllm.__version__ = "0.32.0"
    modules = {
        "vllm": vllm,
        "vllm.platforms": platforms,
        "vllm.v1.kv_offload.base": base,
        "vllm.v1.kv_offload.tiering.base": tiering,
        **{name: types.ModuleType(name) for name in ("vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.tiering")},
    }
    before = {name: sys.modules.get(name) for name in (*modules, "kvstore.connectors.vllm_tier")}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
