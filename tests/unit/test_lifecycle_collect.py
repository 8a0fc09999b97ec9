"""What a collection does besides sealing and deleting: the clock guard, dry runs, the limit, reaping, going on, remembering."""

import asyncio
import math

import pytest

from kvstore import api
from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import Gone, Unavailable
from kvstore.lifecycle.capacity import Candidate, LeastWorth, last_used, standing, worth
from kvstore.lifecycle.collector import Collector, CollectSettings
from kvstore.lifecycle.hints import CollectHint, UsageHint, read_hint
from kvstore.lifecycle.reaping import REAP_S
from kvstore.model import Branch, Head, parse, sealed
from kvstore.objects import CREATE, Crash, Fault, Faults, MemoryStore
from kvstore.repo.testing import bodies, broken, commit, opened, tiny, until

NS = tiny()
NOW = api.Collect(now=True)


def count(memory, kind) -> int:
    return len([key for key in bodies(memory) if f"/{kind}/" in key])


def garbage(number: int, gen: int = 1) -> str:
    return f"r/blocks/{NS.id}/t0of1.p0of1.g0/{number:064x}/{gen:010d}"


# --- B43: clocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [-3600.0, 365 * 86400.0])
async def test_b43_a_wrong_host_clock_neither_keeps_nor_takes_a_session(memory, clock, shelf, off):
    """Expiry goes by the store's clock, whatever the host's says; here with the guard off, for nothing may rest on it."""
    host = VirtualClock(clock.now() + off)
    async with opened(memory, host) as repo:
        collector = Collector(repo, CollectSettings(max_skew_s=None))
        await commit(repo, shelf, "short", range(8), 0, NS, ttl=60)
        await commit(repo, shelf, "long", range(100, 108), 0, NS, ttl=3600)
        for each in (clock, host):
            each.advance(59)
        assert (await collector.run(NOW)).expired == 0
        for each in (clock, host):
            each.advance(2)
        assert (await collector.run(NOW)).expired == 1
        assert (await repo.sessions.get("default", "long")).tokens == 8
        assert broken(bodies(memory), repo.root.keys) == []


@pytest.mark.parametrize(("off", "said"), [(-301.0, "301 s behind"), (301.0, "301 s ahead of")])
async def test_b43_destructive_work_refuses_where_the_clocks_differ_and_says_why(memory, clock, shelf, off, said):
    async with opened(memory, VirtualClock(clock.now() + off)) as repo:
        await commit(repo, shelf, "s", range(8), 0, NS, ttl=60)
        clock.advance(0)
        before = bodies(memory)
        with pytest.raises(Unavailable, match=said) as refused:
            await Collector(repo).run(NOW)
        assert refused.value.kind == "clock_skew"
        assert "NTP" in refused.value.remedy
        assert bodies(memory) == before
        assert (await Collector(repo).run(api.Collect(dry_run=True))).heads == 1  # looking does no harm


async def test_b43_five_minutes_are_allowed(memory, clock):
    async with opened(memory, VirtualClock(clock.now() + 299)) as repo:
        assert (await Collector(repo).run(NOW)).epoch == 3


# --- dry runs ---------------------------------------------------------------------------------------------------------


