"""What a peer asks for, got ready piece by piece: blocks that are leased or coded, and why others are not there."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final, Self

import msgspec

from kvstore import codec
from kvstore.clock import Clock
from kvstore.errors import Corrupt, KVTierError, Overloaded
from kvstore.ids import Shard
from kvstore.mesh import frames
from kvstore.mesh.coding import CODED, Worth
from kvstore.objects.gate import ByteGate
from kvstore.repo import BlockWant
from kvstore.service.names import Names
from kvstore.service.plane import Plane, TenantTiers
from tiering import Lease, Miss, Movers, Reach, Stack, Want

_IN_MEMORY: Final = 16 << 20  # bytes of a piece: some milliseconds of a fast link
_STEPS: Final = 1 << 14  # of telling how long blocks are: a fifth of a second, on a thread
_STEPS_HERE: Final = 512  # some milliseconds
_ELSEWHERE: Final = 8 << 20  # of one that is read from a disk first, or from the bucket


class Piece:
    """A part of an answer that can be sent.

    Attributes:
        buffers: Frames and blocks, in order; valid until `aclose`.
        last: Whether the answer ends with it.
    """

    def __init__(self, lifetime: AsyncExitStack) -> None:
        self.buffers: list[memoryview] = []
        self.last = False
        self._lifetime = lifetime

    def keep(self) -> Self:
        """It outlives the block that its lifetime was opened in."""
        self._lifetime = self._lifetime.pop_all()
        return self

    def found(self, place: int, body: memoryview, *, coded: bool = False) -> None:
        """One more block."""
        frame = memoryview(frames.found(place, body.nbytes, coded=coded))
        self.buffers += [frame, body, memoryview(frames.LINE_END)]

    def missed(self, place: int, miss: Miss) -> None:
        """None."""
        self.buffers.append(memoryview(frames.missed(place, miss)))

    async def aclose(self) -> None:
        """It was sent, or nobody wants it."""
        await self._lifetime.aclose()


class _Part(msgspec.Struct, frozen=True):
    """Blocks that are got together."""

    first: int
    wants: Sequence[Want]
    reach: Reach


class Lending:
    """Gets pieces ready. See :meth:`kvstore.server.peering.Peering.open` for what it is made of.

    Attributes:
        counts: Blocks by `raw`, `coded` and the reasons of misses.
    """

    def __init__(
        self,
        plane: Plane,
        tiers: Mapping[str, TenantTiers],
        movers: Movers,
        clock: Clock,
        owns: Callable[[bytes], bool],
        gate: ByteGate,
        *,
        tiers_s: float,
        through_s: float,
    ) -> None:
        self._plane, self._tiers, self._movers, self._clock = plane, tiers, movers, clock
        self._owns, self._gate, self._worth = owns, gate, Worth(clock)
        self._seconds = {Reach.DISK: tiers_s, Reach.ORIGIN: through_s}
        self.counts: Counter[str] = Counter()

    async def pieces(self, ask: frames.Ask, shard: Shard, most: int) -> AsyncGenerator[Piece]:
        """All of the answer, in order; one is got ready while the one before it is in use. Whoever gets one closes it.

        Args:
            ask: What is wanted.
            shard: Parsed.
            most: Bytes of blocks; but one block may always be had.
        """
        wants = await self._wants(ask, shard)
        if isinstance(wants, Miss):
            yield self._nothing(range(len(ask.tokens)), wants)
            return
        allowed = _leading(wants, most)
        stack = self._tiers[ask.namespace.tenant].stack
        coding = 0
        if self._worth.pays(ask.speed):
            coding = allowed if self._worth.measured else 1
        parts = self._parts(stack, wants[:allowed], ask.through, alone=coding)
        tasks: deque[asyncio.Task[Piece]] = deque()
        try:
            for count, part in enumerate(parts, 1):
                tasks.append(asyncio.create_task(self._get(stack, part, coded=part.first < coding)))
                while len(tasks) > 1 or (tasks and count == len(parts)):
                    piece = await tasks[0]
                    tasks.popleft()
                    piece.last = not tasks and allowed == len(wants)
                    yield piece
            if allowed < len(wants):
                yield self._nothing(range(allowed, len(wants)), Miss.FULL)
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                await asyncio.wait((task,))
                if not task.cancelled() and task.exception() is None:
                    await task.result().aclose()

    async def _wants(self, ask: frames.Ask, shard: Shard) -> list[Want] | Miss:
        tenant = ask.namespace.tenant
        if tenant not in self._tiers:
            return Miss.ABSENT
        await self._plane.settled(tenant, self._clock.monotonic() + self._seconds[Reach.DISK])
        if not 1 <= min(ask.tokens) <= max(ask.tokens) <= ask.namespace.block_tokens:
            raise frames.Malformed(f"blocks of {min(ask.tokens)} to {max(ask.tokens)} tokens; at most {ask.namespace.block_tokens}")
        names = Names(ask.namespace, shard)
        if not ask.through and not any(self._tiers[tenant].stack.locate(names.keys(ask.prefixes))):
            return Miss.ABSENT
        # A namespace is whatever a peer says, and how long its blocks are takes a step for each layer.
        steps = len(set(ask.tokens)) * ask.namespace.layers
        if steps > _STEPS:
            return Miss.FULL
        if steps > _STEPS_HERE:
            return await self._movers.run(names.wants, ask.prefixes, ask.tokens)
        return names.wants(ask.prefixes, ask.tokens)

    def _parts(self, stack: Stack, wants: Sequence[Want], through: bool, *, alone: int) -> list[_Part]:
        """Blocks in memory go together, and those that take time in smaller parts; the first few alone."""
        keys = [want.key for want in wants]
        here = [tier == stack.dram.name for tier in stack.locate(keys)]
        parts: list[_Part] = []
        first = 0
        while first < len(wants):
            reach, end = self._reach(keys[first], through), first + 1
            nbytes, most = wants[first].size, _IN_MEMORY if here[first] else _ELSEWHERE
            while first >= alone and end < len(wants) and here[end] == here[first] and self._reach(keys[end], through) is reach:
                nbytes += wants[end].size
                if nbytes > most:
                    break
                end += 1
            parts.append(_Part(first, wants[first:end], reach))
            first = end
        return parts

    def _reach(self, key: bytes, through: bool) -> Reach:
        """Only its owner fetches a block for others: nodes that disagree must not wait for each other in a circle."""
        return Reach.ORIGIN if through and self._owns(key) else Reach.DISK

    async def _get(self, stack: Stack, part: _Part, *, coded: bool) -> Piece:
        places = range(part.first, part.first + len(part.wants))
        async with AsyncExitStack() as lifetime:
            try:
                await lifetime.enter_async_context(self._gate.hold(sum(want.size for want in part.wants)))
            except Overloaded:
                return self._nothing(places, Miss.FULL)
            deadline = self._clock.monotonic() + self._seconds[part.reach]
            found = await stack.get_many(part.wants, deadline=deadline, stop_at_miss=False, reach=part.reach)
            lifetime.callback(_release, found)
            piece = Piece(lifetime)
            for place, want, got in zip(places, part.wants, found, strict=True):
                made = await self._encoded(want, got) if coded and isinstance(got, Lease) else got
                if isinstance(made, Lease):
                    piece.found(place, made.view)
                    self.counts["raw"] += 1
                elif isinstance(made, Miss):
                    piece.missed(place, made)
                    self.counts[made.value] += 1
                else:
                    piece.found(place, made, coded=True)
                    self.counts["coded"] += 1
            return piece.keep()

    async def _encoded(self, want: Want, lease: Lease) -> memoryview | Lease | Miss:
        block = want.ref
        assert isinstance(block, BlockWant)
        try:
            with self._worth.coding.moving(want.size):
                made = await self._movers.run(codec.encode, lease.view, block.name, block.namespace, CODED, self._movers.share)
        except Corrupt:
            return Miss.CORRUPT
        except KVTierError:  # no zstandard
            return lease
        self._worth.coded(want.size, made.nbytes)
        return memoryview(made.body)

    def _nothing(self, places: range, miss: Miss) -> Piece:
        piece = Piece(AsyncExitStack())
        piece.last = True
        for place in places:
            self.counts[miss.value] += 1
            piece.missed(place, miss)
        return piece


def _release(found: Sequence[Lease | Miss]) -> None:
    for got in found:
        if isinstance(got, Lease):
            got.release()


def _leading(wants: Sequence[Want], most: int) -> int:
    """How many fit; the first always does."""
    nbytes = wants[0].size
    for count, want in enumerate(wants[1:], 1):
        nbytes += want.size
        if nbytes > most:
            return count
    return len(wants)
