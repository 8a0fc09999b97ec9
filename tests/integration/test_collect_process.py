"""The collector in a process of its own: what it collects, how it is asked, and that it never outlives its node."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore import api
from kvstore.accounts import Accounts
from kvstore.clock import RandomIds, SystemClock
from kvstore.config import load
from kvstore.errors import Unavailable
from kvstore.keys import Keys
from kvstore.lifecycle import runners
from kvstore.lifecycle.messages import Job
from kvstore.lifecycle.runners import Subprocess
from kvstore.node import Node
from kvstore.objects import CREATE
from kvstore.repo import Repo
from kvstore.repo.testing import Shelf, commit, inline, tiny
from kvstore.repo.together import together
from kvstore.server.metrics import NodeCollector

NS = tiny()
KVTIER = [sys.executable, "-c", "from kvstore.cli.main import main; main()"]


def ignore(_):
    """No interest in progress."""


def alive(pid) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def group_of(pid: int) -> str:
    """Its session's priority; as expected where the kernel does not group by session, and nice values count among all processes."""
    group = Path(f"/proc/{pid}/autogroup")
    return group.read_text() if group.exists() else "nice 10\n"


def command_line(pid) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.fixture
async def bucket(seaweed, s3_store, root, monkeypatch):
    """A root with one session that lives, and 40 blocks of another that was deleted: (store, keys of the former, URL)."""
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    async with s3_store() as store, Repo.open(store, Keys(root), SystemClock(), RandomIds(), inline) as repo:
        await repo.put_namespace(NS)
        await commit(repo, Shelf(), "s", range(16), 0, NS)
        live = {meta.key async for page in store.list(repo.root.keys.blocks) for meta in page}
        await commit(repo, Shelf(), "t", range(1000, 1160), 0, NS)
        await repo.sessions.delete("default", "t")
        yield store, live, seaweed.url(root)


@pytest.fixture
async def runner(bucket):
    runner = Subprocess(load(flags={"store.url": bucket[2]}).settings, keep=True)
    yield runner
    await runner.aclose()


async def blocks_of(store, url) -> set[str]:
    prefix = Keys(url.partition("?")[0].rpartition("/")[2]).blocks
    return {meta.key async for page in store.list(prefix) for meta in page}


@pytest.mark.seaweed
async def test_it_collects_the_bucket_at_low_priority_and_knows_no_secret_by_its_command_line(bucket, runner, seaweed):
    store, live, url = bucket
    seen = []
    runner._accounts = accounts = Accounts()
    done = await runner.run(Job(request=api.Collect(now=True)), seen.append)
    spent = accounts.of("")
    assert spent.requests["delete"] >= 1
    assert (spent.requests["list"] >= 3, spent.sent > 0, spent.fetched > 0) == (True, True, True)
    first = dict(spent.requests)
    assert (done.blocks_kept, done.blocks_deleted, done.warnings) == (4, 40, [])
    assert await blocks_of(store, url) == live
    assert (seen[-1].phase, seen[-1].deleted) == ("blocks", 41)
    pid = runner._process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert os.sched_getscheduler(pid) == os.SCHED_BATCH
    assert group_of(pid).endswith("nice 10\n")
    line = command_line(pid)
    assert seaweed.credentials.secret_key.encode() not in line
    assert url.encode() not in line
    again = await runner.run(Job(request=api.Collect(now=True)), ignore)
    assert (again.blocks_kept, again.blocks_deleted) == (4, 0)
    assert runner._process.pid == pid  # and with it, what it remembers
    assert first["list"] < spent.requests["list"] <= 2 * first["list"]  # totals of a process are not counted twice
    assert await runner.run(Job(request=api.Collect(), fresh_s=600), ignore) is None
    await runner.aclose()
    assert not alive(pid)


@pytest.mark.seaweed
async def test_one_that_was_killed_while_idle_is_replaced_by_the_next_run(bucket, runner):
    await runner.run(Job(request=api.Collect(dry_run=True)), ignore)
    pid = runner._process.pid
    os.kill(pid, signal.SIGKILL)
    done = await runner.run(Job(request=api.Collect(now=True)), ignore)
    assert (done.blocks_deleted, runner._process.pid != pid) == (40, True)


@pytest.mark.seaweed
async def test_one_that_is_killed_at_work_leaves_everything_that_lives(bucket, runner):
    store, live, url = bucket
    await runner._started()
    working = asyncio.create_task(runner.run(Job(request=api.Collect(now=True)), ignore))
    await asyncio.sleep(0.8)
    os.kill(runner._process.pid, signal.SIGKILL)
    await asyncio.gather(working, return_exceptions=True)
    assert live <= await blocks_of(store, url)
    await runner.run(Job(request=api.Collect(now=True)), ignore)
    assert await blocks_of(store, url) == live


