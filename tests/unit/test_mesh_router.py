"""Where a prompt goes, and why: by blocks, by load, by speed, and never by habit."""

import random  # noqa: TID251  seeded

import pytest

from kvstore.errors import Invalid
from kvstore.mesh import router as module
from kvstore.mesh.price import Speed, Speeds
from kvstore.mesh.router import Candidate, Prompt, Router

SPEEDS = Speeds(3e-5, 1e-9, Speed(1e-4, 4e10), Speed(1e-3, 6e9), Speed(1e-3, 1e10), Speed(5e-2, 2e9))


class World:
    def __init__(self, engines=4, seed=1, **candidate):
        self.now = 100.0
        self.router = Router(lambda: self.now, random.Random(seed).random)
        for number in range(engines):
            self.router.join(Candidate(f"e{number}", f"n{number}", **candidate), SPEEDS)

    def best(self, prompt):
        return self.router.rank(prompt)[0]

    def of(self, name, prompt):
        return next(one for one in self.router.rank(prompt) if one.candidate == name)

    def route(self, prompt):
        best = self.best(prompt)
        return best.candidate, self.router.chosen(prompt, best)


@pytest.fixture
def world():
    return World()


def prompt(session, blocks=32, tokens=None):
    keys = [session.to_bytes(4, "big") + at.to_bytes(4, "big") + bytes(24) for at in range(blocks)]
    return Prompt(keys, tokens or blocks * 256, 256, 131_072)


def test_a_session_returns_to_where_its_blocks_are(world):
    for session in range(20):
        name, ticket = world.route(prompt(session, 30))
        world.now += 1
        world.router.answered(ticket)
        best = world.best(prompt(session, 32))
        assert best.candidate == name
        assert best.tokens.dram == 30 * 256


def test_it_goes_elsewhere_when_waiting_costs_more_than_computing(world):
    name, _ = world.route(prompt(1))
    world.router.queued(name, 60.0)
    best = world.best(prompt(1))
    assert best.candidate != name
    assert world.of(name, prompt(1)).queue_ms == pytest.approx(60_000)


def test_a_node_that_clears_its_cache_scores_nothing_at_the_next_request(world):
    name, ticket = world.route(prompt(1))
    world.router.answered(ticket)
    world.router.node_has(name.replace("e", "n"), prompt(1).keys)
    assert world.of(name, prompt(1)).split > 0
    world.router.node_cleared(name.replace("e", "n"))
    assert world.of(name, prompt(1)).split == 0
    world.router.node_has(name.replace("e", "n"), prompt(1).keys[:8])  # and is believed again
    assert world.of(name, prompt(1)).tokens.dram == 8 * 256


def test_an_engine_that_clears_its_own_cache_still_has_its_node(world):
    world.router.engine_has("e1", prompt(1).keys)
    world.router.node_has("n1", prompt(1).keys[:16])
    assert world.of("e1", prompt(1)).tokens.gpu == 32 * 256 - 1
    world.router.engine_cleared("e1")
    found = world.of("e1", prompt(1)).tokens
    assert (found.gpu, found.dram) == (0, 16 * 256)


def test_events_take_back_what_routing_made_it_believe(world):
    name, _ = world.route(prompt(1))
    world.router.node_lost(name.replace("e", "n"), prompt(1).keys[4:])
    assert world.of(name, prompt(1)).tokens.dram == 4 * 256


def test_what_one_node_has_others_load_from_it(world):
    world.router.node_has("n2", prompt(1).keys)
    assert world.of("e2", prompt(1)).tokens.peer == 0
    assert world.of("e0", prompt(1)).tokens.peer == 32 * 256 - 1
    alone = World(shares=False)
    alone.router.node_has("n2", prompt(1).keys)
    assert alone.of("e0", prompt(1)).split == 0


def test_what_is_only_on_its_way_is_of_no_use_to_peers(world):
    name, _ = world.route(prompt(1))
    assert all(one.split == 0 for one in world.router.rank(prompt(1)) if one.candidate != name)


def test_engines_of_one_node_share_its_memory_but_not_their_caches():
    world = World(engines=0)
    for engine in ("a", "b"):
        world.router.join(Candidate(engine, "n"), SPEEDS)
    world.router.node_has("n", prompt(1).keys[:4])
    world.router.engine_has("a", prompt(1).keys[:8])
    assert world.of("b", prompt(1)).tokens.dram == 4 * 256
    assert world.of("a", prompt(1)).tokens.gpu == 8 * 256
    world.router.leave("a")
    assert world.of("b", prompt(1)).tokens.dram == 4 * 256
    world.router.leave("b")
    world.router.join(Candidate("b", "n"), SPEEDS)
    assert world.of("b", prompt(1)).split == 0


