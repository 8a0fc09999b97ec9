"""Bytes in flight, bounded."""

from __future__ import annotations

import asyncio
from types import TracebackType

from kvstore.errors import Overloaded
from kvstore.fairness import Lines
from kvstore.payer import payer


class Held:
    """Room at a gate, for the length of a block. Every block read passes here: a generator would cost it more."""

    __slots__ = ("_gate", "_size")

    def __init__(self, gate: ByteGate, size: int) -> None:
        self._gate, self._size = gate, size

    async def __aenter__(self) -> None:
        await self._gate.take(self._size)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._gate.give_back(self._size)


class _Turn:
    """One that waits, and for how much."""

    __slots__ = ("come", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.come: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class ByteGate:
    """Lets requests through while their bytes fit under a limit: of one tenant in the order they came, tenants in fair turns.

    A request larger than the whole limit passes alone, so that nothing waits for ever.

    Args:
        limit: Bytes.
        patience_s: A request that waited so long raises `Overloaded` instead of piling up; None: it waits.
    """

    def __init__(self, limit: int, patience_s: float | None) -> None:
        self._limit, self._patience = limit, patience_s
        self._held = 0
        self._waiting: Lines[_Turn] = Lines()

    @property
    def held(self) -> int:
        """Bytes let through and not yet given back."""
        return self._held

    @property
    def limit(self) -> int:
        """Bytes that may be let through at one time."""
        return self._limit

    def resize(self, limit: int) -> None:
        """From now on; what was let through stays so."""
        self._limit = limit
        self._let_through()

    def has_room(self, nbytes: int) -> bool:
        """Whether a request of so many bytes would pass at once."""
        return not self._waiting and self._held + min(nbytes, self._limit) <= self._limit

    def hold(self, nbytes: int) -> Held:
        """Wait for room, and keep it for the length of an `async with` block."""
        return Held(self, min(nbytes, self._limit))

    async def take(self, size: int) -> None:
        """Wait for room for so many bytes, at most the limit; `give_back` them.

        Raises:
            Overloaded: There was no room for too long.
        """
        if not self._waiting and self._held + size <= self._limit:
            self._held += size
            return
        turn = _Turn(size)
        self._waiting.put(payer().tenant, turn, cost=size)
        try:
            async with asyncio.timeout(self._patience):
                await turn.come
        except BaseException as error:
            if turn.come.done() and not turn.come.cancelled():  # let through and given up in the same instant
                self.give_back(size)
            else:
                self._waiting.remove(turn)
                self._let_through()  # whoever stood behind may be smaller
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"waited {self._patience:.0f} s for room for {size} bytes among {self._limit} in flight",
                    remedy="back off; raise [store] inflight if the store keeps up with more",
                ) from None
            raise

    def give_back(self, size: int) -> None:
        """What was taken."""
        self._held -= size
        self._let_through()

    def _let_through(self) -> None:
        while self._waiting and (self._held + self._waiting.first().size <= self._limit or not self._held):
            turn = self._waiting.take()
            if not turn.come.done():
                self._held += turn.size
                turn.come.set_result(None)