async def test_what_it_fails_with_arrives_as_the_same_error():
    runner = Subprocess(load(flags={"store.url": "memory://nothing-is-here"}).settings, keep=False)
    try:
        with pytest.raises(Unavailable) as failed:
            await runner.run(Job(request=api.Collect()), ignore)
        assert failed.value.kind == "store_not_initialised"
        pid = runner._process.pid
        await runner.rest()
        assert not alive(pid)
    finally:
        await runner.aclose()


async def test_one_that_falls_silent_is_killed_and_the_next_run_starts_another(monkeypatch):
    monkeypatch.setattr(runners, "_SILENCE_S", 0.5)
    runner = Subprocess(load(flags={"store.url": "memory://nothing-is-here"}).settings, keep=True)
    try:
        pid = (await runner._started()).pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="said nothing"):
            await runner.run(Job(request=api.Collect()), ignore)
        assert not alive(pid)
        monkeypatch.setattr(runners, "_SILENCE_S", 60)
        with pytest.raises(Unavailable, match="json is missing"):
            await runner.run(Job(request=api.Collect()), ignore)
    finally:
        await runner.aclose()


def test_it_ends_with_a_node_that_is_killed():
    code = """
import asyncio
from kvstore.config import load
from kvstore.lifecycle.runners import Subprocess
async def main():
    process = await Subprocess(load(flags={"store.url": "memory://x"}).settings, keep=True)._started()
    print(process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    node = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(node.stdout.readline())
        assert alive(pid)
        node.kill()
        node.wait()
        end = time.monotonic() + 30
        while alive(pid):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        node.kill()
        node.communicate()


@pytest.mark.seaweed
async def test_a_node_collects_there_on_request_and_periodically_and_shows_it(bucket, tmp_path):
    store, live, url = bucket
    flags = {"store.url": url, "dram.size": "8MiB", "node.listen": "", "lifecycle.collect_interval": "1"}
    async with Node.open(load(flags=flags).settings) as node:
        call = node.service.call

        async def deletions():
            """That the account of the node's own work has: its probe deletes what it wrote, and else only collections delete."""
            cost = (await call("default", "stats", api.Nothing())).cost
            return sum(each.requests.get("delete", 0) for each in cost if not each.tenant)

        before = await deletions()
        done = await call("default", "collect", api.Collect(now=True))
        assert (done.blocks_deleted, await blocks_of(store, url)) == (40, live)

        async def stats():
            return (await call("default", "stats", api.Nothing())).collector

        for _ in range(300):
            found = await stats()
            if sum(found.runs.values()) >= 2:
                break
            await asyncio.sleep(0.1)
        assert found.runs["ok"] >= 1
        assert set(found.runs) <= {"ok", "skipped"}
        assert found.deleted >= 41
        assert abs(found.last_success - SystemClock().now()) < 60
        assert [(usage.namespace, usage.blocks) for usage in found.usage] == [(NS.id, 4)]
        families = {family.name: family for family in NodeCollector(await call("default", "stats", api.Nothing())).collect()}
        assert families["kvtier_collector_deleted"].samples[0].value >= 41
        assert await deletions() > before
        assert families["kvtier_bucket_blocks"].samples[0].value == 4
        assert families["kvtier_collector_last_success_timestamp_seconds"].samples[0].value == found.last_success
        pid = node.service._collections._runner._process.pid
        assert alive(pid)
    assert not alive(pid)


@pytest.mark.seaweed
async def test_the_command_collects_without_a_node_and_lists_what_would_go(bucket, seaweed):
    store, live, url = bucket

    def command(*more):
        environment = {**os.environ, **seaweed.environment}
        done = subprocess.run(
            [*KVTIER, "collect", "--store", url, "--now", *more], check=False, capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    *doomed, summary = map(json.loads, await asyncio.to_thread(command, "--dry-run", "--format", "json"))
    assert len([one for one in doomed if one["kind"] == "block"]) == 40
    assert {one["reason"] for one in doomed} == {"unnamed", "orphan"}
    assert (summary["blocks_deleted"], summary["dry_run"]) == (40, True)
    assert len(await blocks_of(store, url)) == 44
    text = await asyncio.to_thread(command, "--dry-run")
    assert sum(line.startswith("unnamed: block of generation 1, 4.1 KiB: ") for line in text) == 40
    shown = await asyncio.to_thread(command)
    assert any(line.split()[:1] == ["blocks"] and "4 kept, 40 deleted" in line for line in shown)
    assert await blocks_of(store, url) == live


@pytest.mark.seaweed
async def test_b52_2501_blocks_on_a_real_store(bucket, runner):
    """One LIST page more than two, deleted in batches; all of it but what lives."""
    store, live, url = bucket
    prefix = next(iter(live)).rsplit("/", 2)[0]
    await together(lambda number: store.put(f"{prefix}/{number:064x}/0000000001", b"x", CREATE), range(2461), limit=32)
    done = await runner.run(Job(request=api.Collect(now=True)), ignore)
    assert (done.blocks_deleted, done.failed) == (2501, 0)
    assert await blocks_of(store, url) == live
