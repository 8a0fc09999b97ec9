"""Lost answers: what a node may say when it does not know whether its write landed (the second table of docs/ordering.md)."""

import asyncio

import pytest

from kvstore.clock import SeededIds
from kvstore.errors import AlreadyExists, Conflict, Denied, Gone, Unavailable
from kvstore.lifecycle.collector import collect
from kvstore.model import RECENT, Head, Name, parse
from kvstore.objects import CREATE, REFUSED, Fault, Faults
from kvstore.repo.testing import bodies, broken, commit, opened, tiny, until

NS = tiny()
SWAP = {"verb": "put", "key": "*/heads/*"}
NAME = {"verb": "put", "key": "*/names/*"}


class Refuses:
    """A store whose PUT lands, and is answered 412 because something on the way sent it twice."""

    def __init__(self, store, pattern: str, times: int = 1) -> None:
        self._store, self._pattern, self.times = store, pattern, times

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def put(self, key, body, mode):
        answer = await self._store.put(key, body, mode)
        if self._pattern in key and self.times:
            self.times -= 1
            return REFUSED
        return answer


async def session(repo, name="s"):
    return await repo.sessions.get("default", name, NS.id, "main")


@pytest.mark.parametrize("action", ["lost", "before", "busy"])
async def test_a_swap_whose_answer_is_lost_is_acknowledged_once(repo, store, shelf, action):
    await commit(repo, shelf, "s", range(8), 0, NS)
    store.script.append(Fault(action=action, **SWAP))
    receipt = await commit(repo, shelf, "s", range(12), 1, NS)
    assert (receipt.version, receipt.tokens) == (2, 12)
    assert (await session(repo)).version == 2


