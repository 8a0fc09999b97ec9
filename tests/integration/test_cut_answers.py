"""Answers cut off after the store has carried the request out, on a real server: no false conflict, and no false success."""

import asyncio
import random  # noqa: TID251  seeded below
from contextlib import AsyncExitStack

import pytest
from fakes.cutting_proxy import CuttingProxy

from kvstore.clock import RandomIds, SystemClock
from kvstore.errors import AlreadyExists, Conflict
from kvstore.keys import Keys
from kvstore.lifecycle.collector import collect
from kvstore.objects import RetryingStore
from kvstore.repo import Repo
from kvstore.repo.fsck import fsck
from kvstore.repo.testing import Shelf, commit, inline, tiny

NS = tiny()
RACERS = 4
ROUNDS = 20
CUT = 0.4  # of the answers to writes of registers


@pytest.fixture
async def racers(seaweed, s3_store, root):
    """Nodes of one root, each behind the proxy, which cuts answers to their writes."""
    async with AsyncExitStack() as lifetime:
        proxy = await lifetime.enter_async_context(CuttingProxy.open(seaweed.endpoint))
        clock, nodes = SystemClock(), []
        for _ in range(RACERS):
            store = RetryingStore(await lifetime.enter_async_context(s3_store(endpoint=proxy.endpoint)), clock, RandomIds())
            nodes.append(await lifetime.enter_async_context(Repo.open(store, Keys(root), clock, RandomIds(), inline)))
        yield nodes, proxy


@pytest.fixture
async def watcher(s3_store, root, racers):
    """A node that reaches the server directly."""
    async with s3_store() as store, Repo.open(store, Keys(root), SystemClock(), RandomIds(), inline) as repo:
        yield repo


def outcomes(answers, refusal):
    """Who was acknowledged; everybody else was refused, and nobody was left in the dark."""
    won = [index for index, answer in enumerate(answers) if not isinstance(answer, Exception)]
    assert all(isinstance(answer, refusal) for index, answer in enumerate(answers) if index not in won), answers
    return won


@pytest.mark.seaweed
@pytest.mark.timeout(300)
async def test_i2_i3_a_cut_answer_is_neither_a_false_conflict_nor_a_false_success(racers, watcher):
    nodes, proxy = racers
    lot, shelf = random.Random(20), Shelf()
    proxy.cuts = lambda method, path: method == "PUT" and ("/heads/" in path or "/names/" in path) and lot.random() < CUT
    await commit(watcher, shelf, "s", range(4), 0, NS)
    version, tokens = 1, list(range(4))
    for turn in range(ROUNDS):
        match turn % 3:
            case 0:  # everybody goes on from the same version
                mine = [[*tokens, 100 + turn, racer] for racer in range(RACERS)]
                works = [commit(node, shelf, "s", mine[racer], version, NS) for racer, node in enumerate(nodes)]
                won = outcomes(await asyncio.gather(*works, return_exceptions=True), Conflict)
                assert len(won) == 1
                version, tokens = version + 1, mine[won[0]]
                seen = await watcher.sessions.manifest("default", "s")
                assert (seen.version, seen.blocks) == (version, shelf.fill(NS, tokens))
            case 1:  # everybody makes the same session
                works = [node.sessions.create("default", f"c{turn}", NS, labels={"by": str(r)}) for r, node in enumerate(nodes)]
                answers = await asyncio.gather(*works, return_exceptions=True)
                won = outcomes(answers, AlreadyExists)
                assert len(won) == 1
                assert (await watcher.sessions.get("default", f"c{turn}")).branch == answers[won[0]].branch
            case 2:  # everybody forks to the same name
                works = [node.sessions.fork("default", "s", NS.id, "main", f"f{turn}") for node in nodes]
                answers = await asyncio.gather(*works, return_exceptions=True)
                won = outcomes(answers, AlreadyExists)
                assert len(won) == 1
                seen = await watcher.sessions.get("default", f"f{turn}")
                assert (seen.branch, seen.version) == (answers[won[0]].branch, version)
    landed = [status for _, _, status in proxy.done if status == 200]
    assert len(landed) >= ROUNDS / 2  # writes that were carried out and not answered
    report = await fsck(watcher)
    assert report.clean
    done = await collect(watcher, now=True)
    assert (done.failed, (await fsck(watcher)).garbage_blocks) == (0, 0)


@pytest.mark.seaweed
async def test_i7_a_bit_that_flips_between_the_store_and_a_node_is_read_again_and_never_written_back(racers, watcher):
    """Plain HTTP: of the answers about a register or manifest every other one is damaged."""
    (node, *_), proxy = racers
    lot, shelf, flipped = random.Random(21), Shelf(), set()

    def alters(method, path, body):
        watched = any(f"/{folder}" in path for folder in ("heads/", "names/", "manifests/", "epoch"))
        if method != "GET" or not watched or "list-type" in path or not body or path in flipped:
            flipped.discard(path)
            return body
        flipped.add(path)
        at = lot.randrange(len(body))
        return body[:at] + bytes([body[at] ^ 1 << lot.randrange(8)]) + body[at + 1 :]

    await commit(watcher, shelf, "s", range(16), 0, NS)
    proxy.alters = alters
    version = 1
    for turn in range(ROUNDS):
        await collect(watcher)  # seals, so that the node must read the head again
        match turn % 4:
            case 0:
                version = (await commit(node, shelf, "s", range(20 + turn), version, NS)).version
            case 1:
                await node.sessions.touch("default", "s", ttl=1000 + turn)
            case 2:
                await node.sessions.fork("default", "s", NS.id, "main", f"f{turn}")
            case 3:
                version = (await node.sessions.rewind("default", "s", tokens=12)).version
        assert (await watcher.sessions.get("default", "s")).version == version
    await collect(node, now=True)
    assert node.root.corrupt_reads["heads"] >= 1
    assert sum(node.root.corrupt_reads.values()) >= ROUNDS / 2
    assert watcher.root.corrupt_reads == {}
    assert (await fsck(watcher, deep=True)).findings == []
