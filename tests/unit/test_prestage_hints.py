"""Hints: what is held, staged, staged for later, and let go; how many are followed."""

import asyncio

import pytest
from fakes.clock import HandClock
from fakes.service import ME, hint, in_memory, node, read, restored, saved, stats

from kvstore import api
from kvstore.errors import Invalid
from kvstore.objects import Fault, Faults, MemoryStore


async def until(condition):
    for _ in range(2000):
        if await condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came true")


def held(service, nbytes):
    async def look():
        return (await stats(service)).held_bytes == nbytes

    return look


async def test_tool_start_holds_a_session_under_pressure_and_tool_return_stages_it():
    faults = Faults(MemoryStore())
    chains = await saved(faults, agent=40, others=160)
    async with node(faults, dram__size="2MiB", clock=(clock := HandClock())) as service:
        assert await read(service, chains["agent"]) == 40
        assert (await hint(service, "agent", "tool_start")).taken
        size = (await restored(service, "agent", tier="bucket")).bytes
        await until(held(service, size))
        clock._monotonic += 61  # nobody used it for a minute, and still it stays
        assert await read(service, chains["others"][:120]) == 120
        assert in_memory(service, chains["agent"]) == 40
        assert await read(service, chains["others"]) == 160  # no room but theirs: it goes, from its end
        assert 0 < in_memory(service, chains["agent"]) < 40
        hinted = await hint(service, "agent", "tool_return")
        status = await service.call(ME, "get_restore", api.GetRestore(restore_id=hinted.restore_id, wait_ms=20_000))
        assert (status.state, status.priority) == ("ready", "interactive")
        before = len(faults.requests)
        assert await read(service, chains["agent"]) == 40
        assert len(faults.requests) == before
        found = (await stats(service)).hints
        assert found == {"tool_start": 1, "tool_return": 1, "scheduled": 0}


async def test_a_hold_for_a_tool_ends_in_time():
    faults = Faults(MemoryStore())
    chains = await saved(faults, agent=10)
    async with node(faults, clock=(clock := HandClock())) as service:
        assert await read(service, chains["agent"][:6]) == 6
        await hint(service, "agent", "tool_start")
        size = (await restored(service, "agent", tier="bucket")).bytes
        await until(held(service, size * 6 // 10))  # what is in memory; nothing is fetched for it
        clock._monotonic += 121
        assert (await stats(service)).held_bytes == 0


async def test_resume_at_stages_just_in_time_and_the_request_reads_nothing():
    faults = Faults(MemoryStore())
    chains = await saved(faults, agent=20)
    async with node(faults, clock=(clock := HandClock())) as service:

        async def planned():
            return any("manifests/" in log.key for log in faults.requests[before:])

        before = len(faults.requests)
        assert (await hint(service, "agent", "resume_at", in_s=600.0)).taken
        await until(planned)
        await clock.advance(0)
        assert (await stats(service)).hints == {"resume_at": 1, "scheduled": 1}
        for _ in range(5):
            await clock.advance(100)
        assert in_memory(service, chains["agent"]) == 0
        for _ in range(99):
            await clock.advance(1)

        async def staged():
            return (await stats(service)).restored == {"speculative ready": 1}

        await until(staged)  # a second before, and not ten
        found = await stats(service)
        assert found.hints == {"resume_at": 1, "scheduled": 0}
        assert found.lateness["speculative"].counts[0] == 1
        await clock.advance(4)
        before = len(faults.requests)
        assert await read(service, chains["agent"]) == 20
        assert len(faults.requests) == before


async def test_a_session_that_returns_early_is_not_staged_again_later():
    faults = Faults(MemoryStore())
    await saved(faults, agent=4)
    async with node(faults, clock=(clock := HandClock())) as service:
        await hint(service, "agent", "resume_at", at=clock.now() + 3600)
        await hint(service, "agent", "resume_at", at=clock.now() + 7200)  # the newest counts
        assert (await stats(service)).hints["scheduled"] == 1
        await hint(service, "agent", "tool_return")
        assert (await stats(service)).hints["scheduled"] == 0


async def test_final_makes_a_session_the_first_to_go_and_ends_what_was_planned_for_it():
    faults = Faults(MemoryStore())
    chains = await saved(faults, done=60, other=60, more=100)
    async with node(faults, dram__size="2MiB") as service:
        await restored(service, "done")
        await hint(service, "done", "tool_start")
        await hint(service, "done", "resume_at", in_s=600.0)
        assert await read(service, chains["other"]) == 60  # later than the session that is done
        assert (await hint(service, "done", "final")).taken
        await until(held(service, 0))
        assert await read(service, chains["more"]) == 100
        assert in_memory(service, chains["other"]) == 60
        assert in_memory(service, chains["done"]) < 20
        found = (await stats(service)).hints
        assert (found["final"], found["scheduled"]) == (1, 0)
        assert await read(service, chains["done"]) == 60  # the bucket has it all


async def test_a_promoted_restore_is_the_one_that_was_under_way():
    faults = Faults(MemoryStore())
    await saved(faults, agent=10)
    async with node(faults) as service:
        with service.plane.turns.request():
            started = await service.call(ME, "restore", api.Restore(id="agent", priority="speculative", deadline_ms=60_000))
            hinted = await hint(service, "agent", "tool_return")
            assert hinted.restore_id == started.restore_id
            status = await service.call(ME, "get_restore", api.GetRestore(restore_id=started.restore_id, wait_ms=20_000))
            assert (status.state, status.priority) == ("ready", "interactive")


async def test_hints_beyond_the_bound_are_dropped_and_failures_counted():
    faults = Faults(MemoryStore())
    await saved(faults, agent=2)
    async with node(faults, prestage__hints="2") as service:
        taken = [(await hint(service, f"agent {n}", "resume_at", in_s=600.0)).taken for n in range(3)]
        assert taken == [True, True, False]

        async def failed():
            return (await stats(service)).hints.get("failed") == 2

        await until(failed)  # there are no such sessions
        assert (await stats(service)).hints == {"resume_at": 3, "dropped": 1, "failed": 2, "scheduled": 0}
        assert (await hint(service, "agent", "resume_at", in_s=600.0)).taken


async def test_hints_that_are_followed_end_with_the_node():
    faults = Faults(MemoryStore())
    await saved(faults, agent=2)
    async with node(faults) as service:
        faults.script += [Fault(action="stall", verb="get", key="*", times=10)]
        for event in ("tool_start", "final"):
            assert (await hint(service, "agent", event)).taken
        assert (await hint(service, "agent", "resume_at", in_s=5.0)).taken
    faults.release.set()
    assert (await stats(service)).hints["scheduled"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"event": "resume_at"},
        {"event": "resume_at", "at": 1.0, "in_s": 1.0},
        {"event": "resume_at", "in_s": 1e9},
        {"event": "resume_at", "in_s": float("nan")},
        {"event": "tool_start", "in_s": 1.0},
        {"event": "final", "at": 1.0},
    ],
)
async def test_a_time_that_cannot_be_is_refused(fields):
    async with node(MemoryStore()) as service:
        with pytest.raises(Invalid, match="resume_at"):
            await hint(service, "agent", **fields)
        assert (await stats(service)).hints == {"scheduled": 0}
