"""A node that is killed, 20 times, while a client commits: whatever was acknowledged is there again, and the bucket is sound.

Unlike the crashes of test_crash_points.py these are real: SIGKILL of a real node, on a real S3 server, whose own process is
killed as well in some rounds.
"""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

import kvstore
from kvstore.clock import RandomIds, SeededIds, SystemClock
from kvstore.errors import NotFound, Unavailable
from kvstore.ids import Namespace, Shard
from kvstore.keys import Keys
from kvstore.objects import RetryingStore, S3Store
from kvstore.objects.seaweed import SeaweedFS
from kvstore.repo import Repo, RepoSettings
from kvstore.repo.fsck import fsck

NODE = Path(__file__).with_name("kill9_node.py")
NAMESPACE = Namespace(model="kill9", revision="r1", layers=1, kv_heads=2, head_dim=64, dtype="F32", block_tokens=16)
PAYLOAD = 2 * 16 * 2 * 64 * 4 + 16 * 4  # keys, values and token ids
SHARD = Shard()
MOMENTS = [f"{when}-{what}" for what in ("block", "manifest", "head", "name") for when in ("before", "during", "after")]
ROUNDS = 20
STORE_DIES_TOO = {4, 11, 17}
COMMITS = 6  # of each session, in a round that nothing ends
STEADY = {"steady-bucket": "bucket", "steady-nvme": "nvme"}


def tokens(session, blocks):
    """The session's text: the same for every attempt to write it."""
    seed = int.from_bytes(hashlib.sha256(session.encode()).digest()[:8], "little")
    return [(seed + index * 7919) % 50_000 for index in range(blocks * 16)]


def links(session, blocks):
    return kvstore.chain(NAMESPACE, tokens(session, blocks))


def payload(session, block):
    """Bytes that only this block has, and its token ids."""
    link, ids = links(session, block + 1)[block], tokens(session, block + 1)[block * 16 :]
    return hashlib.shake_128(link.prefix_id.encode()).digest(PAYLOAD - 64) + array("I", ids).tobytes()


class Bench:
    """A server, a node that is started again and again, and what was promised so far."""

    def __init__(self, folder):
        self.folder = folder
        self.server = self._serve()
        self.node = None
        self.promised: dict[str, list[int]] = {}  # acknowledged versions
        self.versions: dict[str, int] = {}  # what the next commit builds on

    def _serve(self):
        server = SeaweedFS.launch(self.folder / "store")
        server.wait_ready()
        return server

    @property
    def url(self):
        return f"s3://{self.server.bucket}/kv?endpoint={self.server.endpoint}"

    @property
    def environment(self):
        keys = self.server.credentials
        return {"AWS_ACCESS_KEY_ID": keys.access_key, "AWS_SECRET_ACCESS_KEY": keys.secret_key}

    def start(self, moment, skip):
        self.node = subprocess.Popen(
            [sys.executable, NODE, self.url, self.folder, moment, str(skip)],
            stdout=subprocess.PIPE,
            env={**os.environ, **self.environment},
            text=True,
        )
        line = self.node.stdout.readline()
        return json.loads(line)["url"] if line else None

    def died(self):
        self.node.stdout.close()
        return self.node.wait(30)

    async def fsck(self, *, deep=False):
        """What `kvtier fsck` says of the bucket, without a process for each time."""
        clock, ids = SystemClock(), RandomIds()

        async def here(function, *arguments):
            return function(*arguments)

        async with S3Store.open(self.server.settings(), credentials=lambda: self.server.credentials) as store:
            retrying = RetryingStore(store, clock, ids)
            async with Repo.open(retrying, Keys("kv"), clock, ids, here, RepoSettings(init=False)) as repo:
                return await fsck(repo, deep=deep)

    def kill_store(self):
        self.server.kill()
        self.server = self._serve()

    def stop(self):
        if self.node is not None and self.node.poll() is None:
            self.node.kill()
            self.node.wait()
        self.server.stop()


@pytest.fixture
def bench(tmp_path):
    found = Bench(tmp_path)
    yield found
    found.stop()


def put(kv, session, block):
    chain = links(session, block + 1)
    assert kv.put(NAMESPACE, SHARD, chain[block:], lambda _, room: room.__setitem__(slice(None), payload(session, block))) == [True]
    return chain


def live(bench, kv, names):
    """Appends a block to each session in turn and remembers every receipt."""
    for _ in range(COMMITS):
        for name, durability in names.items():
            base = bench.versions.get(name, 0)
            chain = put(kv, name, base)
            receipt = kv.commit(name, namespace=NAMESPACE, base_version=base, blocks=chain, durability=durability)
            assert receipt.version == bench.versions.setdefault(name, 0) + 1 == base + 1
            bench.versions[name] = receipt.version
            bench.promised.setdefault(name, []).append(receipt.version)


def verify(bench, kv):
    """Every acknowledged version is there; of what was not acknowledged, at most the one commit that was under way."""
    for name, promised in bench.promised.items():
        now = kv.get_session(name)
        assert promised[-1] <= now.version <= promised[-1] + 1, name
        assert now.blocks == now.version, name
        bench.versions[name] = now.version
        for version in promised[-3:]:
            assert kv.manifest(name, version=version).blocks == links(name, version), (name, version)


def read_back(kv, name, blocks):
    with kv.get(NAMESPACE, SHARD, links(name, blocks), deadline_ms=30_000) as found:
        assert (len(found), found.miss) == (blocks, ""), name
        for block, lease in enumerate(found.leases):
            assert bytes(lease.view[-PAYLOAD:]) == payload(name, block), (name, block)


@pytest.mark.slow
@pytest.mark.seaweed
@pytest.mark.timeout(480)
def test_twenty_kills_lose_nothing_that_was_acknowledged(bench):
    pick = SeededIds(2)
    for number in range(ROUNDS):
        moment = MOMENTS[number * 7 % len(MOMENTS)]
        url = bench.start(moment, int(pick.jitter() * 2) if moment.endswith("name") else int(pick.jitter() * 10))
        try:
            if url is not None:
                with kvstore.open_sync(url) as kv:
                    verify(bench, kv)
                    live(bench, kv, {f"new-{number}-bucket": "bucket", f"new-{number}-nvme": "nvme", **STEADY})
        except (Unavailable, NotFound):
            pass  # the node died; what it took with it is seen in the next round
        assert bench.died() == -signal.SIGKILL, moment
        if number in STORE_DIES_TOO:
            bench.kill_store()
        report = asyncio.run(bench.fsck())
        assert report.clean, report.findings
    with kvstore.open_sync(bench.start("never-any", 0)) as kv:
        verify(bench, kv)
    bench.node.kill()
    bench.died()
    report = asyncio.run(bench.fsck(deep=True))
    assert report.clean, report.findings
    assert report.branches >= len(bench.promised)
    assert len(bench.promised) > ROUNDS
    shutil.rmtree(bench.folder / "nvme")  # from here on, from the bucket alone
    with kvstore.open_sync(bench.start("never-any", 0)) as kv:
        for name, promised in bench.promised.items():
            read_back(kv, name, promised[-1])
