"""The write window of a connection: shared memory whose space the client manages."""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from typing import Final

PAGE: Final = 4096
MAX_WAITING: Final = 256


class Extents:
    """First fit over a range of bytes. Low addresses are used again first: their pages are already real."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]  # (offset, length), ascending, never adjacent

    def take(self, nbytes: int) -> int | None:
        """Offset of a page-aligned extent, or None."""
        length = _pages(nbytes)
        for index, (offset, free) in enumerate(self._free):
            if free >= length:
                if free == length:
                    del self._free[index]
                else:
                    self._free[index] = (offset + length, free - length)
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Return what `take` gave."""
        end = offset + _pages(nbytes)
        index = bisect.bisect(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            offset = self._free.pop(index)[0]
        self._free.insert(index, (offset, end - offset))


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE


class Space:
    """Extents that can be waited for, first come first served, for a bounded time by a bounded number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._extents = Extents(size)
        self._waiting: deque[tuple[int, asyncio.Future[int | None]]] = deque()

    def take_now(self, nbytes: int) -> int | None:
        """An extent if one is free and nobody waits."""
        return None if self._waiting else self._extents.take(nbytes)

    async def take(self, nbytes: int, timeout_s: float) -> int | None:
        """An extent, or None when there was none in time."""
        offset = self.take_now(nbytes)
        if offset is not None or len(self._waiting) >= MAX_WAITING:
            return offset
        turn: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                given = turn.result()
                if given is not None:
                    self._extents.give(given, nbytes)
            elif entry in self._waiting:
                self._waiting.remove(entry)
            self._serve()
            if isinstance(error, TimeoutError):
                return None
            raise

    def give(self, offset: int, nbytes: int) -> None:
        """Return an extent; whoever waits first and fits gets room."""
        self._extents.give(offset, nbytes)
        self._serve()

    def close(self) -> None:
        """Nobody gets an extent any more."""
        while self._waiting:
            turn = self._waiting.popleft()[1]
            if not turn.done():
                turn.set_result(None)

    def _serve(self) -> None:
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if not turn.done():
                offset = self._extents.take(nbytes)
                if offset is None:
                    return
                turn.set_result(offset)
            self._waiting.popleft()