async def test_a_dry_run_says_of_each_thing_why_it_goes(repo, memory, clock, shelf):
    async with opened(memory, clock, SeededIds(7), history=0) as short:
        await commit(short, shelf, "grown", range(8), 0, NS)
        await commit(short, shelf, "grown", range(12), 1, NS)  # its first manifest is superseded
    await commit(repo, shelf, "expiring", range(100, 108), 0, NS, ttl=10)
    await commit(repo, shelf, "deleted", range(200, 208), 0, NS)
    await repo.sessions.delete("default", "deleted")
    live = next(key for key in bodies(memory) if "/blocks/" in key and key.endswith("1"))
    older = live[:-10] + f"{0:010d}"
    for key in (older, garbage(1)):
        await memory.put(key, b"12345", CREATE)
    clock.advance(11)
    before, told = bodies(memory), []
    done = await Collector(repo).run(api.Collect(dry_run=True, now=True), report=told.append)
    assert bodies(memory) == before
    assert done.examples == told
    found = {(each.kind, each.reason): [one for one in told if (one.kind, one.reason) == (each.kind, each.reason)] for each in told}
    assert {name: len(each) for name, each in found.items()} == {
        ("session", "expired"): 1,
        ("manifest", "expired"): 1,
        ("manifest", "superseded"): 1,
        ("manifest", "orphan"): 1,
        ("block", "expired"): 2,
        ("block", "superseded"): 1,
        ("block", "unnamed"): 3,
    }
    assert done.reasons == {"expired": 4, "superseded": 2, "orphan": 1, "unnamed": 3}
    (older_found,) = found["block", "superseded"]
    assert (older_found.key, older_found.gen, older_found.size) == (older, 0, 5)
    (session,) = found["session", "expired"]
    assert session.size == sum(each.size for each in found["block", "expired"])
    assert session.key.startswith("r/heads/default/")

    gone = await Collector(repo).run(NOW)
    assert {each.key for each in told if each.kind in {"block", "manifest"}} == before.keys() - bodies(memory).keys()
    assert (gone.blocks_deleted, gone.manifests_deleted, gone.reasons) == (done.blocks_deleted, done.manifests_deleted, {})


async def test_a_dry_run_remembers_a_hundred_examples_and_tells_of_all(repo, memory):
    for number in range(250):
        await memory.put(garbage(number), b"x", CREATE)
    told = []
    done = await Collector(repo).run(api.Collect(dry_run=True, now=True), report=told.append)
    assert (len(told), len(done.examples), done.reasons) == (250, 100, {"unnamed": 250})


# --- remembering ------------------------------------------------------------------------------------------------------


async def test_what_did_not_change_costs_only_its_line_in_the_listing(store, clock, shelf, memory):
    async with opened(memory, clock, SeededIds(3)) as node:
        for session in range(20):
            await commit(node, shelf, f"s{session}", range(session * 100, session * 100 + 16), 0, NS)
        async with opened(store, clock, cached_sessions=1, cached_manifests=1) as repo:
            collector = Collector(repo)
            await collector.run(api.Collect())
            store.requests.clear()
            assert (await collector.run(api.Collect())).blocks_kept == 80
            asked = [entry for entry in store.requests if "/heads/" in entry.key or "/manifests/" in entry.key]
            assert [entry.verb for entry in asked] == ["list", "list"]

            await commit(node, shelf, "s3", range(300, 320), 1, NS)
            store.requests.clear()
            assert (await collector.run(NOW)).blocks_kept == 81
            asked = [entry.verb for entry in store.requests if "/heads/" in entry.key or "/manifests/" in entry.key]
            assert sorted(asked) == [
                "delete",
                "get",
                "get",
                "list",
                "list",
                "put",
            ]  # deleted: the manifest of an attempt that met the seal
            assert broken(bodies(memory), repo.root.keys) == []


async def test_a_remembered_head_still_expires_and_ends(repo, memory, clock, shelf):
    collector = Collector(repo)
    await commit(repo, shelf, "s", range(8), 0, NS, ttl=60)
    assert (await collector.run(NOW)).sealed == 1
    clock.advance(61)
    assert (await collector.run(NOW)).expired == 1
    await collector.run(NOW)
    await collector.run(NOW)
    head = next(parse(body, Head, key) for key, body in bodies(memory).items() if "/heads/" in key)
    assert head.dead
    assert len(head.recent) == head.swaps  # what is remembered without its write ids was not swapped in


# --- accounting -------------------------------------------------------------------------------------------------------


