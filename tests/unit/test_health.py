"""What is degraded: dated trouble, faults that waiting does not mend, and tasks that fail one by one."""

import asyncio

import pytest
from fakes.clock import HandClock, turns

from kvstore.api import CollectorStats
from kvstore.clock import SeededIds
from kvstore.errors import Denied, NotFound, Unavailable
from kvstore.lifecycle.health import Health, Lately, StoreFaults, collector_reason, skew_reason
from kvstore.service.supervisor import Supervisor


def test_parts_that_are_set_and_parts_that_are_asked_come_together():
    parts = {"bucket": "slow"}
    health = Health(parts)
    reasons = {"breaker": "", "disk": "EIO"}
    health.ask("breaker", lambda: reasons["breaker"])
    health.ask("nvme", lambda: reasons["disk"])
    health.ask("bucket", lambda: "access_denied: no")
    assert health.degraded() == {"bucket": "slow; access_denied: no", "nvme": "EIO"}
    parts.clear()
    reasons.update(breaker="open", disk="")
    assert health.degraded() == {"bucket": "access_denied: no", "breaker": "open"}


async def test_trouble_is_news_for_a_minute_after_it_grew():
    clock, counts = HandClock(), [5]
    lately = Lately(lambda: counts[0], clock, lambda n: f"{n} drops")
    assert lately() == "5 drops"
    await clock.advance(59)
    counts[0] = 7
    assert lately() == "7 drops"
    await clock.advance(59)
    assert lately() == "7 drops"
    await clock.advance(2)
    assert lately() == ""
    counts[0] = 8
    assert lately() == "1 drops"


async def test_trouble_is_dated_also_while_nobody_asks():
    clock, counts = HandClock(), [0]
    health = Health({})
    health.ask("write_queue", Lately(lambda: counts[0], clock, lambda n: f"{n} drops"))
    watching = asyncio.create_task(health.watch(clock))
    await clock.advance(100)
    counts[0] = 3
    await clock.advance(100)  # nobody looked
    assert health.degraded() == {}
    counts[0] = 4
    await clock.advance(11)
    assert health.degraded() == {"write_queue": "1 drops"}
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_b50_faults_are_named_by_kind_until_an_answer_disproves_them():
    clock = HandClock()
    faults = StoreFaults(clock)
    for error in (
        Denied("GET: 403", kind="bad_credentials"),
        Unavailable("GET: skewed", kind="clock_skew"),
        Denied("HEAD: 403", kind="access_denied"),
        Unavailable("GET: 404", kind="no_bucket"),
    ):
        faults.saw(error)
    assert faults() == "bad_credentials: GET: 403; clock_skew: GET: skewed; access_denied: HEAD: 403; no_bucket: GET: 404"
    faults.saw(None)
    assert faults() == "access_denied: HEAD: 403"  # other keys and verbs may still be forbidden
    await clock.advance(301)
    assert faults() == ""


@pytest.mark.parametrize(
    "error", [Unavailable("x"), Unavailable("x", kind="timeout"), Unavailable("x", kind="store_busy"), NotFound("x")]
)
def test_what_waiting_mends_is_no_fault(error):
    faults = StoreFaults(HandClock())
    faults.saw(error)
    assert faults() == ""


@pytest.mark.parametrize(("seconds", "word"), [(301, "behind"), (-301, "ahead of"), (299, ""), (-299, "")])
def test_b43_clocks_five_minutes_apart_are_named(seconds, word):
    assert (word in skew_reason(seconds)) if word else skew_reason(seconds) == ""


def test_a_collector_that_fails_or_is_late_is_named():
    assert collector_reason(CollectorStats(late_s=50), 100) == ""
    assert collector_reason(CollectorStats(late_s=150), 100) == "a collection is 150 s overdue"
    assert collector_reason(CollectorStats(late_s=150), 0) == ""
    assert "clock_skew" in collector_reason(CollectorStats(error="clock_skew: an hour"), 0)


async def test_one_task_that_fails_never_stops_the_others_and_is_counted():
    clock, ran = HandClock(), []
    background = Supervisor(clock, SeededIds(1))

    async def failing():
        ran.append("failing")
        raise RuntimeError("a defect")

    async def steady():
        while True:
            ran.append("steady")
            await clock.sleep(10)

    async def once():
        ran.append("once")

    for work in (failing, steady, once):
        background.run(work.__name__, work)
    await turns()
    assert ran == ["failing", "steady", "once"]
    await clock.advance(100)
    assert ran.count("steady") == 11
    assert ran.count("once") == 1
    assert 5 <= ran.count("failing") <= 8  # 1, 2, 4, 8, 16, 32 s and so on, each jittered
    assert background.restarts == {"failing": ran.count("failing")}
    await background.aclose()
    assert clock.sleepers == 0


async def test_a_task_that_ran_well_for_long_is_started_again_soon():
    clock, starts = HandClock(), []
    background = Supervisor(clock, SeededIds(1))

    async def work():
        starts.append(clock.monotonic())
        await clock.sleep(0 if len(starts) < 8 else 1000)
        raise RuntimeError("a defect")

    background.run("work", work)
    await clock.advance(3000)
    assert len(starts) >= 9
    assert starts[7] - starts[6] > 20  # it had failed again and again
    assert starts[8] - starts[7] < 1002
    await background.aclose()
