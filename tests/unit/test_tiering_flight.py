"""Single flight and movers: many waiters, one piece of work, and nothing left behind."""

import asyncio
import contextlib
import gc
import os
import threading

import pytest

from tiering import Flights, Movers, settled


class Work:
    """Counts how often it was started, and ends when told."""

    def __init__(self, error=None):
        self.started = self.cancelled = 0
        self.go = asyncio.Event()
        self.error = error

    async def __call__(self):
        self.started += 1
        result = f"result {self.started}"
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error:
            raise self.error
        return result


@pytest.fixture
def disposed():
    return []


@pytest.fixture
def flights(disposed):
    return Flights(disposed.append)


async def join(flights, work, key="k"):
    async with flights.join(key, work) as result:
        await asyncio.sleep(0)
        return result


async def test_twenty_callers_share_one_piece_of_work_and_its_result_is_disposed_once(flights, disposed):
    work = Work()
    callers = [asyncio.create_task(join(flights, work)) for _ in range(20)]
    await asyncio.sleep(0)
    work.go.set()
    assert await asyncio.gather(*callers) == ["result 1"] * 20
    assert (work.started, disposed) == (1, ["result 1"])


async def test_a_result_is_kept_until_the_last_waiter_has_left(flights, disposed):
    work = Work()
    work.go.set()
    async with flights.join("k", work):
        await join(flights, work)  # a second flight: the first has landed, though its result is still in use
        assert disposed == ["result 2"]
    assert disposed == ["result 2", "result 1"]


async def test_a_cancelled_waiter_leaves_the_others_alone(flights, disposed):
    work = Work()
    callers = [asyncio.create_task(join(flights, work)) for _ in range(3)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.sleep(0)
    work.go.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == ["result 1"] * 2
    assert (work.started, work.cancelled, disposed) == (1, 0, ["result 1"])


async def test_the_last_waiter_to_leave_cancels_the_work_and_no_task_is_orphaned(flights, disposed):
    before = asyncio.all_tasks()
    work = Work()
    callers = [asyncio.create_task(join(flights, work)) for _ in range(3)]
    await asyncio.sleep(0)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    await asyncio.sleep(0)
    assert (work.cancelled, disposed) == (1, [])
    assert asyncio.all_tasks() == before
    work.go.set()
    assert await join(flights, work) == "result 2"  # who comes next starts afresh


async def test_an_error_reaches_every_waiter_and_is_never_reported_as_lost(flights, disposed):
    lost = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context["message"]))
    work = Work(error=RuntimeError("no luck"))
    callers = [asyncio.create_task(join(flights, work)) for _ in range(3)]
    leaver = asyncio.create_task(join(flights, work, "other"))
    await asyncio.sleep(0)
    work.go.set()
    leaver.cancel()  # alone with its flight, which fails all the same
    results = await asyncio.gather(*callers, leaver, return_exceptions=True)
    assert [str(result) for result in results[:3]] == ["no luck"] * 3
    await asyncio.sleep(0)
    gc.collect()
    assert (lost, disposed) == ([], [])


async def test_a_result_that_comes_after_everybody_left_is_disposed(flights, disposed):
    """Work that cannot be interrupted, such as a read into a buffer, ends in its own time."""
    go = asyncio.Event()

    async def stubborn():
        while not go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go.wait()
        return "late"

    caller = asyncio.create_task(join(flights, stubborn))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    closing = asyncio.create_task(flights.aclose())
    await asyncio.sleep(0.01)
    assert not closing.done()
    go.set()
    await closing
    assert disposed == ["late"]


async def test_movers_are_few_and_nice():
    async with Movers.open(10_000) as movers:
        cores = len(os.sched_getaffinity(0))
        assert 1 <= movers.threads <= cores
        running = set()
        most = 0

        def work(barrier):
            nonlocal most
            running.add(threading.get_ident())
            most = max(most, len(running))
            barrier.wait(0.002)
            running.discard(threading.get_ident())
            return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        event = threading.Event()
        nice = await asyncio.gather(*(movers.run(work, event) for _ in range(20)))
        assert set(nice) == {19}
        assert most <= movers.threads
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


async def test_b32_a_cancelled_mover_is_awaited_to_its_real_end():
    async with Movers.open() as movers:
        go, over = threading.Event(), threading.Event()

        def use_a_buffer():
            go.wait(5)
            over.set()

        caller = asyncio.create_task(movers.run(use_a_buffer))
        await asyncio.sleep(0.01)
        for _ in range(3):
            caller.cancel()
            await asyncio.sleep(0)
        assert not caller.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert over.is_set()


async def test_who_is_cancelled_before_a_mover_is_free_never_runs():
    async with Movers.open() as movers:
        go = threading.Event()
        ran = []
        busy = [asyncio.create_task(movers.run(go.wait, 5)) for _ in range(movers.threads)]
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(movers.run(ran.append, 1))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go.set()
        assert await asyncio.gather(*busy) == [True] * movers.threads
        assert ran == []


async def test_settled_passes_errors_on_and_reports_none_as_lost():
    lost = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: lost.append(context["message"]))
    failing = loop.create_future()
    failing.set_exception(OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        await settled(failing)
    late = loop.create_future()
    caller = asyncio.create_task(settled(late))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    late.set_exception(OSError("too late"))
    with pytest.raises(asyncio.CancelledError):
        await caller
    del late, failing
    gc.collect()
    assert lost == []
