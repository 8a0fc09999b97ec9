"""Do the same thing for many items, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

X = TypeVar("X")
Y = TypeVar("Y")


async def together(work: Callable[[X], Awaitable[Y]], items: Sequence[X], *, limit: int = 16) -> list[Y]:
    """`work` of each item, in the items' order; at most `limit` at once, begun in order.

    Raises:
        Exception: The first that `work` raised; the others are cancelled and awaited.
    """
    results: dict[int, Y] = {}
    queue = iter(enumerate(items))

    async def worker() -> None:
        for index, item in queue:
            results[index] = await work(item)

    if len(items) <= 1:
        return [await work(item) for item in items]
    workers = [asyncio.create_task(worker()) for _ in range(min(limit, len(items)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[index] for index in range(len(items))]


class Finishing:
    """Work that goes on to its real end when whoever asked for it leaves: half a create is worth less than a whole one.

    To a caller who was cancelled it is a lost answer.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, Y]) -> Y:
        """The work's result."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    async def aclose(self) -> None:
        """Wait for what is under way; it ends by its own bounds."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: whoever asked may have left
