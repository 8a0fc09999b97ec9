"""Requests per operation, as docs/ordering.md prices them (besides block bytes)."""

from collections import Counter

import pytest

from kvstore.clock import SeededIds, VirtualClock
from kvstore.lifecycle.collector import collect
from kvstore.objects import Faults, MemoryStore
from kvstore.repo.testing import Shelf, commit, opened, tiny

NS = tiny()


class Meter:
    """A store's request log, read and cleared."""

    def __init__(self, memory: MemoryStore, clock: VirtualClock) -> None:
        self.store = Faults(memory, clock=clock)

    def spent(self, *, blocks: bool = False) -> dict[str, int]:
        """Requests since the last look, those for blocks only when asked."""
        log, self.store.requests = self.store.requests, []
        return dict(Counter(entry.verb for entry in log if ("/blocks/" in entry.key) == blocks))

    def outcomes(self) -> list[tuple[str, str, str]]:
        log, self.store.requests = self.store.requests, []
        return [
            (entry.verb, entry.key.split("/")[1] if entry.key else "", entry.outcome)
            for entry in log
            if "/blocks/" not in entry.key
        ]


@pytest.fixture
def meter(memory, clock):
    return Meter(memory, clock)


@pytest.fixture
async def repo(meter, clock):
    async with opened(meter.store, clock) as repo:
        await repo.put_namespace(NS)
        meter.outcomes()
        yield repo


async def test_create_costs_4_put_2_get(repo, meter):
    await commit(repo, Shelf(), "s", range(8), 0, NS)
    assert meter.outcomes() == [
        ("get", "names", "Absent"),
        ("put", "heads", "ok"),  # empty and open, before anything is added (R3)
        ("get", "epoch", "ok"),
        ("put", "manifests", "ok"),
        ("put", "heads", "ok"),
        ("put", "names", "ok"),  # never before its branch
    ]


async def test_create_empty_costs_4_put_2_get(repo, meter):
    await repo.sessions.create("default", "s", NS, ttl=60, labels={"a": "b"})
    assert meter.spent() == {"get": 2, "put": 4}


async def test_a_warm_commit_costs_2_put_and_2_head_for_the_first_block_it_misses(repo, meter):
    shelf = Shelf()
    await commit(repo, shelf, "s", range(8), 0, NS)
    meter.outcomes()
    for base in range(1, 6):
        await commit(repo, shelf, "s", range(8 + 12 * base), base, NS)
        assert meter.outcomes() == [("put", "manifests", "ok"), ("put", "heads", "ok")]
    await commit(repo, shelf, "s", range(100), 6, NS)
    assert meter.spent(blocks=True) == {"head": 1, "put": 8}  # epoch 1 has no generation before it


async def test_probing_stops_at_the_first_miss(memory, meter, clock, repo):
    reading = await repo.epochs.read()
    await repo.epochs.advance(reading)
    shelf = Shelf()
    await commit(repo, shelf, "s", range(400), 0, NS)
    assert meter.spent(blocks=True) == {"head": 2, "put": 100}
    async with opened(meter.store, clock, SeededIds(2)) as other:
        await commit(other, shelf, "t", range(400), 0, NS)  # another node, which knows nothing: it reuses all 100
        assert meter.spent(blocks=True) == {"head": 100}
        await commit(other, shelf, "t", range(404), 1, NS)
        assert meter.spent(blocks=True) == {"head": 2, "put": 1}


async def test_after_a_collection_a_commit_costs_1_put_2_get_more(repo, meter):
    shelf = Shelf()
    await commit(repo, shelf, "s", range(8), 0, NS)
    await collect(repo)
    repo.families._idle.clear()
    meter.outcomes()
    await commit(repo, shelf, "s", range(12), 1, NS)
    assert meter.outcomes() == [
        ("get", "heads", "Unchanged"),
        ("put", "heads", "ok"),  # opened by a swap of its own (R3)
        ("get", "epoch", "ok"),  # after the head (R2)
        ("put", "manifests", "ok"),
        ("put", "heads", "ok"),
    ]


async def test_a_collection_in_between_is_found_out_by_the_swap(repo, memory, meter, clock):
    shelf = Shelf()
    await commit(repo, shelf, "s", range(8), 0, NS)
    async with opened(memory, clock, SeededIds(2)) as other:
        await collect(other)
    meter.outcomes()
    await commit(repo, shelf, "s", range(12), 1, NS)
    assert [entry for entry in meter.outcomes() if entry[1] == "heads"] == [
        ("put", "heads", "Refused"),
        ("get", "heads", "ok"),
        ("put", "heads", "ok"),
        ("put", "heads", "ok"),
    ]


