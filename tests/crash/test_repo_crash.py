"""A node dies at every request of every operation, before it and after it, and is opened again on the same store.

Each time: every acknowledged version is there, what was not acknowledged happened wholly or not at all, fsck is clean, life goes
on, and collections take nothing that anybody needs.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable

import pytest

from kvstore import codec
from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import AlreadyExists, Conflict, Gone, NotFound
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle.collector import collect
from kvstore.objects import Crash, Fault, Faults, MemoryStore
from kvstore.repo import want
from kvstore.repo.edits import find_version
from kvstore.repo.fsck import fsck
from kvstore.repo.testing import Shelf, bodies, broken, commit, opened, tiny

NS = tiny()
TWO = ("t0of2.p0of1.g0", "t1of2.p0of1.g0")
State = tuple[int, tuple[int, ...]] | None  # (version, tokens), or no such session


class World:
    """A node at work, and what must be true of the store whenever it stops."""

    def __init__(self, repo, shelf: Shelf, truth: dict[str, State]) -> None:
        self.repo, self.shelf = repo, shelf
        self.maybe: dict[str, set[State]] = defaultdict(lambda: {None}, {name: {state} for name, state in truth.items()})
        self.kept: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)  # acknowledged here: restorable from now on

    async def will(self, session: str, state: State, work: Awaitable) -> None:
        """Do something that ends in `state`; until it is acknowledged, either may be."""
        self.maybe[session].add(state)
        await work
        self.maybe[session] = {state}
        if state is None:
            self.kept.pop(session, None)
        elif state[0]:  # version 0 is empty: there is nothing to go back to
            self.kept[session][state[0]] = state[1]

    async def commit(self, session: str, tokens, base: int, **fields) -> None:
        await self.will(
            session, (base + 1, tuple(tokens)), commit(self.repo, self.shelf, session, list(tokens), base, NS, **fields)
        )


async def _create(world: World) -> None:
    await world.commit("new", range(12), 0)
    await world.commit("new", range(20), 1)


async def _create_empty(world: World) -> None:
    await world.will("empty", (0, ()), world.repo.sessions.create("default", "empty", NS, ttl=0, labels={"a": "b"}))
    await world.commit("empty", range(8), 0)


async def _create_under_a_dangling_name(world: World) -> None:
    await world.commit("gone", range(40, 52), 0)


async def _commit_into_a_sealed_head(world: World) -> None:
    await world.commit("a", range(24), 2)
    await world.commit("a", range(26), 3)
    await world.commit("a", range(28), 4)


async def _edit(world: World) -> None:
    await world.commit("a", [*range(8), 70, 71, 72, 73], 2)


async def _group(world: World) -> None:
    await asyncio.gather(
        world.commit("a", range(20), 2), world.commit("b", [*range(8), 5, 5, 5, 5, 6], 2), world.commit("c", range(12), 1)
    )


async def _merge(world: World) -> None:
    await world.commit("two", range(8), 0, shards=TWO[:1])
    await world.will("two", (2, tuple(range(8))), commit(world.repo, world.shelf, "two", range(8), 0, NS, shards=TWO[1:]))


async def _fork(world: World) -> None:
    await world.will("f", (1, tuple(range(8))), world.repo.sessions.fork("default", "a", NS.id, "main", "f", version=1))
    await world.commit("f", range(100, 104), 1, lane="main")


async def _detach(world: World) -> None:
    await world.will("d", (1, tuple(range(16))), world.repo.sessions.fork("default", "a", NS.id, "main", "d", detach=True))


async def _rewind(world: World) -> None:
    await world.will("a", (3, tuple(range(4))), world.repo.sessions.rewind("default", "a", NS.id, "main", tokens=7))
    await world.will("a", (4, tuple(range(16))), world.repo.sessions.rewind("default", "a", NS.id, "main", version=2))
    await world.commit("a", range(20), 4)


async def _renew(world: World) -> None:
    await world.repo.sessions.touch("default", "a", NS.id, "main", ttl=1000)
    await world.repo.sessions.pin("default", "b", NS.id, "main")
    await world.repo.sessions.resolve("default", "c", NS.id, "main")


async def _delete_and_make_again(world: World) -> None:
    await world.will("a", None, world.repo.sessions.delete("default", "a", NS.id, "main"))
    await world.commit("a", range(30, 38), 0)


async def _collect(world: World) -> None:
    world.maybe["old"].add(None)  # its time is over, and a collection may end it
    await world.will("b", None, world.repo.sessions.delete("default", "b", NS.id, "main"))
    await collect(world.repo, now=True)
    await collect(world.repo)
    world.maybe["old"] = {None}


async def _offer(world: World) -> None:
    for link in world.shelf.fill(NS, range(200, 208)):
        name = next(name for name in world.shelf.held if name.prefix_id == link.prefix_id)
        lease = world.shelf.lease(name, world.shelf.held[name])
        try:
            await world.repo.origin.offer(want(NS, name), lease)
        finally:
            lease.release()


SCENARIOS: list[Callable[[World], Awaitable[None]]] = [
    _create, _create_empty, _create_under_a_dangling_name, _commit_into_a_sealed_head, _edit, _group, _merge, _fork, _detach,
    _rewind, _renew, _delete_and_make_again, _collect, _offer,
]  # fmt: skip
TRUTH: dict[str, State] = {
    "a": (2, tuple(range(16))),
    "b": (2, (*range(8), 5, 5, 5, 5)),
    "c": (1, tuple(range(8))),
    "old": (1, tuple(range(60, 68))),
}


@pytest.fixture
async def past():
    """A store with a past: a family of three branches, sealed, old generations, a dangling name, a session whose time is over."""
    clock, shelf = VirtualClock(), Shelf()
    memory = MemoryStore(clock)
    async with opened(memory, clock, SeededIds(1), session_ttl=0) as repo:
        await commit(repo, shelf, "a", range(8), 0, NS)
        for name in ("b", "c"):
            await repo.sessions.fork("default", "a", NS.id, "main", name)
        await commit(repo, shelf, "a", range(16), 1, NS)
        await commit(repo, shelf, "b", [*range(8), 5, 5, 5, 5], 1, NS)
        await commit(repo, shelf, "gone", range(40, 48), 0, NS)
        await commit(repo, shelf, "old", range(60, 68), 0, NS, ttl=50)
        await repo.sessions.touch("default", "c", NS.id, "main", ttl=150)
        await repo.sessions.delete("default", "gone", NS.id, "main")
        await collect(repo, now=True)
    clock.advance(100)
    return clock, shelf, dict(memory._objects)


def _again(past) -> tuple[VirtualClock, Shelf, MemoryStore]:
    clock, shelf, objects = past
    memory = MemoryStore(clock)
    memory._objects.update(objects)
    fresh = Shelf()
    fresh.held.update(shelf.held)
    return clock, fresh, memory


async def _state(repo, session: str, version: int = 0) -> State:
    """A version of a session, and the very tokens that its blocks hold, each of which is verified. Looking renews nothing."""
    try:
        found = await repo.finder.find("default", session, NS.id, "main")
    except (NotFound, Gone):
        return None
    at = find_version(found.branch, version)
    manifest = await repo.finder.manifest("default", found.family, at.manifest)
    tokens: list[int] = []
    for block in manifest.blocks[: at.n]:
        name = BlockName(NS.id, Shard.parse(manifest.shards[block.copies[0].shard]), block.prefix_id, block.tokens)
        asked = want(NS, name, block.copies[0])
        raw = memoryview(bytearray(asked.size))
        assert await repo.origin.fetch(asked, raw) is None
        tokens += codec.tensors(raw, name, NS)["token_ids"].tolist()
    return at.seq, tuple(tokens)


async def _check(memory: MemoryStore, clock: VirtualClock, world: World, seed: int, *, strict: bool = True) -> dict[str, State]:
    async with opened(memory, clock, SeededIds(seed), session_ttl=0) as repo:
        assert broken(bodies(memory), repo.root.keys) == []
        report = await fsck(repo, deep=True)
        assert report.clean, report.findings
        actual = {session: await _state(repo, session) for session in world.maybe}
        for session, state in actual.items():
            assert not strict or state in world.maybe[session], session
            for version, tokens in world.kept[session].items() if state is not None else ():
                assert await _state(repo, session, version) == (version, tokens)
    return actual


async def _crash_at(past, scenario, action: str, index: int, seed: int) -> bool:
    """One death. False when the scenario is over before its `index`-th request."""
    clock, shelf, memory = _again(past)
    store = Faults(memory, clock=clock)
    world = World(None, shelf, TRUTH)
    died = False
    async with opened(store, clock, SeededIds(seed), session_ttl=0) as repo:
        world.repo = repo
        store.script.append(Fault(action=action, skip=index))
        try:
            await scenario(world)
        except Crash:
            died = True
    world.repo = None
    actual = await _check(memory, clock, world, seed + 1)

    # Life goes on: the same once more by a new node, or it is told why not; then collections, twice.
    async with opened(memory, clock, SeededIds(seed + 2), session_ttl=0) as repo:
        after = World(repo, shelf, actual)
        with contextlib.suppress(Conflict, AlreadyExists, Gone):
            await scenario(after)
        await collect(repo, now=True)
        await collect(repo, now=True)
    after.kept.clear()  # the versions it foretold are those of an undisturbed run
    final = await _check(memory, clock, after, seed + 3, strict=False)
    mortal = {"old", *(session for session, states in after.maybe.items() if None in states)}
    assert all(final[session] is not None for session, state in actual.items() if state and session not in mortal)
    return died


@pytest.mark.parametrize("action", ["crash-before", "crash-after"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.strip("_"))
async def test_a_node_that_dies_at_any_request_loses_nothing(past, scenario, action):
    deaths = 0
    while await _crash_at(past, scenario, action, deaths, 1000 * (deaths + 1)):
        deaths += 1
    assert deaths >= EXPECTED[scenario.__name__]


EXPECTED = {
    "_create": 16,
    "_create_empty": 12,
    "_create_under_a_dangling_name": 12,
    "_commit_into_a_sealed_head": 20,
    "_edit": 10,
    "_group": 24,
    "_merge": 15,
    "_fork": 12,
    "_detach": 14,
    "_rewind": 13,
    "_renew": 10,
    "_delete_and_make_again": 14,
    "_collect": 28,
    "_offer": 6,
}


def test_there_are_at_least_180_deaths():
    assert 2 * sum(EXPECTED.values()) >= 180
