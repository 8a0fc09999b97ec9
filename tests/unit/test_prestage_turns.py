"""Whose turn it is, and how long things take."""

import asyncio
import random  # noqa: TID251  seeded
from contextlib import asynccontextmanager

import pytest

from kvstore.lifecycle.prestage import Rates, Ticket, Turns


class Work:
    """Restores that take turns when told to; `log` says who began, in order."""

    def __init__(self, speculative=2):
        self.turns, self.log, self.tasks = Turns(speculative=speculative), [], {}
        self.ends = {}
        self.count = 0

    def begin(self, name, *, speculative=False, deadline=100.0, seconds=None):
        self.count += 1
        ticket = Ticket(deadline, self.count, speculative=speculative)
        self.ends[name] = asyncio.Event()

        async def work():
            async with self.turns.turn(ticket, seconds):
                self.log.append(name)
                await self.ends[name].wait()

        self.tasks[name] = asyncio.create_task(work())
        return ticket

    async def end(self, *names):
        for name in names:
            self.ends[name].set()
            await self.tasks.pop(name)
        await settle()

    async def aclose(self):
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


@asynccontextmanager
async def working(**options):
    work = Work(**options)
    try:
        yield work
    finally:
        await work.aclose()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_interactive_work_never_waits_for_speculative_work():
    async with working() as work:
        for name in "abc":
            work.begin(name, speculative=True)
        await settle()
        assert work.log == ["a", "b"]
        work.begin("now")
        await settle()
        assert work.log == ["a", "b", "now"]
        await work.end("a", "b")
        assert work.log == ["a", "b", "now"]  # c waits: somebody wants bytes now
        await work.end("now")
        assert work.log[-1] == "c"


async def test_speculative_work_waits_while_a_request_reads():
    async with working() as work:
        with work.turns.request():
            work.begin("later", speculative=True)
            await settle()
            assert (work.log, work.turns.pressed) == ([], True)
        await settle()
        assert (work.log, work.turns.pressed) == (["later"], False)


async def test_the_nearest_deadline_goes_first_then_whoever_came_first():
    async with working(speculative=1) as work:
        work.begin("first", speculative=True)
        await settle()
        for name, deadline in (("c", 30.0), ("b", 20.0), ("a", 10.0), ("b2", 20.0)):
            work.begin(name, speculative=True, deadline=deadline)
        await settle()
        for name in ("first", "a", "b", "b2"):
            await work.end(name)
        assert work.log == ["first", "a", "b", "b2", "c"]


async def test_whoever_is_wanted_now_is_promoted_while_waiting():
    async with working(speculative=1) as work:
        work.begin("first", speculative=True)
        ticket = work.begin("second", speculative=True)
        await settle()
        assert work.log == ["first"]
        work.turns.promote(ticket, 50.0)
        await settle()
        assert (work.log, ticket.speculative) == (["first", "second"], False)
        await work.end("second", "first")
        work.begin("third", speculative=True)
        await settle()
        assert work.log[-1] == "third"


async def test_a_turn_that_does_not_come_in_time_is_a_timeout_and_leaves_nothing_behind():
    async with working(speculative=0) as work:
        work.begin("never", speculative=True, seconds=0.01)
        with pytest.raises(TimeoutError):
            await work.tasks.pop("never")
        assert not any(work.turns._waiting.values())


async def test_turns_given_up_at_any_moment_are_never_lost():
    dice = random.Random(3)
    turns = Turns(speculative=2)
    done = []

    async def work(n):
        ticket = Ticket(dice.random(), n, speculative=dice.random() < 0.7)
        for _ in range(3):
            async with turns.turn(ticket, None):
                for _ in range(dice.randrange(4)):
                    await asyncio.sleep(0)
        done.append(n)

    tasks = [asyncio.create_task(work(n)) for n in range(300)]
    for _ in range(200):
        await asyncio.sleep(0)
        dice.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(done) == sum(not task.cancelled() for task in tasks) > 50
    assert not any([*turns._at_work.values(), *turns._waiting.values(), turns.pressed])


def test_rates_follow_what_is_measured():
    rates = Rates()
    assert rates.seconds({"bucket": 50_000_000}) == 1.0  # a guess
    rates.observe("bucket", 1000, 1.0)
    rates.observe("bucket", 2000, 1.0)
    assert rates.seconds({"bucket": 2400}) == 2.0
    rates.observe("bucket", 0, 1.0)
    rates.observe("nvme", 10_000, 1.0)
    assert rates.seconds({"bucket": 1200, "nvme": 5000}) == 1.5
