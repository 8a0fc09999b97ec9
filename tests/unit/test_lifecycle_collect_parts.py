"""What the collector is made of: marks, what it keeps, the paced store, the worker of a node."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest

from kvstore import api
from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import Unavailable
from kvstore.lifecycle.collector import CollectSettings
from kvstore.lifecycle.kept import Kept
from kvstore.lifecycle.runners import InProcess
from kvstore.lifecycle.worker import Collections
from kvstore.objects import CREATE, OVERWRITE, Faults, MemoryStore
from kvstore.objects.paced import PacedStore
from kvstore.repo import marks as marks_module
from kvstore.repo.marks import Marks
from kvstore.repo.testing import Shelf, commit, opened, tiny, until

NS = tiny()


@pytest.mark.parametrize("unsettled", [1, 7, 1 << 20])
def test_marks_are_a_set_of_keys(monkeypatch, unsettled):
    monkeypatch.setattr(marks_module, "_UNSETTLED", unsettled)
    ids, marks, model = SeededIds(5), Marks(2**100 + 17), set()
    keys = [f"key-{int(300 * ids.jitter())}" for _ in range(500)]
    for at in range(0, 500, 10):
        some = keys[at : at + 10]
        marks.add(marks.digests(some, len(some)))
        model.update(some)
        asked = [f"key-{int(600 * ids.jitter())}" for _ in range(20)]
        assert marks.hold(marks.digests(asked, 20)).tolist() == [key in model for key in asked]
    marks.add_key("one more")
    assert marks.hold(marks.digests(["one more", "another"], 2)).tolist() == [True, False]
    assert len(marks) == len(model) + 1


def test_no_marks_hold_nothing():
    marks = Marks(1)
    assert len(marks) == 0
    assert marks.hold(marks.digests(["a", "b"], 2)).tolist() == [False, False]
    assert marks.hold(np.empty(0, np.uint64)).tolist() == []


def test_digests_are_of_the_seed_so_that_nobody_can_make_keys_that_collide():
    first, second = Marks(1), Marks(2)
    assert first.digests(["a"], 1)[0] != second.digests(["a"], 1)[0]


def test_what_is_kept_is_bounded_and_survives_only_runs_that_ask_for_it():
    kept: Kept[str] = Kept(10)
    kept.put("a", "1", 6)
    kept.put("b", "2", 6)  # no room: a full one takes no more
    kept.put("c", "3", 4)
    assert (kept.get("a"), kept.get("b"), kept.get("c"), kept.used) == ("1", None, "3", 10)
    kept.turn()
    assert kept.get("a") == "1"
    kept.turn()
    assert (kept.get("a"), kept.get("c"), kept.used) == ("1", None, 6)
    kept.put("a", "4", 10)
    assert (kept.get("a"), kept.used) == ("4", 10)
    kept.put("a", "5", 11)
    assert (kept.get("a"), kept.used) == (None, 0)


async def test_a_paced_store_asks_no_faster_than_agreed():
    clock = VirtualClock()
    log = Faults(MemoryStore(clock), clock=clock)
    store = PacedStore(log, 10, clock)
    for number in range(5):
        await store.put(f"a/{number}", b"x", CREATE)
    assert [len(page) async for page in store.list("a/")] == [5]
    await store.get("a/0")
    await store.head("a/0")
    await store.copy("a/0", "b")
    assert await store.delete(["a/0", "a/1"]) == []
    await store.now()
    asked = len(log.requests)
    assert asked == 11
    assert 0.1 * (asked - 1) <= round(clock.monotonic(), 6) <= 0.1 * (asked + 1)
    clock.advance(60)  # what was not asked is not saved up
    started = clock.monotonic()
    await asyncio.gather(*(store.head("b") for _ in range(3)))
    assert round(clock.monotonic() - started, 6) >= 0.2
    await store.aclose()


class Scripted:
    """A runner that does as told."""

    def __init__(self, *outcomes):
        self.outcomes, self.jobs, self.rests, self.running, self.most = list(outcomes), [], 0, 0, 0
        self.go = asyncio.Event()
        self.go.set()

    async def run(self, job, watch):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
            self.jobs.append(job)
            outcome = self.outcomes.pop(0) if self.outcomes else None
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        finally:
            self.running -= 1

    async def rest(self):
        self.rests += 1

    async def aclose(self):
        pass


def done(**fields) -> api.Collected:
    zero = dict.fromkeys(["heads", "sealed", "expired", "manifests_kept", "manifests_deleted", "blocks_kept"], 0)
    return api.Collected(epoch=1, blocks_deleted=0, bytes_deleted=0, **zero, **fields)


def nowhere():
    raise Unavailable("not reached yet")


async def test_collections_of_a_node_run_one_at_a_time_and_are_counted():
    runner = Scripted(
        done(usage=[api.Usage(tenant="a", namespace="n", blocks=1, bytes=2)]), Unavailable("gone"), done(dry_run=True)
    )
    clock = VirtualClock()
    collections = Collections(runner, nowhere, clock, 0)
    runner.go.clear()
    asked = [asyncio.create_task(collections.collect(api.Collect())) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert collections.stats("a").running
    runner.go.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["Collected", "Unavailable", "Collected"]
    stats = collections.stats("a")
    assert (runner.most, runner.rests, stats.runs, stats.running) == (1, 3, {"ok": 2, "unavailable": 1}, False)
    assert (stats.last_success, stats.error, stats.late_s) == (clock.now(), "", 0)
    assert stats.usage == [api.Usage(tenant="a", namespace="n", blocks=1, bytes=2)]
    assert collections.stats("b").usage == []
    await collections.aclose()


async def test_whoever_asked_may_leave_and_the_collection_goes_on():
    runner = Scripted(done())
    collections = Collections(runner, nowhere, VirtualClock(), 0)
    runner.go.clear()
    asked = asyncio.create_task(collections.collect(api.Collect(now=True)))
    await asyncio.sleep(0.01)
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    runner.go.set()
    await asyncio.sleep(0.01)
    assert [job.request for job in runner.jobs] == [api.Collect(now=True)]
    await collections.aclose()


async def test_a_node_knows_the_buckets_size_after_a_restart_and_collects_periodically():
    clock = VirtualClock()
    memory = MemoryStore(clock)
    async with opened(memory, clock) as repo:
        await repo.put_namespace(NS)
        await commit(repo, Shelf(), "s", range(16), 0, NS)
        first = Collections(InProcess(lambda: repo, CollectSettings()), lambda: repo, clock, 0)
        size = (await first.collect(api.Collect())).live_bytes
        await first.aclose()

        runner = Scripted()
        restarted = Collections(runner, lambda: repo, clock, 3600)
        keeping = asyncio.create_task(restarted.keep())
        await until(lambda: bool(restarted.stats("default").usage))
        assert restarted.stats("default").usage[0].bytes == size
        await until(lambda: len(runner.jobs) >= 3)  # the clock moves on when somebody sleeps on it
        keeping.cancel()
        assert {job.fresh_s for job in runner.jobs} == {1800}
        assert restarted.stats("default").runs["skipped"] >= 2
        await restarted.aclose()


async def test_an_overdue_collection_is_said_to_be_late():
    clock = VirtualClock()
    memory = MemoryStore(clock)
    async with opened(memory, clock) as repo:
        runner = Scripted(Unavailable("no answer"))
        collections = Collections(runner, lambda: repo, clock, 60)
        with pytest.raises(Unavailable):
            await collections.keep()
        clock.advance(30)
        stats = collections.stats("default")
        assert (stats.late_s, stats.error, stats.runs) == (30, "unavailable: no answer", {"unavailable": 1})
        await collections.aclose()


async def test_a_collector_in_this_process_is_made_anew_with_the_repository():
    clock = VirtualClock()
    memory = MemoryStore(clock)
    held = []
    runner = InProcess(lambda: held[-1], CollectSettings())
    collections = Collections(runner, lambda: held[-1], clock, 0)
    for _ in range(2):
        async with opened(memory, clock) as repo:
            held.append(repo)
            await memory.put("r/x", b"", OVERWRITE)
            assert (await collections.collect(api.Collect())).epoch == 1
    await collections.aclose()
