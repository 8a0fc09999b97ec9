"""Rules 1 and 2: bytes, generations and epochs, and a swap that fails is begun again."""

import asyncio

from fakes.commits import NS, commit_links, epochs_pass
from fakes.sealed import contents, either

from kvstore.clock import SeededIds, VirtualClock
from kvstore.lifecycle.collector import collect
from kvstore.objects import Fault
from kvstore.repo.testing import Shelf, bodies, broken, commit, opened, until


@either
async def test_r1_bytes_no_longer_local_are_copied_from_an_older_generation(repo, shelf, memory, store, masters):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await epochs_pass(repo, 3)
    links = shelf.fill(NS, range(16))
    empty = Shelf()
    async with opened(store, VirtualClock(), SeededIds(5), masters=masters) as fresh:
        receipt = await commit_links(fresh, empty, links, 0, session="t")
    assert (receipt.tokens, receipt.cut) == (16, False)
    assert store.counts["copy"] == 4
    _, manifest = await repo.sessions.resolve("default", "t", NS.id, "main")
    assert [copy.gen for block in manifest.blocks for copy in block.copies] == [4] * 4
    assert broken(await contents(repo, memory), repo.root.keys) == []


async def test_r1_what_the_head_names_already_is_kept_at_any_age(repo, shelf, store):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await epochs_pass(repo, 5)
    await collect(repo)
    store.requests.clear()
    await commit(repo, shelf, "s", range(20), 1, NS)
    assert [entry.verb for entry in store.requests if "/blocks/" in entry.key] == ["head", "head", "put"]
    _, manifest = await repo.sessions.resolve("default", "s", NS.id, "main")
    assert [copy.gen for block in manifest.blocks for copy in block.copies] == [1, 1, 1, 1, 6]


async def test_r1_blocks_of_an_older_version_are_named_again_without_a_copy(repo, shelf, store):
    await commit(repo, shelf, "s", range(16), 0, NS)
    await repo.sessions.rewind("default", "s", NS.id, "main", tokens=4)
    await epochs_pass(repo, 4)
    await collect(repo)
    store.requests.clear()
    await commit(repo, shelf, "s", range(16), 2, NS)
    assert not [entry for entry in store.requests if "/blocks/" in entry.key]


@either
async def test_r2_a_failed_swap_reads_head_and_epoch_again(repo, other, shelf, store, memory):
    await commit(repo, shelf, "s", range(8), 0, NS)
    await epochs_pass(other, 3)
    await collect(other)  # seals the head under the writer's unbroken chain of epoch 1
    store.requests.clear()
    receipt = await commit(repo, shelf, "s", range(12), 1, NS)
    assert receipt.version == 2
    assert [entry.key for entry in store.requests if entry.verb == "get"][-1] == "r/epoch"
    _, manifest = await repo.sessions.resolve("default", "s", NS.id, "main")
    assert manifest.blocks[-1].copies[0].gen == 4  # put at 1 first, then brought to 4 inside the store
    assert store.counts["copy"] == 1
    manifests = sorted(key for key in bodies(memory) if "/manifests/" in key)
    assert [key.split("/")[-1][:10] for key in manifests] == ["0000000001", "0000000001", "0000000004"]


@either
async def test_b51_lite_a_writer_stopped_past_its_epochs_is_refused_and_its_redo_lands(repo, shelf, store, memory, masters):
    await commit(repo, shelf, "s", range(8), 0, NS)
    stalled = Fault(action="stall", verb="put", key="*/heads/*")
    store.script.append(stalled)
    late = asyncio.create_task(commit(repo, shelf, "s", range(16), 1, NS))
    await until(lambda: not stalled.times)
    async with opened(memory, VirtualClock(), SeededIds(9), masters=masters) as collector:
        await collect(collector, now=True)
        await collect(collector, now=True)  # its blocks were unnamed, and are gone
    store.release.set()
    receipt = await late
    assert (receipt.version, receipt.tokens) == (2, 16)
    assert [entry.outcome for entry in store.requests if entry.verb == "put" and "/heads/" in entry.key].count("Refused") == 1
    assert broken(await contents(repo, memory), repo.root.keys) == []
