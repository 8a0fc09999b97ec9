"""What was published lands behind the writer's back: copied first, digested when the burst is over, waited for by who asks."""

import asyncio
import threading

import pytest

from kvstore.service.landing import Landing
from tiering import Movers


class Place:
    def __init__(self, nbytes, log):
        self.payload, self._log = memoryview(bytearray(nbytes)), log
        self.fails = False

    async def publish(self):
        if self.fails:
            raise OSError("no")
        self._log.append(("sealed", bytes(self.payload[:1])))
        return True

    def abort(self):
        self._log.append(("aborted", b""))


@pytest.fixture
async def movers():
    async with Movers.open(2) as movers:
        yield movers


def take(landing, log, byte, nbytes=4096, tenant="a", fails=False, broken=False, soon=False):
    place = Place(nbytes, log)
    place.fails = fails

    def copy():
        if broken:
            raise OSError("gone")
        place.payload[:] = bytes([byte]) * nbytes

    landing.take(tenant, [place], [copy], lambda: log.append(("copied", bytes([byte]))), soon=soon)
    return place


async def test_a_burst_is_copied_before_any_of_it_is_digested(movers):
    landing, log = Landing(movers, 1 << 20), []
    for byte in range(20):
        take(landing, log, byte)
    await landing.aclose()
    kinds = [kind for kind, _ in log]
    assert kinds == ["copied"] * 20 + ["sealed"] * 20
    assert [byte for kind, byte in log if kind == "sealed"] == [bytes([byte]) for byte in range(20)]


async def test_digests_hold_writers_up_when_too_much_is_not_digested(movers):
    landing, log = Landing(movers, 4096), []
    for byte in range(3):
        take(landing, log, byte, nbytes=8 << 20)
    await landing.aclose()
    assert [kind for kind, _ in log] == ["copied", "sealed"] * 3


async def test_without_anybody_asking_it_lands_all_the_same(movers):
    landing, log = Landing(movers, 1 << 20), []
    take(landing, log, 1)
    assert landing.pending("a")
    assert not landing.pending("b")
    for _ in range(200):
        await asyncio.sleep(0.01)
        if not landing.pending("a"):
            break
    assert [kind for kind, _ in log] == ["copied", "sealed"]


async def test_a_wait_ends_at_its_deadline_and_the_work_goes_on(movers):
    landing, log, go = Landing(movers, 1 << 20), [], threading.Event()
    place = Place(1, log)
    landing.take("a", [place], [go.wait], lambda: None)
    await landing.settled("a", 0.01)
    assert landing.pending("a")
    await landing.settled("b")
    go.set()
    await landing.settled("a")
    assert log == [("sealed", b"\0")]


async def test_what_cannot_be_copied_or_digested_is_dropped_alone(movers, caplog):
    landing, log = Landing(movers, 1 << 20), []
    take(landing, log, 1, broken=True)
    await landing.settled("a")
    take(landing, log, 2, fails=True)
    take(landing, log, 3)
    await landing.aclose()
    assert log == [("aborted", b""), ("copied", b"\1"), ("copied", b"\2"), ("copied", b"\3"), ("sealed", b"\3")]
    assert not landing.pending("a")
    assert caplog.text.count("could not be copied") == 1
    assert caplog.text.count("was dropped") == 1


async def test_a_burst_is_copied_when_it_is_over_unless_its_source_runs_out_of_room(movers):
    landing, log = Landing(movers, 1 << 20), []
    take(landing, log, 1)
    await asyncio.sleep(0)
    assert not landing.copying
    take(landing, log, 2, soon=True)
    take(landing, log, 3)
    await asyncio.sleep(0)
    assert landing.copying  # what is due, in one visit to a thread
    await landing.settled("a")
    assert not landing.copying
    assert [kind for kind, _ in log] == ["copied"] * 3 + ["sealed"] * 3


