"""A stored object on its way: each tensor is checked, and decoded to its place, while the bytes behind it are still coming."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise
from queue import SimpleQueue
from typing import Final

from kvstore.codec.block import check_tensor, decode, place_tensor, verify
from kvstore.codec.header import Header, header_length, header_of, stored_header
from kvstore.codec.layout import layout_of
from kvstore.codec.sharing import Share
from kvstore.errors import Corrupt, Invalid
from kvstore.ids import BlockName, Namespace

_TURNS: Final[SimpleQueue[None]] = SimpleQueue()
"""One for each thread that may digest and decode: more than there are cores would only keep the event loop waiting. `threading`'s
semaphores are written in Python, and held the interpreter for a fifth of what was to be done in a turn."""
for _ in range(max(1, len(os.sched_getaffinity(0)))):
    _TURNS.put(None)


class Arriving:
    """Turns a stored object into the raw one as it comes.

    The work is done by the threads that bring the bytes, which have them in their caches; there is no hand-over.

    Args:
        stored: Where the object's bytes arrive; at least as long as it is.
        name: What was asked for.
        ns: Its namespace.
        into: Where the raw object is to be: `stored` itself where the object is expected to be raw, or memory that does not overlap
            it; exactly `layout(...).raw_bytes` long.
        tell: Told how many leading bytes of `into` are the raw object's, verified, header included, as it grows; 0 before they are
            overwritten. From any thread, one at a time; it raises nothing.

    Raises:
        Invalid: `into` has another length or is read-only, or as `layout`.
    """

    def __init__(
        self, stored: memoryview, name: BlockName, ns: Namespace, into: memoryview, tell: Callable[[int], None] | None = None
    ) -> None:
        self._layout = layout_of(name, ns)
        if into.nbytes != self._layout.raw_bytes or into.readonly:
            raise Invalid(f"the raw object has {self._layout.raw_bytes} bytes, and the buffer {into.nbytes}, or it is read-only")
        self._stored, self._name, self._ns, self._into = stored, name, ns, into
        self._in_place, self._tell = stored is into, tell
        self._told = False
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._spans: list[tuple[int, int]] = []  # of what came before the header was complete
        self._header: Header | None = None
        self._missing: list[int] = []  # bytes of each tensor still to come
        self._left = -1  # tensors still to be checked; -1: not even the header
        self._checked: list[bool] = []  # of each
        self._leading = 0  # of them
        self._attempt = object()
        self._error: Corrupt | None = None

    @property
    def complete(self) -> bool:
        """Whether every tensor is checked and in place."""
        return self._left == 0 and self._error is None

    def arrived(self, start: int, end: int) -> None:
        """Bytes [start, end) are there; `arrived(0, 0)`: none is, whatever was said. From any thread; it raises nothing."""
        with self._lock:
            if start == end:
                self._begin()
                self._take_back()
                return
            attempt, ready = self._attempt, self._ready(start, end)
            header = self._header
        if not ready or header is None:
            return
        error = None
        _TURNS.get()
        try:
            payload = self._stored[header.header_bytes :]
            for index in ready:
                if self._in_place:
                    check_tensor(header, index, payload)
                else:
                    place_tensor(header, index, payload, self._into)
        except Corrupt as found:
            error = found
        finally:
            _TURNS.put(None)
        with self._lock:
            if attempt is self._attempt:
                self._error = self._error or error
                self._left -= len(ready)
                if self._tell is not None and self._error is None:
                    self._tell_of(header, ready)

    def finish(self, nbytes: int, share: Share | None = None) -> None:
        """The object is all there, and so long; do what is still to be done. `share` finds threads that help.

        Raises:
            Corrupt: It is not this block, or not intact. `into` holds garbage.
            Unsupported: The codec needs zstandard, which is not installed.
        """
        header = self._header
        if self._error is not None:
            raise self._error
        if header is not None and nbytes != header.stored_bytes:
            raise Corrupt(f"block: {nbytes} bytes where its header says {header.stored_bytes}")
        if header is None or self._left:
            whole = self._stored[:nbytes]
            if self._in_place:
                verify(whole, self._name, self._ns, share)
            else:
                self._take_back()
                decode(whole, self._name, self._ns, self._into, share)

    def _tell_of(self, header: Header, ready: list[int]) -> None:
        for index in ready:
            self._checked[index] = True
        first = self._leading
        while self._leading < len(self._checked) and self._checked[self._leading]:
            self._leading += 1
        if self._leading > first and self._tell is not None:
            plan, self._told = header.layout, True
            self._tell(plan.header_bytes + (*plan.offsets, plan.payload_bytes)[self._leading])

    def _take_back(self) -> None:
        if self._told and self._tell is not None:
            self._told = False
            self._tell(0)

    def _ready(self, start: int, end: int) -> list[int]:
        """Tensors that these bytes complete."""
        if self._error is not None:
            return []
        if self._header is not None:
            return self._completed(self._header, start, end)
        self._spans.append((start, end))
        try:
            header = self._read_header()
        except Corrupt as error:
            self._error = error
            return []
        if header is None:
            return []
        if not self._in_place:
            plan = header.layout
            self._into[: plan.header_bytes] = header_of(plan, self._name.prefix_id, "raw", plan.sizes, header.raw_digests)
        self._header, self._left, self._checked = header, len(header.digests), [False] * len(header.digests)
        self._missing = [behind - at for at, behind in pairwise(header.starts)]
        return [index for span in self._spans for index in self._completed(header, *span)]

    def _read_header(self) -> Header | None:
        """Once it is there."""
        there = 0
        for start, end in sorted(self._spans):
            if start > there:
                break
            there = max(there, end)
        head = self._stored[:there]
        if there < 8 or there < header_length(head, self._name, self._ns):
            return None
        header = stored_header(head, self._name, self._ns)
        if self._in_place and header.codec != "raw":
            raise Corrupt(f"block: codec {header.codec} where a raw object was expected")
        if header.stored_bytes > len(self._stored):
            raise Corrupt(f"block: its header says {header.stored_bytes} bytes, more than there can be")
        return header

    def _completed(self, header: Header, start: int, end: int) -> list[int]:
        start, end = max(0, start - header.header_bytes), min(end - header.header_bytes, header.starts[-1])
        if start >= end:
            return []
        first, last = bisect_right(header.starts, start) - 1, bisect_left(header.starts, end) - 1
        missing, starts = self._missing, header.starts
        missing[first] -= min(end, starts[first + 1]) - start
        if last > first:
            missing[last] -= end - starts[last]
            missing[first + 1 : last] = [0] * (last - first - 1)  # whole
        return [index for index in range(first, last + 1) if not missing[index]]