def test_the_disk_and_the_bucket_are_priced_as_such(world):
    slow = Speeds(1e-3, 0.0, SPEEDS.dram, SPEEDS.nvme, SPEEDS.peer, SPEEDS.bucket)
    world.router.join(Candidate("e0", "n0", shares=False), slow)
    world.router.node_has("n0", prompt(1).keys[:8], disk=True)
    world.router.bucket_has(prompt(1).keys[:16])
    found = world.of("e0", prompt(1)).tokens
    assert (found.nvme, found.bucket) == (8 * 256, 8 * 256)
    world.router.bucket_lost(prompt(1).keys[:16])
    assert world.of("e0", prompt(1)).tokens.bucket == 0


def test_work_decays_with_time_and_is_corrected_by_answers(world):
    tickets = [world.router.chosen(prompt(at), world.of("e0", prompt(at))) for at in (1, 2, 3)]
    each = world.of("e0", prompt(9)).compute_ms
    assert world.of("e0", prompt(9)).queue_ms == pytest.approx(3 * each)
    world.now += each / 1e3
    assert world.of("e0", prompt(9)).queue_ms == pytest.approx(2 * each)
    world.router.answered(tickets[1])  # sooner than thought, and so was the first
    assert world.of("e0", prompt(9)).queue_ms == pytest.approx(each)
    world.router.answered(tickets[0])
    assert world.of("e0", prompt(9)).queue_ms == pytest.approx(each)
    world.now += 1000
    assert world.of("e0", prompt(9)).queue_ms == 0


def test_load_is_shared_among_equals(world):
    names = [world.route(prompt(session, 4))[0] for session in range(400)]
    assert max(map(names.count, names)) <= 110


def test_routers_that_know_the_same_do_not_all_choose_the_same():
    names = {World(seed=seed).best(prompt(1)).candidate for seed in range(40)}
    assert len(names) == 4


def test_it_is_deterministic():
    runs = []
    for _ in range(2):
        world = World(seed=5)
        runs.append([world.router.rank(prompt(session % 7, 3 + session)) for session in range(30)])
        assert world.router.rank(prompt(1)) is not None
    assert runs[0] == runs[1]


def test_it_learns_how_fast_each_is(world):
    for _ in range(3):
        world.router.observe_compute("e1", 0, 10_000, 3.0)
        world.router.observe_load("e2", "dram", 1 << 30, 10.0)
    assert world.of("e1", prompt(1)).compute_ms == pytest.approx(32 * 256 * 0.3, rel=0.05)
    world.router.node_has("n2", prompt(1).keys)
    assert world.of("e2", prompt(1)).tokens.dram == 0


def test_who_left_is_not_asked_and_what_is_said_of_it_is_ignored(world):
    _, ticket = world.route(prompt(1))
    for number in range(4):
        world.router.leave(f"e{number}")
    assert world.router.rank(prompt(1)) == []
    world.router.answered(ticket)
    world.router.queued("e0", 1.0)
    world.router.node_has("n0", prompt(1).keys)
    world.router.observe_load("e0", "dram", 1, 1.0)
    world.router.engine_cleared("e0")
    world.router.node_cleared("n0")


def test_only_so_many_are_ranked_and_told(world, monkeypatch):
    assert len(world.router.rank(prompt(1), most=2)) == 2
    monkeypatch.setattr(module, "MOST_CANDIDATES", 4)
    with pytest.raises(Invalid):
        world.router.join(Candidate("e9", "n9"), SPEEDS)
    world.router.join(Candidate("e3", "n3"), SPEEDS)  # the same one anew


def test_requests_that_are_never_answered_are_bounded(world, monkeypatch):
    monkeypatch.setattr(module, "_UNFINISHED", 3)
    tickets = [world.router.chosen(prompt(at), world.of("e0", prompt(at))) for at in range(9)]
    each = world.of("e0", prompt(99)).compute_ms
    world.router.answered(tickets[0])  # forgotten
    assert world.of("e0", prompt(99)).queue_ms == pytest.approx(9 * each)
    world.router.answered(tickets[7])
    assert world.of("e0", prompt(99)).queue_ms == pytest.approx(each)


@pytest.mark.parametrize(
    "wrong",
    [
        Prompt([], 0, 256, 1),
        Prompt([], 1 << 30, 256, 1),
        Prompt([], 1, 0, 1),
        Prompt([bytes(32)] * 2, 256, 256, 1),
        Prompt([b"short"], 256, 256, 1),
    ],
)
def test_a_wrong_prompt_is_refused(world, wrong):
    with pytest.raises(Invalid):
        world.router.rank(wrong)
