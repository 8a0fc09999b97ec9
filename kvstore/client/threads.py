"""Work on a thread that uses the caller's buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def on_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `fn` on a worker thread. A cancellation is passed on when `fn` has ended: then the caller's buffers are free again."""
    future = asyncio.get_running_loop().run_in_executor(None, lambda: fn(*args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # looked at: asyncio need not report it as lost
        raise cancelled
    return future.result()