async def test_a_block_that_is_copied_in_parts_is_free_when_the_last_part_is_over_though_one_failed(movers):
    landing, log, go = Landing(movers, 1 << 20), [], threading.Event()

    def broken():
        raise OSError("gone")

    landing.take("a", [Place(1, log)], [broken, go.wait], lambda: log.append(("copied", go.is_set())))
    waiting = asyncio.create_task(landing.settled("a"))
    await asyncio.sleep(0.05)
    assert log == []
    go.set()
    await waiting
    assert sorted(log) == [("aborted", b""), ("copied", True)]


async def test_what_has_not_landed_is_counted_until_it_has(movers):
    landing, log = Landing(movers, 1 << 20), []
    take(landing, log, 1, nbytes=100)
    take(landing, log, 2, nbytes=50, tenant="b")
    assert (landing.queued("a"), landing.queued("b"), landing.queued("c")) == (100, 50, 0)
    await landing.settled("a")
    await landing.aclose()
    assert (landing.queued("a"), landing.queued("b")) == (0, 0)


async def test_a_flood_of_puts_delays_another_tenant_s_by_a_visit_to_the_threads_and_not_by_all_of_it(movers, monkeypatch):
    monkeypatch.setattr("kvstore.service.landing._BATCH", 8 << 10)
    landing, log, go = Landing(movers, 1 << 30), [], threading.Event()
    late, flood = 200, 64
    landing.take("flood", [Place(1, log)], [go.wait], lambda: None, soon=True)  # a thread has it
    for byte in range(flood):
        take(landing, log, byte, nbytes=1 << 10, tenant="flood")
    take(landing, log, late, nbytes=1 << 10, tenant="late")
    waiting = asyncio.create_task(landing.settled("late"))
    await asyncio.sleep(0)
    go.set()
    await waiting
    before = log[: log.index(("sealed", bytes([late])))]
    assert sum(kind == "copied" for kind, _ in before) <= 1 + 3 * 8  # eight a visit: the one with it, and one before and after
    assert sum(kind == "sealed" for kind, _ in before) <= 3
    await landing.aclose()
    assert len(log) == 2 * (flood + 1) + 1


async def test_what_is_due_of_one_tenant_is_copied_though_another_has_its_turns(movers, monkeypatch):
    monkeypatch.setattr("kvstore.service.landing._BATCH", 8 << 10)
    landing, log, done = Landing(movers, 1 << 30), [], asyncio.Event()
    for byte in range(2):
        take(landing, log, byte, nbytes=8 << 10, tenant="a")
    landing.take("a", [Place(1, log)], [lambda: None], done.set, soon=True)
    for byte in range(2, 5):
        take(landing, log, byte, nbytes=8 << 10, tenant="b")
    landing._taken = float("inf")  # the burst does not end
    async with asyncio.timeout(60):
        await done.wait()
    assert not landing._due
    landing._taken = 0.0
    await landing.aclose()


async def test_of_a_batch_only_those_are_dropped_that_could_not_be_copied(movers, caplog):
    landing, log = Landing(movers, 1 << 20), []
    take(landing, log, 1, tenant="a")
    take(landing, log, 2, tenant="b", broken=True)
    take(landing, log, 3, tenant="a")
    await landing.aclose()
    assert sorted(log) == [("aborted", b""), *[("copied", bytes([n])) for n in (1, 2, 3)], ("sealed", b"\1"), ("sealed", b"\3")]
    assert caplog.text.count("could not be copied") == 1
    assert (landing.queued("a"), landing.pending("b"), landing._unsealed) == (0, False, 0)


async def test_what_others_have_on_their_way_is_not_looked_at_for_who_has_nothing(movers):
    landing = Landing(movers, 1 << 20)
    looked = []

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            looked.append(other)
            return str.__eq__(self, other)

    for byte in range(50):
        take(landing, [], byte, tenant=Name("flood"))
    looked.clear()
    assert not landing.pending("b")
    assert landing.queued("b") == 0
    await landing.settled("b")
    assert len(looked) < 50
    await landing.aclose()
