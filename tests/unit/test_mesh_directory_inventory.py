"""What a node has, told to a directory: news in batches, and everything compared."""

import hashlib
from contextlib import asynccontextmanager

from kvstore.clock import VirtualClock
from kvstore.mesh.entries import BUCKETS
from kvstore.mesh.inventory import Inventory
from tiering import DiskTier, DramTier, Movers
from tiering.testing import key_of, value_of, want_of


def key(n):
    return hashlib.sha256(str(n).encode()).digest()


class Shelf:
    """A tier of keys."""

    def __init__(self, *keys):
        self.here = set(keys)
        self.told = None
        self.looking = lambda: None

    def contains_many(self, keys):
        found = [one in self.here for one in keys]
        self.looking()
        return found

    def keys(self):
        return list(self.here)

    def watch(self, told):
        self.told = told

    def put(self, one):
        self.here.add(one)
        self.told(one, 1, None)

    def take(self, one):
        self.here.remove(one)
        self.told(one, -1, None)


class Book:
    """A directory that remembers what it was told, by the first bytes of keys."""

    def __init__(self):
        self.ready = True
        self.lives = 1
        self.losses = 0
        self.said = []
        self.buckets = {}
        self.before = lambda: None
        self.corrected = []

    def added(self, keys):
        self.said += [(one, True) for one in keys]
        for one in keys:
            self.buckets.setdefault(one[:2], set()).add(one[:8])

    def dropped(self, keys):
        self.said += [(one, False) for one in keys]
        for one in keys:
            self.buckets.get(one[:2], set()).discard(one[:8])

    async def flush(self):
        self.before()

    async def correct(self, buckets, held):
        self.before()
        self.corrected += buckets
        self.buckets.update({bucket.to_bytes(2, "big"): set(held(bucket)) for bucket in buckets})
        return True

    @property
    def listed(self):
        return set().union(*self.buckets.values())

    @listed.setter
    def listed(self, shorts):
        self.buckets = {}
        self.added(shorts)


async def run(work):
    return work()


@asynccontextmanager
async def opened(*tiers, book=None, clock=None):
    async with Inventory.open(tiers, book or Book(), run, clock or VirtualClock()) as inventory:
        yield inventory


async def whole(inventory, passes=1):
    while inventory.passes < passes:
        await inventory.step()


class TestNews:
    async def test_the_first_tier_that_has_it_adds_and_the_last_drops(self):
        memory, disk, book = Shelf(), Shelf(), Book()
        async with opened(memory, disk, book=book) as inventory:
            for move in (memory.put, disk.put, memory.take, memory.put, disk.take):
                move(key(1))
                inventory.drain()
                assert book.said == [(key(1), True)]
            memory.take(key(1))
            inventory.drain()
            assert book.said == [(key(1), True), (key(1), False)]

    async def test_what_comes_to_two_tiers_between_two_batches_is_added(self):
        memory, disk, book = Shelf(), Shelf(), Book()
        async with opened(memory, disk, book=book) as inventory:
            memory.put(key(1))
            disk.put(key(1))
            inventory.drain()
        assert book.said == [(key(1), True)]

    async def test_what_comes_and_goes_between_two_batches_is_no_news(self):
        memory, book = Shelf(key(2)), Book()
        async with opened(memory, book=book) as inventory:
            memory.put(key(1))
            memory.take(key(1))
            memory.take(key(2))
            memory.put(key(2))
            inventory.drain()
        assert book.said == []

    async def test_what_moves_while_it_is_looked_at_is_told_next_time(self):
        memory, disk, book = Shelf(), Shelf(), Book()
        async with opened(memory, disk, book=book) as inventory:
            memory.put(key(1))

            def meanwhile():
                memory.looking = lambda: None
                disk.put(key(1))

            memory.looking = meanwhile
            inventory.drain()
            assert book.said == []
            inventory.drain()
            assert book.said == [(key(1), True)]

    async def test_too_much_at_once_is_found_out_by_comparing(self):
        memory, book = Shelf(), Book()
        async with opened(memory, book=book) as inventory:
            await whole(inventory)
            for n in range(70_000):
                memory.put(key(n))
            assert inventory.missed == 70_000 - 65_536
            inventory.drain()
            await whole(inventory, 2)
        assert book.listed == {one[:8] for one in memory.here}

    async def test_nobody_listens_after_the_end(self):
        memory = Shelf()
        async with opened(memory):
            assert memory.told is not None
        assert memory.told is None


