"""Restores by priority: what is staged ahead, for how long, at whose expense, and how late."""

import asyncio
import gc
import tracemalloc

import pytest
from fakes.clock import HandClock
from fakes.sealed import MASTERS
from fakes.service import ME, cancel, get_restore, in_memory, node, read, restore, restored, saved, stats

from kvstore.errors import Invalid, NotFound, Overloaded, Unsupported
from kvstore.objects import Fault, Faults, MemoryStore
from kvstore.sealing import spelled

HALF = 1 << 20  # of a node with dram.size=2MiB; that is room for 169 blocks


def block_reads(faults):
    return [log for log in faults.requests if log.verb == "get" and "blocks/" in log.key]


@pytest.fixture(params=["plain", "sealed"])
def keys(request, tmp_path):
    """Settings of a node: without encryption, and with it."""
    if request.param == "plain":
        return {}
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(spelled(MASTERS.current))
    return {"encryption__key_file": str(path)}


@pytest.mark.parametrize("priority", ["interactive", "speculative"])
async def test_a_request_after_a_restore_reads_nothing_from_the_bucket(priority, keys):
    faults = Faults(MemoryStore())
    chains = await saved(faults, key_file=keys.get("encryption__key_file", ""), s=20)
    async with node(faults, **keys) as service:
        status = await restored(service, "s", priority=priority)
        assert (status.state, status.priority, status.staged_tokens) == ("ready", priority, 320)
        assert len(block_reads(faults)) == 20
        before = len(faults.requests)
        assert await read(service, chains["s"]) == 20
        assert len(faults.requests) == before


async def test_a_byte_budget_cuts_the_prefix(keys):
    faults = Faults(MemoryStore())
    chains = await saved(faults, key_file=keys.get("encryption__key_file", ""), s=10)
    async with node(faults, **keys) as service:
        whole = await restored(service, "s", tier="bucket")
        budget = whole.bytes * 7 // 10 - 1
        status = await restored(service, "s", max_bytes=budget)
        assert (status.state, status.tokens, status.staged_tokens) == ("partial", 160, 96)
        assert status.staged_bytes <= budget
        assert "max_bytes leaves out 4 of 10" in status.error
        assert (in_memory(service, chains["s"]), len(block_reads(faults))) == (6, 6)


async def test_speculative_restores_evict_nothing_that_was_used_lately_or_is_leased():
    faults = Faults(MemoryStore())
    chains = await saved(faults, mine=150, other=160)
    async with node(faults, dram__size="2MiB", clock=(clock := HandClock())) as service:
        mine = chains["mine"]
        assert await read(service, mine) == 150
        status = await restored(service, "other", priority="speculative")
        assert status.state == "partial"
        assert 0 < status.staged_tokens < 42 * 16
        assert "full" in status.error
        assert in_memory(service, mine) == 150
        assert in_memory(service, chains["other"]) >= status.staged_tokens // 16
        clock._monotonic += 61
        again = await restored(service, "other", priority="speculative")
        assert again.staged_tokens == 42 * 16  # what nobody used for a minute makes way
        held = (await stats(service)).held_bytes
        assert 0 < held <= HALF // 2  # prestage.held is 50 percent, and half of that is theirs
        assert "prestage.held" in again.error


async def test_what_was_staged_ahead_makes_way_for_a_request_and_is_not_promised_any_more():
    faults = Faults(MemoryStore())
    chains = await saved(faults, ahead=40, big=160)
    async with node(faults, dram__size="2MiB", prestage__inflight="1") as service:
        gate = Fault(action="stall", verb="get", key="*blocks/*", skip=30)
        faults.script += [gate]
        started = await restore(service, "ahead", priority="speculative")
        while (await get_restore(service, started.restore_id)).staged_tokens < 30 * 16:  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0.005)
        assert (await stats(service)).leases == 0  # what is staged is only held
        reading = asyncio.create_task(read(service, chains["big"]))
        assert await reading == 160
        faults.release.set()
        status = await get_restore(service, started.restore_id, wait_ms=20_000)
        assert status.state in {"partial", "dropped"}
        assert in_memory(service, chains["ahead"]) * 16 == status.staged_tokens < 30 * 16


