"""Idle movers help with what is shared, and leave when they are needed."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tiering.movers import Movers


@pytest.fixture
def movers():
    """Two threads, whatever this machine has."""
    with ThreadPoolExecutor(2) as pool:
        yield Movers(pool, 2)


async def test_an_idle_thread_helps_until_there_is_no_more(movers):
    meeting, steps = threading.Barrier(2), iter(range(20))
    done, all_done = [], threading.Event()

    def step():
        index = next(steps, None)
        if index is None:
            return False
        if index < 2:
            meeting.wait(30)  # alone, nobody comes past this
        done.append(index)
        if len(done) == 20:
            all_done.set()
        return True

    def work():
        movers.share(step)
        while step():
            pass
        assert all_done.wait(30)  # whoever shares waits for the steps that others have begun

    await movers.run(work)
    assert sorted(done) == list(range(20))


async def test_a_helper_leaves_when_the_thread_is_needed(movers):
    helping, over = threading.Event(), threading.Event()

    def step():
        helping.set()
        return not over.is_set()  # there is always more

    def work():
        movers.share(step)
        over.wait(30)

    lone = asyncio.create_task(movers.run(work))
    await asyncio.to_thread(helping.wait, 30)
    await movers.run(over.set)  # needs the helper's thread
    await lone


async def test_nobody_is_asked_while_all_are_busy(movers):
    both, helped = threading.Barrier(2), []

    def work():
        both.wait(30)
        movers.share(lambda: bool(helped.append(1)))
        both.wait(30)

    await asyncio.gather(movers.run(work), movers.run(work))
    assert await movers.run(lambda: list(helped)) == []


async def test_who_shares_while_the_pool_closes_is_alone():
    pool = ThreadPoolExecutor(2)
    movers = Movers(pool, 2)
    pool.shutdown()
    movers.share(os.abort)