class TestComparing:
    async def test_a_new_life_tells_everything_and_nothing_else(self):
        memory, disk, book = Shelf(*map(key, range(500))), Shelf(*map(key, range(400, 2000))), Book()
        async with opened(memory, disk, book=book) as inventory:
            await whole(inventory)
            assert book.listed == {key(n)[:8] for n in range(2000)}
            assert book.corrected == []
            book.lives += 1
            book.listed = set()
            await whole(inventory, 2)
            assert book.listed == {key(n)[:8] for n in range(2000)}

    async def test_a_new_life_tells_everything_before_what_was_lost_is_looked_for(self):
        """A directory that dies with a batch on its way, and comes back empty, is both."""
        clock, memory, book = VirtualClock(), Shelf(*map(key, range(500))), Book()
        async with opened(memory, book=book, clock=clock) as inventory:
            await whole(inventory)
            book.lives += 1
            book.losses += 1
            book.listed = set()
            await whole(inventory, 2)
            assert book.listed == {key(n)[:8] for n in range(500)}
            assert book.corrected == []
            await whole(inventory, 3)
            assert book.corrected == list(range(BUCKETS))

    async def test_a_new_life_tells_what_came_while_everything_was_compared(self):
        clock, memory, book = VirtualClock(), Shelf(key(1)), Book()
        async with opened(memory, book=book, clock=clock) as inventory:
            await whole(inventory)
            while not book.corrected:  # slowly, because nothing is known to be wrong
                clock.advance(await inventory.step())
            memory.put(key(2))
            inventory.drain()
            book.lives += 1
            book.listed = set()
            await whole(inventory, 2)
        assert book.listed == {key(1)[:8], key(2)[:8]}

    async def test_a_loss_corrects_what_is_wrong_everywhere(self):
        memory, disk, book = Shelf(*map(key, range(500))), Shelf(*map(key, range(400, 2000))), Book()
        book.listed = {key(n)[:8] for n in range(1500, 3000)}
        book.losses += 1
        async with opened(memory, disk, book=book) as inventory:
            await whole(inventory, 2)
        assert book.listed == {key(n)[:8] for n in range(2000)}
        assert book.corrected == list(range(BUCKETS))

    async def test_the_first_and_the_last_bucket(self):
        ends = [bytes(32), bytes(8) + b"\1" * 24, b"\xff" * 32, b"\0" * 2 + b"\xff" * 30, b"\xff" * 2 + b"\0" * 30]
        book = Book()
        async with opened(Shelf(*ends), book=book) as inventory:
            await whole(inventory)
        assert book.listed == {one[:8] for one in ends}

    async def test_what_comes_and_goes_during_it_is_right_whenever_its_bucket_is_compared(self):
        memory, book = Shelf(*map(key, range(1000))), Book()
        book.losses += 1
        moves = iter([(memory.take, n) for n in range(500)] + [(memory.put, n) for n in range(1000, 1500)])

        def before():
            for move, n in [one for one in [next(moves, None)] if one]:
                move(key(n))

        book.before = before
        async with opened(memory, book=book) as inventory:
            await whole(inventory, 2)
            inventory.drain()
        assert next(moves, None) is None
        assert book.listed == {key(n)[:8] for n in range(500, 1500)}

    async def test_a_loss_begins_it_anew_and_the_loss_of_nothing_is_slow(self):
        clock, memory, book = VirtualClock(), Shelf(key(1)), Book()
        async with opened(memory, book=book, clock=clock) as inventory:
            await whole(inventory)
            await inventory.step()
            assert book.corrected == []  # all is well
            book.losses += 1
            book.listed = set()
            await whole(inventory, 2)
            assert book.listed == {key(1)[:8]}
            book.listed = set()  # and nobody noticed
            begun = clock.monotonic()
            while inventory.passes < 3:
                clock.advance(await inventory.step())
            assert book.listed == {key(1)[:8]}
            assert 6 * 3600 * 0.9 < clock.monotonic() - begun < 6 * 3600 * 1.2

    async def test_a_directory_that_is_away_is_not_bothered(self):
        memory, book = Shelf(key(1)), Book()
        book.ready = False
        async with opened(memory, book=book) as inventory:
            for _ in range(100):
                assert await inventory.step() > 0
            assert book.said == book.corrected == []
            book.ready = True
            await whole(inventory)
        assert book.listed == {key(1)[:8]}

    async def test_a_failure_in_the_middle_goes_on_where_it_was(self):
        memory, book = Shelf(*map(key, range(100))), Book()
        book.losses += 1
        correct, turns = book.correct, iter(range(100_000))

        async def unsure(buckets, held):
            return next(turns) % 3 > 0 and await correct(buckets, held)

        book.correct = unsure
        async with opened(memory, book=book) as inventory:
            await whole(inventory, 2)
        assert book.corrected == list(range(BUCKETS))
        assert book.listed == {key(n)[:8] for n in range(100)}


async def test_real_tiers_under_eviction(tmp_path):
    book, size = Book(), 4096
    async with (
        Movers.open() as movers,
        DramTier.open("dram", 8 * size, movers) as memory,
        DiskTier.open(tmp_path, 16 * size, movers) as disk,
        Inventory.open([memory, disk], book, movers.run, VirtualClock()) as inventory,
    ):
        for first in range(0, 64, 8):
            items = [(want_of(n, size), memoryview(value_of(n, size))) for n in range(first, first + 8)]
            await memory.put_many(items)
            if first % 16:
                await disk.put_many(items)
            inventory.drain()
        there = {key_of(n)[:8] for n in range(64) if memory.contains_many([key_of(n)])[0] or disk.contains_many([key_of(n)])[0]}
        assert 16 <= len(there) < 64
        assert book.listed == there
        book.listed = {key_of(99)[:8]}
        book.losses += 1
        await whole(inventory, 2)
        assert book.listed == there
