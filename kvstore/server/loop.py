"""The event loop of a node's process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

R = TypeVar("R")
_SWITCH_S: Final = 0.0005  # a thread that computes keeps the interpreter from the loop for that long, not for 5 ms


def run(main: Coroutine[Any, Any, R]) -> R:
    """As `asyncio.run`, on uvloop where it is installed (extra `node`). For a process that is a node and nothing else."""
    sys.setswitchinterval(_SWITCH_S)
    try:
        import uvloop  # noqa: PLC0415  the faces work without it, slower
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
