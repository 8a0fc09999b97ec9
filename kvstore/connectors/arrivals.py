"""Blocks of a chain as they arrive: while the first are copied, those behind them are under way."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore import codec
from kvstore.connectors.bounded import Bounded
from kvstore.errors import Unavailable
from kvstore.ids import Link, Namespace, Shard

if TYPE_CHECKING:
    from kvstore.blocks import Blocks
    from kvstore.client import SyncClient

NEAR: Final = 64 << 20  # bytes of blocks in memory that are leased at once: far below any arena
FAR: Final = 8 << 20  # of others, in one request: little is waited for before the first can be copied
REQUESTS: Final = 8  # of those under way: together enough to keep a bucket's link busy
_PAGE: Final = 4096
_POPULATE_WRITE: Final = 23  # MADV_*, Linux 5.14


def arrivals(
    kv: SyncClient, namespace: Namespace, shard: Shard, links: Sequence[Link], *, near: int, deadline_ms: int
) -> Generator[tuple[Sequence[Link], Blocks], None, None]:
    """Windows of a chain, leased until the next one is asked for; the last one says what is missing.

    While the caller copies one window, those behind it are under way. Close the generator where it is not used to its end.

    Args:
        kv: The client.
        namespace: Of the blocks.
        shard: Of the blocks.
        links: The blocks, in prefix order.
        near: How many leading ones are in the node's memory. A wrong number costs time, nothing else.
        deadline_ms: What has not arrived by then is a miss.

    Raises:
        KVTierError: As :meth:`kvstore.client.SyncClient.get`.
    """
    size = codec.layout(namespace, shard, namespace.block_tokens).raw_bytes
    ends = time.monotonic() + deadline_ms / 1000

    def get(window: Sequence[Link]) -> Blocks:
        return kv.get(namespace, shard, window, deadline_ms=max(1, int((ends - time.monotonic()) * 1000)))

    far = windows(links[near:], FAR // size)
    under_way: deque[tuple[Sequence[Link], Future[Blocks]]] = deque()
    readers = Bounded("kvtier-read", REQUESTS, 2 * REQUESTS)  # no thread is started before it is needed

    def ask() -> None:
        while len(under_way) < REQUESTS and (window := next(far, None)) is not None:
            future = readers.submit(partial(get, window))
            if future is None:
                raise Unavailable("this process ends, or has no thread left")
            under_way.append((window, future))

    try:
        ask()
        for window in windows(links[:near], NEAR // size):
            with get(window) as blocks:
                yield window, blocks
                if blocks.miss:
                    return
        while under_way:
            window, future = under_way.popleft()
            with future.result() as blocks:
                ask()
                yield window, blocks
                if blocks.miss:
                    return
    finally:
        for _, future in under_way:
            if not future.cancel():
                future.add_done_callback(_let_go)  # nobody waits for it; its leases go back when it has ended
        readers.close()


def windows(links: Sequence[Link], step: int) -> Iterator[Sequence[Link]]:
    """So many at a time, at least one."""
    step = max(1, step)
    return (links[first : first + step] for first in range(0, len(links), step))


def _let_go(future: Future[Blocks]) -> None:
    if future.exception() is None:
        future.result().release()


@contextmanager
def populating(buffer: np.ndarray) -> Iterator[None]:
    """Make a buffer's pages real while its first bytes are waited for, leaving them as they are: safe while others write there.

    For one thread, and only where there is something to wait for: two threads that meet page faults get in each other's way.
    """
    start = -(-buffer.ctypes.data // _PAGE) * _PAGE
    nbytes = (buffer.ctypes.data + buffer.nbytes) // _PAGE * _PAGE - start
    with ThreadPoolExecutor(1, "kvtier-pages") as pool:
        if nbytes > 0:  # a system that cannot do it loses only speed; a CDLL's calls hold no GIL
            pool.submit(_libc.madvise, ctypes.c_void_p(start), ctypes.c_size_t(nbytes), _POPULATE_WRITE)
        yield


_libc = ctypes.CDLL(None)