async def test_an_interactive_restore_overtakes_a_speculative_one():
    faults = Faults(MemoryStore())
    chains = await saved(faults, slow=60, now=60)
    faults.script += [Fault(action="slow", verb="get", key="*blocks/*", times=10_000, seconds=0.01)]
    async with node(faults, prestage__inflight="100KiB") as service:
        speculative = await restore(service, "slow", priority="speculative")
        while not (await get_restore(service, speculative.restore_id)).staged_tokens:  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0.005)
        staged = (await get_restore(service, speculative.restore_id)).staged_tokens
        status = await restored(service, "now")
        assert status.state == "ready"
        between = (await get_restore(service, speculative.restore_id)).staged_tokens
        assert between - staged <= 2 * 11 * 16  # the step that had begun, and at most the one after it
        assert (await get_restore(service, speculative.restore_id, wait_ms=20_000)).state == "ready"
        assert await read(service, chains["slow"], reach="dram") == 60


async def test_a_speculative_restore_that_is_wanted_now_becomes_interactive():
    faults = Faults(MemoryStore())
    await saved(faults, s=10)
    async with node(faults) as service:
        with service.plane.turns.request():  # a request reads, for as long as this lasts
            started = await restore(service, "s", priority="speculative")
            again = await restore(service, "s", priority="speculative")
            assert (await get_restore(service, started.restore_id, wait_ms=50)).state in {"resolving", "staging"}
            wanted = await restore(service, "s")
            assert started.restore_id == again.restore_id == wanted.restore_id
            status = await get_restore(service, started.restore_id, wait_ms=20_000)
        assert (status.state, status.priority) == ("ready", "interactive")
        assert (await stats(service)).restored == {"interactive ready": 1}


async def test_speculative_restores_beyond_the_bound_are_dropped_and_counted():
    faults = Faults(MemoryStore())
    await saved(faults, a=2, b=2, c=2)
    async with node(faults, prestage__waiting="2") as service:
        with service.plane.turns.request():
            started = [await restore(service, name, priority="speculative", deadline_ms=300) for name in "abc"]
            assert [status.state for status in started] == ["resolving", "resolving", "dropped"]
            assert "prestage.waiting" in started[2].error
            for status in started[:2]:
                late = await get_restore(service, status.restore_id, wait_ms=20_000)
                assert (late.state, late.staged_tokens) == ("dropped", 0)
                assert late.late_ms > 0  # what the rest would have taken
        found = await stats(service)
        assert found.restored == {"speculative dropped": 3}
        assert (sum(found.lateness["speculative"].counts), found.restores, found.leases) == (2, 0, 0)
        assert (await restored(service, "a")).state == "ready"


async def test_a_full_node_drops_what_is_speculative_for_what_is_wanted_now():
    faults = Faults(MemoryStore())
    await saved(faults, a=2, b=2, c=2)
    async with node(faults, limits__restores="2") as service:
        with service.plane.turns.request():
            first = await restore(service, "a", priority="speculative")
            await restore(service, "b", priority="speculative")
            with pytest.raises(Overloaded):
                await restore(service, "c", priority="speculative")
            assert (await restored(service, "c")).state == "ready"
            with pytest.raises(NotFound):
                await get_restore(service, first.restore_id)
        assert (await stats(service)).restored["speculative dropped"] == 1