async def test_from_another_node_a_commit_reads_name_head_epoch_and_manifest_once(repo, meter, clock):
    shelf = Shelf()
    await commit(repo, shelf, "s", range(8), 0, NS)
    async with opened(meter.store, clock, SeededIds(2)) as other:
        await other.put_namespace(NS)
        meter.outcomes()
        await commit(other, shelf, "s", range(12), 1, NS, lane="main")
        assert meter.outcomes() == [
            ("get", "names", "ok"),
            ("get", "heads", "ok"),
            ("get", "manifests", "ok"),
            ("get", "epoch", "ok"),
            ("put", "manifests", "ok"),
            ("put", "heads", "ok"),
        ]
    async with opened(meter.store, clock, SeededIds(3)) as third:
        await third.put_namespace(NS)
        meter.outcomes()
        await commit(third, shelf, "s", range(16), 2, NS)  # finding the lane reads nothing twice
        assert meter.spent() == {"get": 4, "put": 2}


async def test_fork_costs_2_put_2_get_and_moves_no_blocks(repo, meter, clock):
    await commit(repo, Shelf(), "s", range(8), 0, NS)
    async with opened(meter.store, clock, SeededIds(2)) as other:
        await other.epochs.read()
        meter.outcomes()
        await other.sessions.fork("default", "s", NS.id, "main", "t")
        spent = meter.outcomes()
    # The answer also says how many tokens it holds: the manifest, read once by a node that does not know it.
    assert [entry for entry in spent if entry[1] != "manifests"] == [
        ("get", "names", "ok"),
        ("get", "heads", "ok"),
        ("put", "heads", "ok"),
        ("put", "names", "ok"),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.touch("default", "s", NS.id, "main", ttl=99),
        lambda s: s.pin("default", "s", NS.id, "main"),
        lambda s: s.rewind("default", "s", NS.id, "main", tokens=4),
        lambda s: s.delete("default", "s", NS.id, "main"),
    ],
)
async def test_a_change_costs_1_put_and_at_most_2_get(repo, meter, clock, change):
    shelf = Shelf()
    await commit(repo, shelf, "s", range(8), 0, NS)
    async with opened(meter.store, clock, SeededIds(2)) as other:
        meter.outcomes()
        await change(other.sessions)
        spent = [entry for entry in meter.outcomes() if entry[1] != "manifests"]
        assert spent == [("get", "names", "ok"), ("get", "heads", "ok"), ("put", "heads", "ok")]


async def test_resume_costs_3_get_cold_and_1_conditional_get_warm(repo, meter, clock):
    await commit(repo, Shelf(), "s", range(8), 0, NS)
    async with opened(meter.store, clock, SeededIds(2)) as other:
        meter.outcomes()
        await other.sessions.resolve("default", "s", NS.id, "main")
        assert meter.outcomes() == [("get", "names", "ok"), ("get", "heads", "ok"), ("get", "manifests", "ok")]
        # The name means its branch for as long as that lives, and a manifest never changes: the head alone can have moved.
        await other.sessions.resolve("default", "s", NS.id, "main")
        assert meter.outcomes() == [("get", "heads", "Unchanged")]


async def test_resume_with_half_of_the_time_over_costs_1_put_more(repo, meter, clock):
    await commit(repo, Shelf(), "s", range(8), 0, NS, ttl=100)
    clock.advance(49)
    meter.outcomes()
    assert (await repo.sessions.resolve("default", "s", NS.id, "main"))[0].expires == clock.now() + 51
    assert meter.outcomes() == [("get", "heads", "Unchanged")]
    clock.advance(2)
    assert (await repo.sessions.resolve("default", "s", NS.id, "main"))[0].expires == clock.now() + 100
    assert meter.outcomes() == [("get", "heads", "Unchanged"), ("put", "heads", "ok")]


async def test_idle_heads_cost_a_collection_only_its_listings(repo, meter):
    shelf = Shelf()
    for index in range(5):
        await commit(repo, shelf, f"s{index}", range(8), 0, NS)
    await collect(repo)
    meter.outcomes()
    await collect(repo)
    spent = meter.outcomes()
    assert [entry for entry in spent if entry[1] == "heads"] == [("list", "heads", "ok")]
    assert not [entry for entry in spent if entry[0] == "put" and entry[1] != "hints"]


async def test_a_collector_that_knows_nothing_reads_each_head_and_manifest_once(repo, meter, clock):
    shelf = Shelf()
    for index in range(5):
        await commit(repo, shelf, f"s{index}", range(8), 0, NS)
    async with opened(meter.store, clock, SeededIds(2)) as other:
        meter.outcomes()
        await collect(other)
        spent = Counter((verb, kind) for verb, kind, _ in meter.outcomes())
        assert spent["get", "heads"] == spent["put", "heads"] == spent["get", "manifests"] == 5
        await collect(other)
        assert Counter((verb, kind) for verb, kind, _ in meter.outcomes())["get", "heads"] == 0
