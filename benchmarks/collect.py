"""What a collection needs: memory for a listing of any size, and time for a real bucket.

`listing`: a synthetic bucket, whose objects are made up as they are asked for, is collected in a process that does nothing else;
the result is the peak resident memory of that process, against the 300 MiB that are promised for five million blocks.

`bucket`: sessions and garbage on SeaweedFS, collected by the collector's own process to exactly the live set; the result is blocks
per second, against a bare listing and deletion of as many objects by the same client.

`check`: the synthetic bucket under `kvtier fsck`.

    python benchmarks/collect.py listing [--keys 5000000]
    python benchmarks/collect.py bucket [--keys 20000]
    python benchmarks/collect.py check [--keys 5000000]
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from _bench import report, server

from kvstore import api
from kvstore.clock import RandomIds, SystemClock
from kvstore.config import load
from kvstore.ids import PrefixId
from kvstore.keys import Keys, manifest_name
from kvstore.lifecycle.collector import Collector
from kvstore.lifecycle.messages import Job
from kvstore.lifecycle.runners import Subprocess
from kvstore.model import BlockRef, Branch, Copy, Head, Manifest, dump
from kvstore.objects import CREATE, MemoryStore, ObjectStore, S3Store
from kvstore.objects.base import PAGE, Absent, Arrived, Got, ObjectMeta, Unchanged
from kvstore.repo.fsck import fsck
from kvstore.repo.testing import Shelf, commit, opened, tiny
from kvstore.repo.together import together

KEYS = Keys("r")
NAMESPACE = tiny()
SHARD = "t0of1.p0of1.g0"
SESSION = 500  # blocks; of each, one in ten is garbage
LIVE = 450
SIZE = 2 << 20


class Synthetic(MemoryStore):
    """A bucket of `keys` blocks in sessions of 500, nine tenths of them alive, that takes no memory.

    Args:
        keys: How many blocks.
    """

    def __init__(self, keys: int) -> None:
        super().__init__()
        self._families = keys // SESSION
        self.deleted = 0

    async def get(
        self,
        key: str,
        *,
        range: tuple[int, int] | None = None,  # noqa: A002  the contract's own name
        into: memoryview | None = None,
        if_none_match: str | None = None,
        arrived: Arrived | None = None,
    ) -> Got | Absent | Unchanged:
        """A head or manifest made up; anything else as in memory."""
        body = b""
        if KEYS.parse_head(key) is not None:
            body = dump(_head(int(key.rpartition("/")[2], 16)), key)
        elif KEYS.parse_manifest(key) is not None:
            body = dump(_manifest(int(key.split("/")[-2], 16)), key)
        if not body:
            return await super().get(key, range=range, into=into, if_none_match=if_none_match, arrived=arrived)
        return Got(memoryview(body), '"e"', len(body), 0.0)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """In the order of keys, as a store would."""
        made = {
            KEYS.heads(): lambda family: [ObjectMeta(_head_key(family), 900, '"e"', 0.0)],
            KEYS.manifests(): lambda family: [ObjectMeta(_manifest_key(family), 50_000, '"e"', 0.0)],
            KEYS.blocks: lambda family: [ObjectMeta(_block_key(family, index), SIZE, '"e"', 0.0) for index in range(SESSION)],
        }.get(prefix)
        if made is None:
            async for page in super().list(prefix, start_after=start_after):
                yield page
            return
        waiting: list[ObjectMeta] = []
        for family in range(self._families):
            waiting += made(family)
            if len(waiting) >= PAGE:
                yield waiting[:PAGE]
                waiting = waiting[PAGE:]
        if waiting:
            yield waiting

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """Counted."""
        self.deleted += len(keys)
        return []


def _head_key(family: int) -> str:
    return KEYS.head("default", f"{family:032x}")


def _manifest_key(family: int) -> str:
    return KEYS.manifest("default", f"{family:032x}", manifest_name(1, f"{family:032x}"))


def _prefix(family: int, index: int) -> PrefixId:
    return PrefixId(f"{family:032x}{index:032x}")


def _block_key(family: int, index: int) -> str:
    return KEYS.block(NAMESPACE.id, SHARD, _prefix(family, index), 1)


def _head(family: int) -> Head:
    branch = Branch(seq=1, manifest=manifest_name(1, f"{family:032x}"), n=LIVE)
    return Head(swaps=2, write=f"{family:032x}", recent=tuple([f"{family:032x}"] * 32), open=False, branches={"a" * 32: branch})


def _manifest(family: int) -> Manifest:
    copies = (Copy(shard=0, gen=1, bytes=SIZE, header_bytes=4096),)
    blocks = tuple(BlockRef(prefix_id=_prefix(family, index), tokens=4, copies=copies) for index in range(LIVE))
    return Manifest(namespace=NAMESPACE.id, shards=(SHARD,), block_tokens=4, tokens=4 * LIVE, blocks=blocks)


async def check_synthetic(keys: int) -> None:
    """`kvtier fsck` of it, in this process; prints how much memory it took at most."""
    async with opened(Synthetic(keys), SystemClock(), RandomIds(), cached_sessions=256, cached_manifests=1) as repo:
        started = time.perf_counter()
        found = await fsck(repo)
    sessions = keys // SESSION
    assert (found.heads, found.blocks, found.garbage_blocks, found.clean) == (sessions, keys, sessions * (SESSION - LIVE), True)
    print(msgspec.json.encode({"peak": _peak_mib(), "seconds": time.perf_counter() - started}).decode(), flush=True)


async def collect_synthetic(keys: int) -> None:
    """In this process; prints what it did and how much memory it took at most."""
    store = Synthetic(keys)
    async with opened(store, SystemClock(), RandomIds(), cached_sessions=256, cached_manifests=1) as repo:
        for _ in range(2):
            await repo.epochs.advance(await repo.epochs.read())
        before = _peak_mib()
        started = time.perf_counter()
        done = await Collector(repo).run(api.Collect())
    sessions = keys // SESSION
    assert (done.heads, done.blocks_deleted, done.blocks_kept) == (sessions, sessions * (SESSION - LIVE), sessions * LIVE)
    assert store.deleted == done.blocks_deleted
    line = {"peak": _peak_mib(), "before": before, "seconds": time.perf_counter() - started}
    print(msgspec.json.encode(line).decode(), flush=True)


def _peak_mib() -> float:
    """Not getrusage: what that says is inherited from the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def listing(keys: int) -> None:
    """Memory, measured in a process that does nothing else."""
    command = [sys.executable, str(Path(__file__)), "synthetic", "--keys", str(keys)]
    found = msgspec.json.decode(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    report(
        "collect_listing_peak_rss",
        "MiB",
        [found["peak"]],
        [300],
        keys=keys,
        before_mib=round(found["before"], 1),
        bytes_per_key=round((found["peak"] - found["before"]) * (1 << 20) / keys, 1),
        seconds=round(found["seconds"], 1),
    )


async def bucket(keys: int) -> None:
    """Half of `keys` blocks alive, half garbage, on SeaweedFS."""
    with server() as (seaweed, _):
        async with S3Store.open(seaweed.settings(), credentials=lambda: seaweed.credentials) as store:
            alive = await fill_bucket(store, keys)
            settings = load(flags={"store.url": f"s3://{seaweed.bucket}/r?endpoint={seaweed.endpoint}"}).settings
            runner = Subprocess(settings, keep=True)
            try:
                started = time.perf_counter()
                done = await runner.run(Job(request=api.Collect(now=True)), lambda _: None)
                seconds = time.perf_counter() - started
            finally:
                await runner.aclose()
            left = {meta.key async for page in store.list(KEYS.blocks) for meta in page}
            assert done is not None
            assert left == alive
            bare = await _bare(store, [f"bare/{index:08d}" for index in range(keys)], done.blocks_deleted)
    report(
        "collect_bucket",
        "blocks/s",
        [keys / seconds],
        [keys / bare],
        keys=keys,
        deleted=done.blocks_deleted,
        kept=len(left),
        seconds=round(seconds, 1),
    )


async def fill_bucket(store: ObjectStore, keys: int) -> set[str]:
    """Sessions that hold half of `keys` blocks, and as many that nothing names. Returns the keys of the former."""
    async with opened(store, SystemClock(), RandomIds()) as repo:
        await repo.put_namespace(NAMESPACE)
        shelf, sessions = Shelf(), max(1, keys // 2 // SESSION)
        for session in range(sessions):
            first = session * SESSION * 4
            await commit(repo, shelf, f"s{session}", range(first, first + SESSION * 4), 0, NAMESPACE, ttl=0)
    alive = {meta.key async for page in store.list(KEYS.blocks) for meta in page}
    garbage = [_block_key(1 << 64, index) for index in range(keys - len(alive))]
    await together(lambda key: store.put(key, b"x", CREATE), garbage, limit=32)
    return alive


async def _bare(store: ObjectStore, keys: Sequence[str], deleted: int) -> float:
    """Seconds to list as many keys and delete as many of them."""
    await together(lambda key: store.put(key, b"x", CREATE), keys, limit=32)
    started = time.perf_counter()
    async for page in store.list("bare/"):
        batch = [meta.key for meta in page][: max(0, deleted)]
        deleted -= len(batch)
        if batch:
            await store.delete(batch)
    return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["listing", "bucket", "synthetic", "check"])
    parser.add_argument("--keys", type=int, default=0)
    asked = parser.parse_args()
    if asked.what == "listing":
        listing(asked.keys or 5_000_000)
    elif asked.what == "bucket":
        asyncio.run(bucket(asked.keys or 20_000))
    elif asked.what == "check":
        asyncio.run(check_synthetic(asked.keys or 5_000_000))
    else:
        asyncio.run(collect_synthetic(asked.keys))
