"""Requests at a device: lanes, what they do together, what is taken back, and what a look-up makes of it."""

import asyncio
import mmap
import os
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tiering import DiskTier, DramTier, Lease, Lru, Miss, Movers, Stack, StackSettings
from tiering.index import Index
from tiering.lanes import Lanes, Post
from tiering.slab import slot_length
from tiering.testing import ScriptedOrigin, key_of, value_of, want_of

MIB = 1 << 20
SIZE = 10_000


class Job:
    def __init__(self, at, nbytes, *, joins=True, who=0):
        self.at, self.nbytes, self.joins, self.who, self.begun = at, nbytes, joins, who, False


class Desk:
    """Lanes whose work is to note what they were given, and that wait at a gate."""

    def __init__(self, threads):
        self.runs, self.go, self.taken = [], threading.Event(), threading.Semaphore(0)
        self.lanes = Lanes("desk", self.work, threads)

    def work(self, run):
        self.runs.append([(job.at, job.nbytes) for job in run])
        self.taken.release()
        self.go.wait(10)


def test_whoever_has_a_thousand_requests_delays_another_by_one():
    desk = Desk(1)
    with desk.lanes.running():
        desk.lanes.submit(Job(0, 1))
        desk.taken.acquire()
        flood = [Job(n * 10_000, 1, who=1) for n in range(1, 1001)]
        late = [Job(n * 10_000 + 5, 1, who=2) for n in range(3)]
        for job in [*flood, *late]:
            desk.lanes.submit(job)
        assert desk.lanes.withdraw(late[1])
        desk.go.set()
    order = [at for [(at, _)] in desk.runs[1:]]
    assert len(order) == 1002
    assert order.index(5) <= 1
    assert order.index(20_005) <= 3
    assert [at for at in order if at % 10 == 0] == [job.at for job in flood]


def test_small_neighbours_are_taken_together_and_others_are_left_their_share():
    desk = Desk(1)
    with desk.lanes.running():
        desk.lanes.submit(Job(0, 1))
        desk.taken.acquire()
        for job in [
            *(Job(n * 300_000, 300_000) for n in range(5)),  # three of them are as much as is worth while
            Job(9_000_000, 10),
            Job(9_000_010, 10, joins=False),
            Job(9_000_020, 10),
            Job(7_000_000, 10),
        ]:
            desk.lanes.submit(job)
        desk.go.set()
    assert desk.runs[1:] == [
        [(0, 300_000), (300_000, 300_000), (600_000, 300_000)],
        [(900_000, 300_000), (1_200_000, 300_000)],
        [(9_000_000, 10)],
        [(9_000_010, 10)],
        [(9_000_020, 10)],
        [(7_000_000, 10)],
    ]


def test_a_run_takes_no_more_than_one_lane_s_share():
    desk = Desk(2)
    with desk.lanes.running():
        for n in range(2):
            desk.lanes.submit(Job(n * 1000, 1, joins=False))
            desk.taken.acquire()
        for n in range(8):
            desk.lanes.submit(Job(n * 10, 10))
        desk.go.set()
    assert desk.runs[2][:5] == [(n * 10, 10) for n in range(4)]


def test_what_has_not_begun_can_be_withdrawn_and_never_runs():
    desk = Desk(1)
    with desk.lanes.running():
        first, second, third = Job(0, 1), Job(50, 1), Job(90, 1)
        desk.lanes.submit(first)
        desk.taken.acquire()
        desk.lanes.submit(second)
        desk.lanes.submit(third)
        assert desk.lanes.withdraw(second)
        assert not desk.lanes.withdraw(second)
        assert not desk.lanes.withdraw(first)
        desk.go.set()
    assert desk.runs == [[(0, 1)], [(90, 1)]]  # what waits at the end is done


