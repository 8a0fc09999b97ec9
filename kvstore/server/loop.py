"""The event loop of a node's process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


def run(main: Coroutine[Any, Any, R]) -> R:
    """As `asyncio.run`, on uvloop where it is installed (extra `node`)."""
    try:
        import uvloop  # noqa: PLC0415  the faces work without it, slower
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
