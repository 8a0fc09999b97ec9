"""For tests: what every tier must do, a tier to measure others by, and an origin that does what it is told.

Subclass :class:`TierContract` with a name that pytest collects, and say how to open the tier (pytest's asyncio mode is `auto`)::

    class TestMine(TierContract):
        def open(self, limit): return MyTier.open(limit)
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tiering.budget import Budget
from tiering.policy import Lru
from tiering.tier import Lease, Miss, Tell, Tier, Want

KIB = 1024


def key_of(n: int) -> bytes:
    """The n-th of a series of keys."""
    return hashlib.sha256(b"key %d" % n).digest()


def value_of(n: int, size: int) -> bytes:
    """The n-th value of a series: bytes that no other n has, and that no shift of themselves equals."""
    return hashlib.shake_128(b"value %d" % n).digest(size)


def want_of(n: int, size: int) -> Want:
    """The n-th key, wanted at this size."""
    return Want(key_of(n), size)


class MemoryTier:
    """The contract in its plainest form: a dictionary of bytes."""

    def __init__(self, limit: int) -> None:
        self.name = "memory"
        self._budget = Budget(limit)
        self._policy = Lru()
        self._values: dict[bytes, bytes] = {}
        self._leases: dict[bytes, int] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, limit: int) -> AsyncIterator[MemoryTier]:
        """An empty one."""
        yield cls(limit)

    @property
    def used(self) -> int:
        """Payload bytes."""
        return self._budget.held

    @property
    def limit(self) -> int:
        """Payload bytes it may hold."""
        return self._budget.limit

    async def get_many(self, wants: Sequence[Want]) -> list[Lease | Miss]:
        """See :class:`tiering.Tier`."""
        return [self._get(want) for want in wants]

    async def put_many(self, items: Sequence[tuple[Want, memoryview]]) -> list[bool]:
        """See :class:`tiering.Tier`."""
        return [self._put(want, bytes(view)) for want, view in items]

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """See :class:`tiering.Tier`."""
        return [key in self._values for key in keys]

    def discard_many(self, keys: Sequence[bytes]) -> int:
        """See :class:`tiering.Tier`."""
        going = [key for key in keys if key in self._values and key not in self._leases]
        for key in going:
            self._policy.remove(key)
            self._drop(key)
        return len(going)

    async def evict(self, nbytes: int) -> int:
        """See :class:`tiering.Tier`."""
        before = self.used
        while before - self.used < nbytes and (key := self._policy.victim()) is not None:
            self._drop(key)
        return before - self.used

    async def aclose(self) -> None:
        """Nothing to do."""

    def _get(self, want: Want) -> Lease | Miss:
        value = self._values.get(want.key)
        if value is None or len(value) != want.size:
            return Miss.ABSENT
        self._leases[want.key] = self._leases.get(want.key, 0) + 1
        self._policy.remove(want.key)
        return Lease(want.key, memoryview(value), -1, lambda: self._release(want.key), self.name)

    def _release(self, key: bytes) -> None:
        self._leases[key] -= 1
        if not self._leases[key]:
            del self._leases[key]
            self._policy.add(key)

    def _put(self, want: Want, value: bytes) -> bool:
        if want.key in self._values:
            self._policy.touch(want.key)
            return True
        leased = sum(len(self._values[key]) for key in self._leases)
        if not 0 < want.size == len(value) <= self.limit - leased:
            return False
        while not self._budget.reserve(want.size):
            victim = self._policy.victim()
            assert victim is not None
            self._drop(victim)
        self._budget.commit(want.size)
        self._values[want.key] = value
        self._policy.add(want.key)
        return True

    def _drop(self, key: bytes) -> None:
        self._budget.free(len(self._values.pop(key)))


class ScriptedOrigin:
    """An origin whose values, delays and faults a test sets.

    Attributes:
        values: What it holds.
        fetched: Keys it was asked for, in order.
        offered: Keys it was offered, in order.
        before: Awaited before every fetch and offer; it may sleep, or raise.
        answer: Where a key is here, a fetch of it returns that miss, after spoiling the buffer.
        accepts: What `offer` answers; what it accepts it holds.
        up: What `ready` answers.
    """

    def __init__(self, name: str = "bucket") -> None:
        self.name = name
        self.values: dict[bytes, bytes] = {}
        self.fetched: list[bytes] = []
        self.offered: list[bytes] = []
        self.before: Callable[[Want], Awaitable[None]] | None = None
        self.answer: dict[bytes, Miss] = {}
        self.accepts = True
        self.up = True

    async def fetch(self, want: Want, into: memoryview, tell: Tell | None = None) -> Miss | None:  # noqa: ARG002  tells nothing
        """See :class:`tiering.Origin`."""
        self.fetched.append(want.key)
        if self.before is not None:
            await self.before(want)
        if want.key in self.answer:
            into[:] = bytes(into.nbytes)
            return self.answer[want.key]
        value = self.values.get(want.key)
        if value is None or len(value) != want.size:
            return Miss.ABSENT
        into[:] = value
        return None

    async def offer(self, want: Want, value: Lease) -> bool:
        """See :class:`tiering.Origin`."""
        self.offered.append(want.key)
        if self.before is not None:
            await self.before(want)
        if self.accepts:
            self.values[want.key] = bytes(value.view)
        return self.accepts

    def ready(self) -> bool:
        """See :class:`tiering.Origin`."""
        return self.up

    async def contains(self, wants: Sequence[Want]) -> int:
        """See :class:`tiering.Origin`."""
        return next((i for i, want in enumerate(wants) if want.key not in self.values), len(wants))


class TierContract:
    """What every tier does. Sizes here are whole pages or not, on purpose."""

    def open(self, limit: int) -> AbstractAsyncContextManager[Tier]:
        """A new, empty tier."""
        raise NotImplementedError

    async def test_a_value_comes_back_as_it_went_in(self) -> None:
        """Odd sizes and whole pages; a get before the put is ABSENT."""
        async with self.open(1 << 20) as tier:
            sizes = [1, 4095, 4096, 4097, 100_000]
            wants = [want_of(n, size) for n, size in enumerate(sizes)]
            assert await tier.get_many(wants) == [Miss.ABSENT] * 5
            assert await tier.put_many([(w, memoryview(value_of(n, w.size))) for n, w in enumerate(wants)]) == [True] * 5
            got = await tier.get_many([*wants, want_of(9, 10)])
            assert got.pop() is Miss.ABSENT
            for n, lease in enumerate(got):
                assert isinstance(lease, Lease)
                assert (lease.key, lease.size, lease.source) == (key_of(n), sizes[n], tier.name)
                assert bytes(lease.view) == value_of(n, sizes[n])
                assert lease.view.readonly
                lease.release()
            assert tier.used == sum(sizes)

    async def test_the_caller_may_reuse_its_buffer(self) -> None:
        """A put copies."""
        async with self.open(1 << 20) as tier:
            buffer = bytearray(value_of(1, 5000))
            assert await tier.put_many([(want_of(1, 5000), memoryview(buffer))]) == [True]
            buffer[:] = bytes(5000)
            await self._expect(tier, 1, 5000)

    async def test_used_never_passes_the_limit_and_the_least_recent_goes_first(self) -> None:
        """I8: ten values in room for four; a read makes recent."""
        async with self.open(4 * 10_000) as tier:
            for n in range(4):
                await self._put(tier, n, 10_000)
            await self._expect(tier, 0, 10_000)
            for n in range(4, 7):
                await self._put(tier, n, 10_000)
                assert tier.used == tier.limit
            assert tier.contains_many([key_of(n) for n in range(7)]) == [True, False, False, False, True, True, True]

    async def test_a_value_larger_than_the_limit_is_refused_and_costs_nothing(self) -> None:
        """Nothing is evicted for what cannot fit."""
        async with self.open(20_000) as tier:
            await self._put(tier, 1, 15_000)
            assert await tier.put_many([(want_of(2, 20_001), memoryview(value_of(2, 20_001)))]) == [False]
            assert tier.contains_many([key_of(1), key_of(2)]) == [True, False]

    async def test_a_repeat_is_true_and_takes_no_room(self) -> None:
        """Also when twenty come at once."""
        async with self.open(1 << 20) as tier:
            item = (want_of(1, 7000), memoryview(value_of(1, 7000)))
            results = await asyncio.gather(*(tier.put_many([item]) for _ in range(20)))
            assert results == [[True]] * 20
            assert tier.used == 7000
            await self._expect(tier, 1, 7000)

    async def test_b27_bad_lengths_are_misses_never_a_slice(self) -> None:
        """Zero, negative, smaller and larger than what is there."""
        async with self.open(1 << 20) as tier:
            await self._put(tier, 1, 8192)
            wrong = [0, -256, 8191, 8193, 4096]
            assert await tier.get_many([want_of(1, size) for size in wrong]) == [Miss.ABSENT] * 5
            assert await tier.put_many([(want_of(2, size), memoryview(b"")) for size in (0, -256)]) == [False, False]
            assert await tier.put_many([(want_of(2, 8192), memoryview(bytes(8191)))]) == [False]
            assert tier.used == 8192
            await self._expect(tier, 1, 8192)

    async def test_discard_forgets_and_a_later_put_is_new(self) -> None:
        """How many went; unknown keys do not count."""
        async with self.open(1 << 20) as tier:
            await self._put(tier, 1, 5000)
            await self._put(tier, 2, 6000)
            assert tier.discard_many([key_of(1), key_of(3)]) == 1
            assert (tier.used, tier.contains_many([key_of(1), key_of(2)])) == (6000, [False, True])
            assert await tier.get_many([want_of(1, 5000)]) == [Miss.ABSENT]
            await self._put(tier, 1, 5000)
            await self._expect(tier, 1, 5000)

    async def test_evict_frees_at_least_what_was_asked(self) -> None:
        """Whole values, oldest first; no more than needed."""
        async with self.open(100_000) as tier:
            for n in range(5):
                await self._put(tier, n, 10_000)
            assert await tier.evict(15_000) == 20_000
            assert (tier.used, tier.contains_many([key_of(n) for n in range(5)])) == (30_000, [False, False, True, True, True])
            assert await tier.evict(10**9) == 30_000
            assert await tier.evict(1) == 0

    async def test_leased_bytes_stay_while_everything_else_moves(self) -> None:
        """I8: twenty times the limit goes through; the leased value does not change."""
        async with self.open(50_000) as tier:
            await self._put(tier, 0, 10_000)
            (lease,) = await tier.get_many([want_of(0, 10_000)])
            assert isinstance(lease, Lease)
            for n in range(1, 100):
                await self._put(tier, n, 10_000)
            tier.discard_many([key_of(0)])
            assert bytes(lease.view) == value_of(0, 10_000)
            assert tier.used <= tier.limit
            lease.release()
            lease.release()

    async def test_random_work_agrees_with_what_was_put(self) -> None:
        """What is read is what was put, and accounting is exact at every step."""
        async with self.open(64 * KIB) as tier:
            for step in range(200):
                dice = hashlib.sha256(b"step %d" % step).digest()
                n, size = dice[0] % 23, 1 + dice[0] % 23 * 397
                match dice[1] % 4:
                    case 0 | 1:
                        assert await tier.put_many([(want_of(n, size), memoryview(value_of(n, size)))]) == [True]
                    case 2:
                        (got,) = await tier.get_many([want_of(n, size)])
                        if isinstance(got, Lease):
                            assert bytes(got.view) == value_of(n, size)
                            got.release()
                    case _:
                        tier.discard_many([key_of(n)])
                here = tier.contains_many([key_of(n) for n in range(23)])
                assert tier.used == sum(1 + n * 397 for n in range(23) if here[n]) <= tier.limit

    async def _put(self, tier: Tier, n: int, size: int) -> None:
        assert await tier.put_many([(want_of(n, size), memoryview(value_of(n, size)))]) == [True]

    async def _expect(self, tier: Tier, n: int, size: int) -> None:
        (got,) = await tier.get_many([want_of(n, size)])
        assert isinstance(got, Lease)
        with got:
            assert bytes(got.view) == value_of(n, size)