async def test_calls_from_threads_arrive_in_order_and_one_that_fails_stops_no_other(caplog):
    post, got, over = Post(asyncio.get_running_loop()), [], asyncio.Event()

    def work():
        for n in range(500):
            post.send(lambda n=n: got.append(n) if n != 7 else 1 / 0)
        post.send(over.set)

    await asyncio.to_thread(work)
    await over.wait()
    assert got == [n for n in range(500) if n != 7]
    assert "division by zero" in caplog.text


# What the disk makes of it


@asynccontextmanager
async def disk(folder, limit=64 * MIB, **options):
    async with Movers.open() as movers, DiskTier.open(folder, limit, movers, **options) as tier:
        yield tier


def aligned(n, size):
    """A value at a page-aligned address."""
    room = mmap.mmap(-1, -(-size // 4096) * 4096)
    room[:size] = value_of(n, size)
    return memoryview(room)[:size]


async def put(tier, *numbers, size=SIZE, **how):
    return await tier.put_many([(want_of(n, size), aligned(n, size)) for n in numbers], **how)


async def check(tier, *numbers, size=SIZE):
    found = []
    for n, got in zip(numbers, await tier.get_many([want_of(n, size) for n in numbers]), strict=True):
        if isinstance(got, Lease):
            with got:
                assert bytes(got.view) == value_of(n, size)
        found.append(n if isinstance(got, Lease) else got)
    return found


def flip(folder, offset):
    with (folder / "slab").open("r+b") as slab:
        slab.seek(offset)
        old = slab.read(1)
        slab.seek(offset)
        slab.write(bytes([old[0] ^ 1]))
        slab.flush()
        os.fsync(slab.fileno())


async def test_b30_of_values_that_are_read_together_only_the_one_that_rotted_is_dropped(tmp_path, monkeypatch):
    requests, real = [], os.preadv
    async with disk(tmp_path / "t") as tier:
        assert await put(tier, *range(60)) == [True] * 60
        flip(tmp_path / "t", tier._catalog._entries[key_of(17)].placed.offset + 4096 + 5)
        monkeypatch.setattr("tiering.slab.os.preadv", lambda fd, parts, at: (requests.append(at), real(fd, parts, at))[1])
        assert await check(tier, *range(60)) == [n if n != 17 else Miss.CORRUPT for n in range(60)]
        assert (tier.stats.corruptions, tier.count) == (1, 59)
        requests.clear()
        assert await check(tier, *range(17)) == list(range(17))
        assert len(requests) < 17


async def test_values_that_are_written_together_fail_alone(tmp_path, monkeypatch):
    """A request that does not fit takes no neighbour with it."""
    real, requests = os.pwritev, []
    async with disk(tmp_path / "t") as tier:
        while tier._catalog._space._holes.free_bytes:  # noqa: ASYNC110  no event tells; only tests care
            await asyncio.sleep(0.005)

        def refuse(fd, parts, at):
            size = sum(part.nbytes for part in parts)
            requests.append(size)
            if size > slot_length(SIZE) or bytes(parts[1][:9]) == value_of(5, 9):
                raise OSError(28, "No space left on device")
            return real(fd, parts, at)

        monkeypatch.setattr("tiering.slab.os.pwritev", refuse)
        assert await put(tier, *range(40)) == [n != 5 for n in range(40)]
        assert max(requests) > slot_length(SIZE)
        monkeypatch.undo()
        assert await check(tier, *range(40)) == [n if n != 5 else Miss.ABSENT for n in range(40)]
        assert (tier.stats.drops, tier.stats.errors, tier.used) == (1, 1, 39 * SIZE)


async def test_b30_a_value_of_several_pieces_comes_back_and_rot_in_any_of_them_shows(tmp_path):
    size = 9 * MIB + 123
    async with disk(tmp_path / "t") as tier:
        assert await put(tier, 1, size=size) == [True]
        assert await tier.put_many([(want_of(2, size), memoryview(value_of(2, size)))]) == [True]  # at no aligned address
        assert await check(tier, 1, 2, size=size) == [1, 2]
        placed = tier._catalog._entries[key_of(1)].placed
        assert tier._slab.has_header(placed)
        flip(tmp_path / "t", placed.offset + 4096 + 5 * MIB)
        flip(tmp_path / "t", tier._catalog._entries[key_of(2)].placed.offset + 4096 + size - 1)
        assert await check(tier, 1, 2, size=size) == [Miss.CORRUPT] * 2
    async with disk(tmp_path / "t") as tier:
        assert tier.count == 0


async def test_values_that_come_together_share_a_commit_and_what_was_written_is_counted(tmp_path, monkeypatch):
    commits, real = [], Index._write

    def count(self, group):
        commits.append(sum(len(ask.changes) for ask in group))
        real(self, group)

    async with disk(tmp_path / "t") as tier:
        monkeypatch.setattr(Index, "_write", count)
        assert await put(tier, *range(64), size=200_000) == [True] * 64
        assert sum(commits) >= 64
        assert len(commits) <= 16  # a handful; a commit for each would be 64
        slots = 64 * slot_length(200_000)
        assert slots < tier.stats.bytes_written < slots + 16 * MIB
        assert tier.stats.bytes_in == 64 * 200_000


async def test_a_loop_that_ends_in_the_middle_of_a_write_is_no_error(tmp_path, monkeypatch, caplog):
    """`asyncio.run` cancels every task, whoever is shielded, too."""
    real, started, go = os.pwritev, threading.Event(), threading.Event()

    def slow(*args):
        started.set()
        go.wait(10)
        return real(*args)

    async with disk(tmp_path / "t") as tier:
        before = asyncio.all_tasks()
        monkeypatch.setattr("tiering.slab.os.pwritev", slow)
        storing = asyncio.create_task(put(tier, 1))
        await asyncio.to_thread(started.wait)
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - before:
            task.cancel()
        await asyncio.gather(storing, return_exceptions=True)
        go.set()
        assert await tier.flush([key_of(1)]) == [True]
    assert "InvalidStateError" not in caplog.text


async def test_a_policy_declines_what_nobody_relies_on(tmp_path):
    class Second(Lru):
        """Admits a key when it is asked for a second time."""

        def __init__(self):
            super().__init__()
            self.seen = set()

        def admit(self, key, size):
            seen = key in self.seen
            self.seen.add(key)
            return seen

    async with disk(tmp_path / "t", policy=Second) as tier:
        assert await put(tier, 1) == [False]
        assert (tier.stats.declined, tier.stats.drops, tier.stats.bytes_written, tier.used) == (1, 0, 0, 0)
        assert await put(tier, 1) == [True]
        assert await put(tier, 2, must=True) == [True]
        assert await check(tier, 1, 2) == [1, 2]


# What a look-up makes of it


@pytest.fixture
def slow_reads(monkeypatch):
    """Reads that wait at a gate; how many have begun."""
    real, go, begun = os.preadv, threading.Event(), threading.Semaphore(0)

    def slow(*args):
        begun.release()
        go.wait(10)
        return real(*args)

    def start():
        monkeypatch.setattr("tiering.slab.os.preadv", slow)
        return go, begun

    yield start
    go.set()


@asynccontextmanager
async def stack_of(folder, *numbers, size=MIB, **settings):
    """A stack with these values on disk only."""
    async with AsyncExitStack() as parts:
        movers = await parts.enter_async_context(Movers.open())
        dram = await parts.enter_async_context(DramTier.open("dram", 64 * MIB, movers))
        slab = await parts.enter_async_context(DiskTier.open(folder, 64 * MIB, movers))
        stack = await parts.enter_async_context(Stack.open(dram, slab, [ScriptedOrigin()], StackSettings(**settings)))
        assert await put(slab, *numbers, size=size) == [True] * len(numbers)
        yield stack
    assert (dram.leases, dram._budget.reserved) == (0, 0)


async def test_a_look_up_needs_no_task_for_each_value(tmp_path, monkeypatch):
    async with stack_of(tmp_path / "t", *range(40)) as stack:
        before = {task.get_name() for task in asyncio.all_tasks()}
        made = []
        real = asyncio.create_task
        monkeypatch.setattr(asyncio, "create_task", lambda *args, **more: (made.append(1), real(*args, **more))[1])
        got = await stack.get_many([want_of(n, MIB) for n in range(40)])
        assert [bytes(lease.view[:50]) == value_of(n, 50) for n, lease in enumerate(got)] == [True] * 40
        assert {lease.source for lease in got} == {"nvme"}
        assert (made, {task.get_name() for task in asyncio.all_tasks()} - before) == ([], set())
        for lease in got:
            lease.release()


async def test_b44_a_cancelled_look_up_withdraws_what_has_not_begun_and_waits_for_nothing(tmp_path, slow_reads):
    async with stack_of(tmp_path / "t", *range(30)) as stack:
        go, begun = slow_reads()
        asking = asyncio.create_task(stack.get_many([want_of(n, MIB) for n in range(30)]))
        await asyncio.to_thread(begun.acquire)
        await asyncio.sleep(0.02)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        lanes = stack.disk._lanes._count
        assert stack.dram.used == lanes * MIB  # what is under way keeps its room
        assert stack.disk._catalog._pinned == lanes * MIB
        go.set()
        await stack._flights.aclose()
        assert (stack.dram.used, stack.disk._catalog._pinned) == (0, 0)


async def test_b46_a_disk_that_is_slower_than_the_deadline_warms_memory_all_the_same(tmp_path, slow_reads):
    async with stack_of(tmp_path / "t", *range(4)) as stack:
        go, _ = slow_reads()
        wants = [want_of(n, MIB) for n in range(4)]
        assert await stack.get_many(wants, deadline=time.monotonic() + 0.02) == [Miss.TIMEOUT]
        assert stack._flights.lingering == 4
        go.set()
        for lease in await stack.get_many(wants, deadline=time.monotonic() + 20):
            assert isinstance(lease, Lease)
            lease.release()
        assert stack.disk.stats.reads.count == 4  # each once


async def test_two_look_ups_of_one_prefix_read_it_once(tmp_path, slow_reads):
    async with stack_of(tmp_path / "t", *range(20)) as stack:
        go, begun = slow_reads()
        wants = [want_of(n, MIB) for n in range(20)]
        both = asyncio.gather(stack.get_many(wants), stack.get_many([*reversed(wants), wants[3]]))
        await asyncio.to_thread(begun.acquire)
        go.set()
        for found in await both:
            for lease in found:
                lease.release()
        assert [len(found) for found in both.result()] == [20, 21]
        assert stack.disk.stats.hits == 20


async def test_a_disk_that_fails_in_the_middle_is_made_up_for_by_the_origin(tmp_path, monkeypatch):
    async with stack_of(tmp_path / "t", *range(12)) as stack:
        origin = stack.origins[0]
        for n in range(12):
            origin.values[key_of(n)] = value_of(n, MIB)
        real, bad = os.preadv, stack.disk._catalog._entries[key_of(7)].placed.offset + 4096

        def fail(fd, parts, at):
            if at == bad:
                raise OSError(5, "Input/output error")
            return real(fd, parts, at)

        monkeypatch.setattr("tiering.slab.os.preadv", fail)
        got = await stack.get_many([want_of(n, MIB) for n in range(12)])
        assert [lease.source for lease in got] == ["nvme"] * 7 + ["bucket"] + ["nvme"] * 4
        assert [bytes(lease.view[-20:]) == value_of(n, MIB)[-20:] for n, lease in enumerate(got)] == [True] * 12
        for lease in got:
            lease.release()