async def test_what_is_alive_is_counted_once_by_tenant_and_namespace(repo, memory, shelf):
    other = tiny("acme")
    for namespace in (NS, other):
        await repo.put_namespace(namespace)
    await commit(repo, shelf, "a", range(16), 0, NS)
    await repo.sessions.fork("default", "a", "", "", "b")
    await commit(repo, shelf, "c", range(8), 0, other)
    await memory.put(garbage(1), b"x", CREATE)
    done = await Collector(repo).run(api.Collect())
    sizes = {
        namespace.id: [len(body) for key, body in bodies(memory).items() if f"/blocks/{namespace.id}/" in key]
        for namespace in (NS, other)
    }
    assert done.usage == [
        api.Usage(tenant="default", namespace=NS.id, blocks=4, bytes=sum(sizes[NS.id]) - 1),
        api.Usage(tenant="acme", namespace=other.id, blocks=2, bytes=sum(sizes[other.id])),
    ]
    assert done.live_bytes == sum(usage.bytes for usage in done.usage)
    hint = await read_hint(repo.root, repo.root.keys.usage_hint, UsageHint)
    assert hint is not None
    assert hint.usage == done.usage


# --- the limit --------------------------------------------------------------------------------------------------------


async def test_over_the_limit_the_least_useful_sessions_go_and_never_a_pinned_one(repo, memory, clock, shelf):
    for index, session in enumerate(["old", "pinned", "middle", "new"]):
        await commit(repo, shelf, session, range(index * 100, index * 100 + 16), 0, NS, ttl=0)
        if session == "pinned":
            await repo.sessions.pin("default", "pinned")
        clock.advance(3600)
    size = (await repo.sessions.get("default", "old")).bytes
    collector = Collector(repo, CollectSettings(max_bytes=2 * size + 1))
    planned = await collector.run(api.Collect(dry_run=True))
    done = await collector.run(NOW)
    assert (planned.evicted, done.evicted, done.live_bytes) == (2, 2, 4 * size)
    assert [doomed.reason for doomed in planned.examples] == ["capacity", "capacity"]
    assert {session.id for session in (await repo.sessions.list("default", "", "", 10)).sessions} == {"pinned", "new"}
    after = await collector.run(NOW)
    assert (after.evicted, after.live_bytes, after.bytes_deleted) == (0, 2 * size, 2 * size)
    assert broken(bodies(memory), repo.root.keys) == []


async def test_i5_a_session_that_is_used_meanwhile_is_not_evicted(memory, clock, shelf):
    """It is judged, then touched, then the swap comes: the swap is on the head as it is, and finds another session there."""
    store = Faults(memory, clock=clock)
    async with opened(store, clock) as repo, opened(memory, clock, SeededIds(2)) as node:
        await commit(node, shelf, "s", range(16), 0, NS, ttl=3600)
        clock.advance(600)
        held = Fault(action="stall", verb="list", key="r/blocks/*")
        store.script.append(held)
        collecting = asyncio.create_task(Collector(repo, CollectSettings(max_bytes=1)).run(api.Collect()))
        await until(lambda: not held.times)
        await node.sessions.touch("default", "s")
        store.release.set()
        assert (await collecting).evicted == 0
        assert (await node.sessions.get("default", "s")).tokens == 16
        assert (
            await Collector(repo, CollectSettings(max_bytes=1)).run(api.Collect())
        ).evicted == 1  # judged anew, and the only one


async def test_an_eviction_whose_answer_is_lost_counts_once(repo, store, shelf):
    await commit(repo, shelf, "s", range(16), 0, NS, ttl=0)
    collector = Collector(repo, CollectSettings(max_bytes=1))
    store.script.append(Fault(action="lost", verb="put", key="r/heads/*", skip=1))  # the first one seals
    assert (await collector.run(api.Collect())).evicted == 1