async def test_a_412_on_a_swap_that_landed_is_recognised(repo, memory, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    repo.root.store = Refuses(memory, "/heads/")
    assert (await commit(repo, shelf, "s", range(12), 1, NS)).version == 2
    assert (await session(repo)).version == 2


class Creations:
    """A store that notes what was asked to be created."""

    def __init__(self, store) -> None:
        self._store, self.keys = store, []

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def put(self, key, body, mode):
        self.keys += [key] if mode == CREATE else []
        return await self._store.put(key, body, mode)


@pytest.mark.parametrize("action", ["lost", "before", "busy"])
async def test_r7_the_put_that_creates_a_head_is_sent_once(memory, clock, shelf, action):
    """A second one could bring back a head that was ended and deleted in between; so another attempt is another family."""
    store = Creations(Faults(memory, [Fault(action=action, times=2, **SWAP)], clock))
    async with opened(store, clock, SeededIds(9)) as node:
        assert (await commit(node, shelf, "s", range(8), 0, NS)).version == 1
        assert (await session(node)).version == 1
    sent = [key for key in store.keys if "/heads/" in key]
    assert len(sent) == len(set(sent)) == (1 if action == "lost" else 3)
    made = [parse(body, Head, key) for key, body in bodies(memory).items() if "/heads/" in key]
    assert [len(head.branches) for head in made] == [1]


@pytest.mark.parametrize("pattern", ["/heads/", "/names/", "/manifests/", "/blocks/", "/namespaces/"])
async def test_a_412_on_any_write_of_a_create_is_recognised(repo, memory, shelf, pattern):
    repo.root.store = Refuses(memory, pattern)
    assert (await commit(repo, shelf, "s", range(12), 0, NS)).version == 1
    repo.root.store = memory
    assert (await session(repo)).version == 1
    assert broken(bodies(memory), repo.root.keys) == []


async def test_every_answer_of_a_create_may_be_lost(memory, clock, shelf):
    """One after the other: each write of the operation lands and its answer does not come."""
    for index in range(40):
        store = Faults(memory, [Fault(action="lost", verb="put", skip=index)], clock)
        async with opened(store, clock, SeededIds(1000 + index)) as node:
            name = f"s{index}"
            assert (await commit(node, shelf, name, range(4 * index, 4 * index + 8), 0, NS)).version == 1
            assert (await session(node, name)).version == 1
            assert (await commit(node, shelf, name, range(4 * index, 4 * index + 16), 1, NS)).version == 2
    assert broken(bodies(memory), node.root.keys) == []


async def test_my_id_is_found_although_others_swapped_since(repo, other, store, shelf, memory):
    await commit(repo, shelf, "s", range(8), 0, NS)
    held = Fault(action="stall", **SWAP)
    store.script += [Fault(action="lost", **SWAP), Fault(action="stall", verb="get", key="*/heads/*")]
    held = store.script[-1]
    task = asyncio.create_task(commit(repo, shelf, "s", range(12), 1, NS))
    await until(lambda: not held.times)
    for step in range(RECENT - 1):  # others go on meanwhile: my id is the last one that the head remembers
        await other.sessions.touch("default", "s", NS.id, "main", ttl=100 + step)
    store.release.set()
    assert (await task).version == 2


async def test_more_than_32_swaps_on_the_outcome_is_unknown_and_says_so(repo, other, store, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    store.script += [Fault(action="lost", **SWAP), Fault(action="stall", verb="get", key="*/heads/*")]
    held = store.script[-1]
    task = asyncio.create_task(commit(repo, shelf, "s", range(12), 1, NS))
    await until(lambda: not held.times)
    for step in range(RECENT):
        await other.sessions.touch("default", "s", NS.id, "main", ttl=100 + step)
    store.release.set()
    with pytest.raises(Unavailable) as unknown:
        await task
    assert unknown.value.kind == "outcome_unknown"
    assert (await session(other)).version == 2  # it had landed, and nothing was deleted


async def test_a_store_out_of_reach_after_a_swap_leaves_the_outcome_unknown(repo, store, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    store.script += [Fault(action="lost", **SWAP), Fault(action="before", verb="get", key="*/heads/*", times=-1)]
    with pytest.raises(Unavailable) as unknown:
        await commit(repo, shelf, "s", range(12), 1, NS)
    assert unknown.value.kind == "outcome_unknown"


async def test_a_store_out_of_reach_before_any_swap_is_plainly_unavailable(repo, store, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    repo.families._idle.clear()
    store.script.append(Fault(action="before", verb="get", key="*/heads/*", times=-1))
    with pytest.raises(Unavailable) as unavailable:
        await commit(repo, shelf, "s", range(12), 1, NS)
    assert unavailable.value.kind == "unavailable"


async def test_no_failure_is_reported_while_the_swap_may_still_land(repo, store, shelf):
    """The first swap is still under way somewhere; what the second attempt meets is not the end of the story."""
    await commit(repo, shelf, "s", range(8), 0, NS)
    store.script += [Fault(action="before", **SWAP), Fault(action="before", verb="get", key="*/epoch", times=-1)]
    with pytest.raises(Unavailable) as unknown:
        await commit(repo, shelf, "s", range(12), 1, NS)
    assert unknown.value.kind == "outcome_unknown"


async def test_a_conflict_is_reported_only_once_the_swap_can_no_longer_land(repo, other, store, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    held = Fault(action="stall", **SWAP)
    store.script.append(held)
    task = asyncio.create_task(commit(repo, shelf, "s", range(12), 1, NS))
    await until(lambda: not held.times)
    await commit(other, shelf, "s", [*range(8), 99], 1, NS)
    store.release.set()
    with pytest.raises(Conflict) as moved:
        await task
    assert moved.value.facts == {"current": 2}


async def test_a_late_swap_that_lands_between_two_looks_is_found(repo, memory, shelf, clock):
    """The request seemed lost, the head was unchanged, the retry met it in the middle: one version, one acknowledgement."""

    class Late:
        """Holds one swap back, says it failed, and lets it land just before the next one."""

        def __init__(self) -> None:
            self.held, self.spent = None, False

        def __getattr__(self, name):
            return getattr(memory, name)

        async def put(self, key, body, mode):
            if "/heads/" in key and not self.spent:
                if self.held is None:
                    self.held = (key, bytes(body), mode)
                    raise Unavailable("no answer")
                self.spent = True
                await memory.put(*self.held)
            return await memory.put(key, body, mode)

    await commit(repo, shelf, "s", range(8), 0, NS)
    repo.root.store = Late()
    receipt = await commit(repo, shelf, "s", range(12), 1, NS)
    assert (receipt.version, (await session(repo)).version) == (2, 2)
    assert len((await repo.sessions.versions("default", "s", NS.id)).versions) == 2
    manifests = [key for key in bodies(memory) if "/manifests/" in key]
    assert len(manifests) == 3  # each attempt has its own; one of them is garbage now (R8)


async def test_a_members_lost_answer_is_every_members(repo, store, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    for name in ("t", "u"):
        await repo.sessions.fork("default", "s", NS.id, "main", name)
    store.script.append(Fault(action="lost", **SWAP))
    receipts = await asyncio.gather(*(commit(repo, shelf, name, range(12), 1, NS) for name in ("s", "t", "u")))
    assert [receipt.version for receipt in receipts] == [2, 2, 2]
    assert [(await session(repo, name)).version for name in ("s", "t", "u")] == [2, 2, 2]


async def test_a_store_that_refuses_the_credentials_says_so(repo, memory, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)

    class Shut:
        def __getattr__(self, name):
            return getattr(memory, name)

        async def put(self, key, body, mode):
            if "/heads/" in key:
                raise Denied("no", kind="access_denied")
            return await memory.put(key, body, mode)

    repo.root.store = Shut()
    with pytest.raises(Denied):
        await commit(repo, shelf, "s", range(12), 1, NS)
    repo.root.store = memory
    assert (await commit(repo, shelf, "s", range(12), 1, NS)).version == 2


@pytest.mark.parametrize("action", ["lost", "before"])
async def test_a_name_whose_answer_is_lost_is_mine_or_tried_again(repo, store, shelf, action):
    store.script.append(Fault(action=action, **NAME))
    assert (await commit(repo, shelf, "s", range(8), 0, NS)).version == 1
    assert (await session(repo)).tokens == 8


async def test_a_name_taken_by_another_is_already_exists_and_my_branch_is_dropped(repo, other, store, shelf, memory):
    held = Fault(action="stall", **NAME)
    store.script.append(held)
    task = asyncio.create_task(repo.sessions.create("default", "s", NS))
    await until(lambda: not held.times)
    await commit(other, shelf, "s", range(8), 0, NS)
    store.release.set()
    with pytest.raises(AlreadyExists):
        await task
    heads = [parse(body, Head, key) for key, body in bodies(memory).items() if "/heads/" in key]
    assert sorted(len(head.branches) for head in heads) == [0, 1]
    assert (await session(other)).tokens == 8


async def test_a_name_that_cannot_be_looked_at_leaves_the_outcome_unknown(repo, store):
    store.script += [Fault(action="lost", **NAME), Fault(action="before", verb="get", key="*/names/*", skip=1, times=-1)]
    with pytest.raises(Unavailable) as unknown:
        await repo.sessions.create("default", "s", NS)
    assert unknown.value.kind == "outcome_unknown"
    store.script.clear()
    assert (await session(repo)).version == 0


async def test_r7_a_dangling_name_is_taken_over_by_a_swap_and_never_deleted(repo, other, shelf, memory):
    await commit(repo, shelf, "s", range(8), 0, NS)
    (key,) = [key for key in bodies(memory) if key.startswith("r/names/")]
    before = parse(bodies(memory)[key], Name, key)
    await repo.sessions.delete("default", "s", NS.id, "main")
    assert parse(bodies(memory)[key], Name, key) == before
    for node in (repo, other):
        with pytest.raises(Gone):
            await session(node)
    await repo.sessions.create("default", "s", NS)
    after = parse(bodies(memory)[key], Name, key)
    assert (after.family, after.branch) != (before.family, before.branch)
    assert (await session(other)).version == 0


async def test_a_sealed_head_is_opened_although_the_answer_is_lost(repo, other, store, shelf):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await collect(other)
    store.script.append(Fault(action="lost", skip=1, **SWAP))  # the first swap is refused; the second one opens
    assert (await commit(repo, shelf, "s", range(12), 1, NS)).version == 2


async def test_a_head_that_a_collection_ended_before_its_first_branch_is_given_up(repo, other, store, shelf, memory):
    held = Fault(action="stall", verb="get", key="*/epoch")
    store.script.append(held)
    task = asyncio.create_task(commit(repo, shelf, "s", range(8), 0, NS))
    await until(lambda: not held.times)
    await collect(other, now=True)
    await collect(other, now=True)
    store.release.set()
    assert (await task).version == 1
    heads = [parse(body, Head, key) for key, body in bodies(memory).items() if "/heads/" in key]
    assert sorted(head.dead for head in heads) == [False, True]
    assert broken(bodies(memory), repo.root.keys) == []


async def test_a_manifest_that_is_absent_is_looked_for_in_the_head_as_it_is_now(repo, other, shelf, memory):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await session(other)
    key = next(key for key in bodies(memory) if "/manifests/" in key)
    await memory.delete([key])
    other.manifests._cache.clear()
    with pytest.raises(Exception, match="fsck"):
        await session(other)
    with pytest.raises(Exception, match="fsck"):
        await commit(other, shelf, "s", range(12), 1, NS)
