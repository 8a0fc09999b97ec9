"""The event loop of a node's process."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

R = TypeVar("R")
_SWITCH_S: Final = 0.0005  # a thread that computes keeps the interpreter from the loop for that long, not for 5 ms
# Python looks for cycles while nothing else runs: 0.5 ms for the youngest 2,000 objects, some ms for those that outlived ten such
# looks, most of 0.1 s for all that caches hold. By its own thresholds it does the last whenever those have grown by a quarter.
_CYCLES: Final = (2_000, 10, 100)


def run(main: Coroutine[Any, Any, R]) -> R:
    """As `asyncio.run`, on uvloop where it is installed (extra `node`). For a process that is a node and nothing else."""
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(*_CYCLES)
    try:
        import uvloop  # noqa: PLC0415  the faces work without it, slower
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
