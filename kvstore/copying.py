"""Copies between buffers at the speed of memory: without the GIL, and from 1 MiB on by two threads."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from functools import lru_cache
from typing import Final

import numpy as np

_SHARED: Final = 1 << 20  # from here on a second thread is worth waking
_PARTS: Final = 8  # of a copy: what one thread does not come to, the other does
_PAGE: Final = 4096


def copy(target: memoryview | np.ndarray, source: memoryview | np.ndarray) -> None:
    """Copy bytes between contiguous buffers that do not overlap; a write's `fill` may use it, too.

    Args:
        target: Writable.
        source: As long.

    Raises:
        ValueError: The lengths differ, or the target cannot be written.
    """
    into, out_of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if into.nbytes != out_of.nbytes:
        raise ValueError(f"a buffer of {into.nbytes} bytes for {out_of.nbytes}")
    second = _second(os.getpid()) if into.nbytes >= _SHARED else None
    if second is None or not into.flags.writeable or not second.copy(into, out_of):
        np.copyto(into, out_of)


class _Job:
    """One copy, in parts that two threads take from either end."""

    __slots__ = ("_into", "_left", "_nbytes", "_out_of", "_part", "working")

    def __init__(self, into: np.ndarray, out_of: np.ndarray) -> None:
        self._into, self._out_of = into.ctypes.data, out_of.ctypes.data
        self._nbytes = into.nbytes
        self._part = -(-self._nbytes // _PARTS // _PAGE) * _PAGE
        self._left = deque(range(0, self._nbytes, self._part))
        self.working = threading.Lock()  # the helper's, as long as it looks at the buffers

    def run(self, *, first: bool) -> None:
        """Copy the parts that are left, from the beginning or from the end."""
        take = self._left.popleft if first else self._left.pop
        while self._left:
            try:
                at = take()
            except IndexError:  # the other was faster
                return
            ctypes.memmove(self._into + at, self._out_of + at, min(self._part, self._nbytes - at))

    def leave(self) -> None:
        """Nobody takes another part; wait for the one that the helper is at."""
        self._left.clear()
        with self.working:
            pass


class _Second:
    """A thread that helps with one copy at a time. Where it comes late, there is less left to do for it, and nobody waits."""

    def __init__(self) -> None:
        self._turn, self._asleep = threading.Lock(), threading.Lock()
        self._asleep.acquire()
        self._job: _Job | None = None
        threading.Thread(target=self._help, name="kvtier-copy", daemon=True).start()

    def copy(self, into: np.ndarray, out_of: np.ndarray) -> bool:
        """Copy; False, and nothing done, where another copy has the helper."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            job = self._job = _Job(into, out_of)
            if self._asleep.locked():
                self._asleep.release()
            try:
                job.run(first=True)
            finally:
                job.leave()
                self._job = None
        finally:
            self._turn.release()
        return True

    def _help(self) -> None:
        while True:
            self._asleep.acquire()
            job = self._job
            if job is not None:
                with job.working:
                    job.run(first=False)


@lru_cache(maxsize=1)
def _second(pid: int) -> _Second | None:  # noqa: ARG001  a forked child has none of its parent's threads
    """The other thread, where there is a core for it."""
    return _Second() if len(os.sched_getaffinity(0)) > 1 else None
