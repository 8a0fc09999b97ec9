"""Readers that wait, leave or are cancelled, and memory that is full: nothing stays leased or taken."""

import asyncio
import os
import threading
import time

import pytest
from fakes.stack import MIB, SIZE

from tiering import DramTier, Lease, Miss, Movers, Stack
from tiering.testing import ScriptedOrigin, key_of, want_of


async def test_a_deadline_is_a_timeout_and_the_fetch_goes_on_for_who_still_waits(rig):
    async with rig() as r:
        r.in_origin(1)
        go = asyncio.Event()

        async def wait(_):
            await go.wait()

        r.origin.before = wait
        patient = asyncio.create_task(r.get(1))
        await asyncio.sleep(0)
        assert await r.get(1, deadline=time.monotonic() + 0.01) == [Miss.TIMEOUT]
        assert await r.get(1, 2, deadline=time.monotonic() - 1, stop_at_miss=False) == [Miss.TIMEOUT] * 2
        go.set()
        assert await patient == [1]
        assert r.origin.fetched == [key_of(1)]
        assert await r.get(1, deadline=time.monotonic() - 1) == [1]  # memory answers at any time


async def test_a_fetch_nobody_waits_for_is_cancelled_and_leaves_no_room_taken(rig):
    async with rig(linger=0) as r:
        r.in_origin(1)
        begun, cancelled = [], []

        async def wait(want):
            begun.append(want.key)
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                cancelled.append(want.key)
                raise

        r.origin.before = wait
        while not begun:  # on a slow machine the deadline may be over before anything is asked for
            assert await r.get(1, deadline=time.monotonic() + 0.01) == [Miss.TIMEOUT]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (cancelled, r.dram.used) == ([key_of(1)], 0)


async def test_when_everything_is_leased_the_rest_is_full(rig):
    async with rig(dram=4 * SIZE) as r:
        r.in_origin(*range(8))
        held = await r.stack.get_many([want_of(n, SIZE) for n in range(4)])
        assert await r.get(4, 5) == [Miss.FULL]
        assert await r.get(0, 1) == [0, 1]
        held[0].release()
        await r.settle()
        assert await r.get(4) == [4]
        for lease in held:
            lease.release()


async def test_a_prefix_longer_than_memory_is_cut_where_memory_ends(rig):
    async with rig(dram=6 * SIZE, fetches=3) as r:
        r.in_origin(*range(20))
        assert await r.get(*range(20)) == [*range(6), Miss.FULL]


async def test_b44_a_thousand_cancelled_reads_leave_no_lease(rig):
    async with rig(dram=8 * SIZE, disk=40 * SIZE) as r:
        await r.on_disk(*range(5))
        r.in_origin(*range(5, 12))

        async def pause(want):
            await asyncio.sleep(0)

        r.origin.before = pause
        for n in range(1000):
            reading = asyncio.create_task(r.stack.get_many([want_of((n + i) % 12, SIZE) for i in range(5)]))
            for _ in range(n % 13):
                await asyncio.sleep(0)
            reading.cancel()
            if n % 3 == 0:
                await asyncio.sleep(0)
                reading.cancel()
            try:
                for lease in await reading:
                    if isinstance(lease, Lease):
                        lease.release()
            except asyncio.CancelledError:
                pass
        await r.settle()
        await asyncio.sleep(0.05)
        assert (r.dram.leases, r.dram._budget.reserved, r.disk._catalog._pinned) == (0, 0, 0)
        assert await r.get(*range(8)) == list(range(8))


async def test_b32_room_for_a_read_is_not_given_away_before_the_read_has_ended(rig, monkeypatch):
    async with rig(dram=2 * SIZE) as r:
        await r.on_disk(1)
        started, go, real = threading.Event(), threading.Event(), os.preadv

        def slow(*args):
            started.set()
            go.wait(10)
            return real(*args)

        monkeypatch.setattr("tiering.slab.os.preadv", slow)
        reading = asyncio.create_task(r.get(1))
        await asyncio.to_thread(started.wait)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading  # its caller is free at once
        assert r.dram.used == SIZE
        assert r.stack.reserve(want_of(2, 2 * SIZE)) is Miss.FULL
        go.set()
        await r.stack._flights.aclose()
        assert r.dram.used == 0


async def test_closing_answers_who_is_waiting(tmp_path):
    async with Movers.open() as movers, DramTier.open("dram", MIB, movers) as dram:
        origin = ScriptedOrigin()
        origin.before = lambda _: asyncio.sleep(10)
        async with Stack.open(dram, None, [origin]) as stack:
            waiting = asyncio.create_task(stack.get_many([want_of(1, SIZE), want_of(2, SIZE)], stop_at_miss=False))
            await asyncio.sleep(0.01)
        assert await waiting == [Miss.UNAVAILABLE] * 2
        assert await stack.get_many([want_of(1, SIZE)]) == [Miss.ABSENT]
        assert (dram.used, dram.leases) == (0, 0)


async def test_names_are_told_apart():
    async with Movers.open() as movers, DramTier.open("dram", MIB, movers) as dram:
        with pytest.raises(ValueError, match="names"):
            async with Stack.open(dram, None, [ScriptedOrigin("a"), ScriptedOrigin("a")]):
                pass
