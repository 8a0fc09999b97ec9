"""Who is told of every request, for the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvstore.errors import KVTierError


class Observe(Protocol):
    """Told of every request that ended. Its arguments become labels: they never name a session."""

    def __call__(self, op: str, outcome: str, seconds: float) -> None:
        """`op` is a call, `get`, `publish` or `put`; `outcome` is `ok`, `cancelled` or the kind of an error."""
        ...


def unobserved(op: str, outcome: str, seconds: float) -> None:
    """For a face that nobody measures."""


@contextmanager
def observed(observe: Observe, op: str, end: asyncio.Timeout | None = None) -> Iterator[None]:
    """Times what happens inside, and tells how it ended. `end` comes when the caller's token is valid no more."""
    clock = asyncio.get_running_loop().time
    begun, outcome = clock(), "internal"
    try:
        yield
        outcome = "ok"
    except KVTierError as error:
        outcome = error.kind
        raise
    except asyncio.CancelledError:
        outcome = "unauthenticated" if end is not None and end.expired() else "cancelled"
        raise
    finally:
        observe(op, outcome, clock() - begun)
