"""A collection that is killed at each of its named moments, on a real server: nothing alive is lost, and the next one finishes.

Deaths at every single request, before and after it, are in test_repo_crash.py; these are real processes, and real kills.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from kvstore.clock import RandomIds, SystemClock
from kvstore.errors import Gone
from kvstore.ids import BlockName, Shard
from kvstore.keys import Keys
from kvstore.lifecycle.collector import collect
from kvstore.repo import Repo, want
from kvstore.repo.fsck import fsck
from kvstore.repo.testing import Shelf, commit, inline, tiny

NS = tiny()
SCRIPT = Path(__file__).with_name("kill9_collect.py")
MOMENTS = [
    ("before-put-epoch", 0), ("during-put-epoch", 1),
    ("after-put-head", 0), ("during-put-head", 1), ("after-put-head", 2),  # seals, one of them with an expiry
    ("before-put-head", 3), ("after-put-head", 3),  # empty heads end in the second collection
    ("during-delete-manifest", 0), ("before-delete-block", 0), ("during-delete-block", 0), ("after-delete-block", 0),
    ("after-put-hint", 0),
]  # fmt: skip
LIVING = {"a": range(16), "f": [*range(8), 50, 51], "p": range(30, 36)}


def opened(store, root):
    return Repo.open(store, Keys(root), SystemClock(), RandomIds(), inline)


async def prepare(store, root):
    """A family of two that lives, a pinned session, one whose time is over in a second, one that was deleted."""
    shelf = Shelf()
    async with opened(store, root) as repo:
        await commit(repo, shelf, "a", range(8), 0, NS, ttl=0)
        await repo.sessions.fork("default", "a", NS.id, "main", "f")
        await commit(repo, shelf, "f", LIVING["f"], 1, NS)
        await commit(repo, shelf, "a", LIVING["a"], 1, NS)
        await commit(repo, shelf, "p", LIVING["p"], 0, NS, ttl=1)
        await repo.sessions.pin("default", "p", NS.id, "main")
        await commit(repo, shelf, "old", range(60, 72), 0, NS, ttl=1)
        await commit(repo, shelf, "gone", range(80, 92), 0, NS, ttl=0)
        await repo.sessions.delete("default", "gone", NS.id, "main")
    return shelf


async def killed(seaweed, root, moment, skip):
    settings = seaweed.settings()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        SCRIPT,
        seaweed.endpoint,
        settings.bucket,
        root,
        moment,
        str(skip),
        env={**os.environ, **seaweed.environment},
    )
    assert await process.wait() == -signal.SIGKILL, (moment, skip)


async def read(repo, shelf, session, tokens):
    """Every block of a session, verified."""
    _, manifest = await repo.sessions.resolve("default", session, NS.id, "main")
    assert [block.prefix_id for block in manifest.blocks] == [link.prefix_id for link in shelf.fill(NS, tokens)]
    for block in manifest.blocks:
        asked = want(NS, BlockName(NS.id, Shard(), block.prefix_id, block.tokens), block.copies[0])
        assert await repo.origin.fetch(asked, memoryview(bytearray(asked.size))) is None


@pytest.mark.slow
@pytest.mark.seaweed
@pytest.mark.timeout(480)
async def test_i1_i6_i12_a_collection_killed_at_any_moment_takes_nothing_alive_and_the_next_one_ends_it(seaweed, s3_store, root):
    async with s3_store() as store:
        roots = [f"{root}-{number}" for number in range(len(MOMENTS))]
        shelves = [await prepare(store, each) for each in roots]
        await asyncio.sleep(2.1)  # the store's clock tells seconds
        for each, shelf, (moment, skip) in zip(roots, shelves, MOMENTS, strict=True):
            await killed(seaweed, each, moment, skip)
            async with opened(store, each) as repo:
                report = await fsck(repo, deep=True)
                assert report.clean, (moment, skip, report.findings)
                for session, tokens in LIVING.items():
                    await read(repo, shelf, session, list(tokens))
                await collect(repo, now=True)
                await collect(repo, now=True)
                report = await fsck(repo, deep=True)
                assert report.clean, (moment, skip, report.findings)
                assert (report.garbage_blocks, report.garbage_manifests, report.branches) == (0, 0, 3), (moment, skip)
                for session, tokens in LIVING.items():
                    await read(repo, shelf, session, list(tokens))
                for session in ("old", "gone"):
                    with pytest.raises(Gone):
                        await repo.sessions.get("default", session, NS.id, "main")