def test_a_sessions_worth_grows_with_what_it_saves_and_fades_with_idleness():
    full = worth(1000, 32, 1 << 20, 0)
    assert worth(1000, 32, 1 << 20, 6 * 3600) == full - 1  # half as likely to return
    assert worth(2000, 32, 1 << 20, 0) == full + 1
    assert worth(1000, 32, 1 << 21, 0) == full - 1
    assert worth(0, 0, 0, -5) == 0


def test_last_use_is_the_last_version_or_renewal():
    assert last_used(Branch(seq=1, at=100, ttl=60, expires=500)) == 440
    assert last_used(Branch(seq=1, at=450, ttl=60, expires=500)) == 450
    assert last_used(Branch(seq=1, at=450)) == 450


def test_the_least_valuable_of_any_number_are_kept_in_bounded_memory():
    least = LeastWorth(limit=100)
    for index in range(1000):
        branch = Branch(seq=index)
        value = float((index * 379) % 1000)
        least.add(value, Candidate(head=f"h{index % 7}", branch=str(index), judged=standing(branch), nbytes=10))
    chosen = [candidate for each in least.choose(45).values() for candidate in each]
    assert sorted((int(candidate.branch) * 379) % 1000 for candidate in chosen) == [0, 1, 2, 3, 4]
    assert sum(map(len, least.choose(10**9).values())) == 100
    assert least.choose(0) == {}


# --- reaping ----------------------------------------------------------------------------------------------------------


async def test_r11_reap_takes_dead_heads_after_a_week_and_nothing_else(repo, memory, clock, shelf):
    for session in ("gone", "alive", "again"):
        await commit(repo, shelf, session, range(8), 0, NS, ttl=0)
    await repo.sessions.delete("default", "gone")
    await repo.sessions.delete("default", "again")
    collector = Collector(repo)
    for _ in range(3):
        await collector.run(NOW)
    await commit(repo, shelf, "again", range(8), 0, NS, ttl=0)
    reap = api.Collect(reap=True)
    clock.advance(REAP_S - 60)
    assert (await collector.run(reap)).reaped == 0
    clock.advance(61)
    assert (await collector.run(api.Collect())).reaped == 0
    planned = await collector.run(api.Collect(reap=True, dry_run=True))
    assert [(doomed.kind, doomed.reason) for doomed in planned.examples] == [("head", "dead")] * 2
    assert (await collector.run(reap)).reaped == 2
    assert (count(memory, "heads"), count(memory, "names")) == (2, 3)
    assert (await collector.run(reap)).reaped == 0
    with pytest.raises(Gone):
        await repo.sessions.get("default", "gone")
    for session in ("alive", "again"):
        assert (await repo.sessions.get("default", session)).tokens == 8
    assert (await commit(repo, shelf, "gone", range(8), 0, NS)).version == 1
    assert broken(bodies(memory), repo.root.keys) == []


# --- stopping and going on --------------------------------------------------------------------------------------------


async def test_a_collection_that_died_in_its_sweep_goes_on_from_its_bookmark(memory, clock, shelf):
    """65 pages into a sweep the process dies; the next run of that epoch begins behind the bookmark, with the count so far."""
    async with opened(memory, clock, SeededIds(2)) as node:
        await node.put_namespace(NS)
        await commit(node, shelf, "s", range(16), 0, NS)
        for _ in range(2):
            await node.epochs.advance(await node.epochs.read())
        keys = [garbage(number, 3) for number in range(66_000)]
        template = (b"x", next(meta for _, meta in memory._objects.values()))
        for key in keys:  # young: it stays, so that listings are long
            memory._objects[key] = (b"x", type(template[1])(key, 1, '"x"', clock.now()))
        dying = Faults(memory, [Fault(action="crash-before", verb="list", key="r/blocks/", skip=65)], clock=clock)
        async with opened(dying, clock, SeededIds(3)) as repo:
            with pytest.raises(Crash):
                await Collector(repo).run(api.Collect())
        hint = await read_hint(node.root, node.root.keys.collect_hint, CollectHint)
        assert hint is not None
        assert (hint.epoch, hint.after > garbage(0, 3), hint.collected) == (3, True, None)

        watched = Faults(memory, clock=clock)
        async with opened(watched, clock, SeededIds(4)) as repo:
            done = await Collector(repo).run(api.Collect())
        pages = [entry for entry in watched.requests if (entry.verb, entry.key) == ("list", "r/blocks/")]
        assert len(pages) == math.ceil((66_004 - 64_000) / 1000)
        assert done.usage[0].blocks == 4
        after = await read_hint(node.root, node.root.keys.collect_hint, CollectHint)
        assert after is not None
        assert (after.after, after.collected) == ("", done)