async def test_b44_a_thousand_cancelled_restores_of_both_priorities_leave_no_lease_and_no_hold():
    faults = Faults(MemoryStore())
    chains = await saved(faults, s=20)
    async with node(faults, prestage__inflight="20KiB") as service:
        for round_ in range(1000):
            priority = "speculative" if round_ % 3 else "interactive"
            started = await restore(service, "s", priority=priority, hold_ms=60_000)
            for _ in range(round_ % 41):
                await asyncio.sleep(0)
            ended = await cancel(service, started.restore_id)
            assert ended.state in {"cancelled", "ready"}
            found = await stats(service)
            assert (found.leases, found.restores) == (0, 0)
            if ended.state == "cancelled":
                assert found.held_bytes == 0
            else:
                assert found.held_bytes == ended.bytes
                assert await read(service, chains["s"]) == 20
        status = await restored(service, "s", priority="speculative")
        assert (status.state, (await stats(service)).held_bytes) == ("ready", status.bytes)
    assert service.plane.tiers(ME).dram.leases == 0


async def test_a_hold_ends_with_its_first_use_or_its_time():
    faults = Faults(MemoryStore())
    chains = await saved(faults, s=10, t=10)
    async with node(faults, clock=(clock := HandClock())) as service:
        one = await restored(service, "s")
        two = await restored(service, "t", hold_ms=20_000)
        assert (await stats(service)).held_bytes == one.bytes + two.bytes
        assert await read(service, chains["s"][:5]) == 5
        assert (await stats(service)).held_bytes == one.bytes // 2 + two.bytes
        clock._monotonic += 6  # prestage.hold is 5 s
        assert (await stats(service)).held_bytes == two.bytes
        await restored(service, "t", hold_ms=0)
        assert (await stats(service)).held_bytes == 0
        assert in_memory(service, chains["t"]) == 10


async def test_a_restore_to_disk_takes_no_more_memory_than_a_step(tmp_path):
    faults = Faults(MemoryStore())
    chains = await saved(faults, s=300)
    async with node(faults, tmp_path, dram__size="1MiB") as service:  # the session has more than twice that
        status = await restored(service, "s", tier="nvme")
        assert (status.state, status.staged_tokens) == ("ready", 300 * 16)
        before = len(faults.requests)
        assert await read(service, chains["s"][:80]) == 80
        assert len(faults.requests) == before
        assert (await stats(service)).leases == 0


async def test_lateness_is_what_was_missing_at_the_deadline():
    faults = Faults(MemoryStore())
    await saved(faults, s=30)
    async with node(faults) as service:
        assert (await restored(service, "s", deadline_ms=20_000)).late_ms == 0.0
    async with node(faults) as service:
        faults.script += [Fault(action="slow", verb="get", key="*blocks/*", skip=10, times=1000, seconds=0.5)]
        status = await restored(service, "s", deadline_ms=300)
        assert status.state == "partial"
        assert status.late_ms > 0
        assert (await restored(service, "s", hold_ms=1)).late_ms is None
        found = (await stats(service)).lateness["interactive"]
        assert (sum(found.counts), found.counts[0]) == (1, 0)
        assert found.total_s == pytest.approx(status.late_ms / 1000)


async def test_a_restore_that_is_remembered_takes_no_memory_for_its_prompt():
    store = MemoryStore()
    await saved(store, s=2)
    async with node(store) as service:
        await restored(service, "s", tokens=list(range(1000)))
        tracemalloc.start()
        try:
            for first in range(4):
                await restored(service, "s", tokens=list(range(first, first + 100_000)))
            await asyncio.sleep(0)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"tier": "device"}, Unsupported, "engine's own process"),
        ({"tier": "nvme"}, Unsupported, "nvme"),
        ({"max_bytes": -1}, Invalid, "max_bytes"),
        ({"hold_ms": -1}, Invalid, "hold_ms"),
        ({"hold_ms": 10**9}, Invalid, "hold_ms"),
        ({"deadline_ms": -1}, Invalid, "deadline_ms"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(fields, error, word):
    async with node(MemoryStore()) as service:
        with pytest.raises(error, match=word):
            await restore(service, "s", **fields)
