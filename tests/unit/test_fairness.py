"""Turns among tenants: bounds are counted in items of work, never in time."""

import asyncio

from kvstore.errors import Overloaded
from kvstore.fairness import Lines, Shares
from kvstore.objects.gate import ByteGate
from kvstore.payer import Paying, payer

FLOOD = 10_000


def taken(lines, count):
    return [lines.take() for _ in range(count)]


def test_a_flood_delays_the_next_tenant_by_one_item():
    lines = Lines()
    for index in range(FLOOD):
        lines.put("flood", index)
    assert taken(lines, 5) == [0, 1, 2, 3, 4]
    lines.put("late", "first")
    lines.put("late", "second")
    order = taken(lines, 5)
    assert order.index("first") <= 1
    assert order.index("second") <= 3


def test_each_of_many_tenants_waits_for_one_item_of_every_other():
    lines, floods = Lines(), [f"flood-{n}" for n in range(7)]
    for name in floods:
        for index in range(100):
            lines.put(name, (name, index))
    taken(lines, 50)
    lines.put("late", "late")
    assert taken(lines, len(floods) + 1).count("late") == 1


def test_turns_are_shared_out_by_cost():
    lines = Lines()
    for index in range(100):
        lines.put("large", ("large", index), cost=8)
        lines.put("small", ("small", index), cost=1)
    first = taken(lines, 45)
    assert 4 <= sum(name == "large" for name, _ in first) <= 6  # as many bytes as the 40 small ones


def test_a_tenant_that_asked_for_nothing_has_saved_up_no_turns():
    lines = Lines()
    lines.put("busy", 0)
    lines.put("idle", 0)
    taken(lines, 2)
    for index in range(1000):
        lines.put("busy", index)
        lines.take()
    for index in range(20):
        lines.put("busy", ("busy", index))
        lines.put("idle", ("idle", index))
    assert sum(name == "idle" for name, _ in taken(lines, 20)) == 10


def test_within_a_tenant_the_least_rank_goes_first_and_then_who_came_first():
    lines = Lines()
    for item, rank in (("b", 2), ("a", 1), ("c", 2)):
        lines.put("one", item, rank=rank)
    assert lines.first() == "a"
    gone = "b"
    assert lines.remove(gone)
    assert not lines.remove(gone)
    assert taken(lines, 2) == ["a", "c"]
    assert not lines


async def test_at_the_gate_a_flood_delays_another_tenant_by_what_is_inside_and_one_item():
    gate, order = ByteGate(4, 60.0), []

    async def one(tenant, name):
        with Paying(tenant):
            async with gate.hold(1):
                order.append(name)
                await asyncio.sleep(0)

    flood = [asyncio.create_task(one("flood", index)) for index in range(1000)]
    await asyncio.sleep(0)
    assert len(order) == 4  # the gate is full, the others wait
    late = asyncio.create_task(one("late", "late"))
    await asyncio.gather(*flood, late)
    assert order.index("late") <= 4 + 4 + 1  # who was inside, whom they let in when they left, and one turn of the flood


async def test_who_gives_up_at_the_gate_leaves_its_line():
    gate = ByteGate(1, 0.0)
    await gate.take(1)
    try:
        await gate.take(1)
    except Overloaded:
        gate.give_back(1)
    assert gate.has_room(1)


async def test_work_is_done_for_whoever_asked_also_in_tasks_that_it_began():
    seen = []

    async def work():
        seen.append(payer())

    with Paying("a", "n"):
        inner = asyncio.create_task(work())
        with Paying("b"):
            await work()
        await work()
    await inner
    await work()
    assert [one.tenant for one in seen] == ["b", "a", "a", ""]
    assert seen[2].namespace == "n"


def test_a_tenant_alone_has_all_places_and_one_of_two_leaves_the_other_its_own():
    alone = Shares(8, 1)
    assert [alone.enter("a") for _ in range(9)] == [True] * 8 + [False]
    two = Shares(8, 2)
    assert [two.enter("a") for _ in range(7)] == [True] * 6 + [False]  # its own 2, and the 4 that are anybody's
    assert [two.enter("b") for _ in range(3)] == [True, True, False]
    two.leave("a")
    assert two.enter("b")
    two.leave("b")
    for _ in range(5):
        two.leave("a")
    two.leave("b")
    two.leave("b")
    assert [two.enter("b") for _ in range(7)] == [True] * 6 + [False]
