"""Long work on the event loop, a slice at a time: whoever waits for the loop has a turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

X = TypeVar("X")
Y = TypeVar("Y")
SLICE: Final = 256  # blocks; the dearest work on one takes some tens of microseconds


async def sliced(work: Callable[[Sequence[X]], Iterable[Y]], items: Sequence[X]) -> list[Y]:
    """`work` of all items, in order. Few items are done at once, without a pause."""
    done: list[Y] = []
    for first in range(0, len(items), SLICE):
        if first:
            await asyncio.sleep(0)
        done.extend(work(items[first : first + SLICE]))
    return done