async def test_a_bookmark_of_another_epoch_or_nonsense_counts_for_nothing(repo, memory):
    await memory.put(garbage(1), b"x", CREATE)
    key = repo.root.keys.collect_hint
    for hint in (
        sealed(b'{"v":1,"at":0,"epoch":2,"after":"r/blocks/zzz"}', CollectHint, key),
        sealed(b'{"v":9}', CollectHint, key),
        b"nonsense",
        sealed(b'{"v":1,"at":0,"epoch":5,"after":"x"}', CollectHint, key),
        sealed(b'{"v":1,"at":0,"epoch":5,"after":"r/blocks/yyy"}', CollectHint, key).replace(b"yyy", b"zzz"),
    ):
        await memory.delete([key])
        await memory.put(key, hint, CREATE)
        await Collector(repo).run(NOW)
    assert count(memory, "blocks") == 0


@pytest.mark.parametrize("verb", ["get", "put", "list", "delete"])
async def test_a_collection_may_die_at_any_request_and_is_simply_started_again(clock, shelf, verb):
    for skip in range(40):
        memory = MemoryStore(clock)
        async with opened(memory, clock, SeededIds(2)) as node:
            await commit(node, shelf, "s", range(16), 0, NS)
            await commit(node, shelf, "t", range(100, 116), 0, NS)
            await node.sessions.delete("default", "t")
            dying = Faults(memory, clock=clock)
            died = True
            async with opened(dying, clock, SeededIds(3)) as repo:
                dying.script.append(Fault(action="crash-after", verb=verb, skip=skip))
                try:
                    await Collector(repo).run(NOW)
                    died = False
                except Crash:
                    pass
            assert broken(bodies(memory), node.root.keys) == []
            done = await Collector(node).run(NOW)
            assert (count(memory, "blocks"), done.live_bytes > 0) == (4, True)
            assert (await node.sessions.get("default", "s")).tokens == 16
        if not died:
            return
    pytest.fail("no run came to its end")


async def test_another_nodes_fresh_collection_is_noticed(repo, memory, clock):
    async with opened(memory, clock, SeededIds(2)) as other:
        assert not await Collector(repo).fresh(100)
        await Collector(other).run(api.Collect())
        assert await Collector(repo).fresh(100)
        clock.advance(101)
        assert not await Collector(repo).fresh(100)


async def test_a_hint_that_cannot_be_written_changes_nothing(repo, store, memory):
    await memory.put(garbage(1), b"x", CREATE)
    store.script.append(Fault(action="before", verb="put", key="r/hints/*", times=9))
    assert (await Collector(repo).run(NOW)).blocks_deleted == 1


async def test_progress_is_told_page_by_page(repo, memory, shelf):
    await commit(repo, shelf, "s", range(16), 0, NS)
    for number in range(1500):
        await memory.put(garbage(number), b"x", CREATE)
    seen = []
    await Collector(repo).run(
        NOW, watch=lambda progress: seen.append((progress.phase, progress.heads, progress.listed, progress.deleted))
    )
    assert seen[0] == ("heads", 1, 1, 0)
    assert [each[0] for each in seen] == ["heads", "manifests", "blocks", "blocks"]
    assert seen[-1] == ("blocks", 1, 1 + 1 + 1504, 1500)
