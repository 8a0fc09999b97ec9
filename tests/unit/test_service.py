"""A node's calls, on the memory store: durability, restores, tenants, a bucket that is out of reach."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
from fakes.kv import links_of, namespace, payload, publish

from kvstore import api, codec
from kvstore.config import Settings, Tenant, load
from kvstore.errors import Conflict, Denied, Gone, Invalid, NotFound, Unavailable, Unsupported
from kvstore.ids import Shard
from kvstore.node import Node
from kvstore.objects import Fault, Faults, MemoryStore
from kvstore.server.metrics import Metrics
from tiering import DiskTier, Movers

NS = namespace()


def settings(tmp_path=None, tenants=(), **flags) -> Settings:
    base = {"dram.size": "8MiB", "node.listen": "", "limits.drain": "5s"}
    if tmp_path is not None:
        base |= {"nvme.path": str(tmp_path / "nvme"), "nvme.size": "16MiB"}
    loaded = load(flags=base | {name.replace("__", "."): value for name, value in flags.items()}).settings
    return msgspec.structs.replace(loaded, tenants={name: Tenant() for name in tenants})


@asynccontextmanager
async def node(store, tmp_path=None, *, ready=True, tenants=(), **flags):
    async with Node.open(settings(tmp_path, tenants, **flags), store=store) as opened:
        service = opened.service
        if ready:
            for tenant in tenants or ["default"]:
                fields = namespace(tenant=tenant)
                await service.call(tenant, "put_namespace", api.PutNamespace(namespace=fields.id, fields=fields))
        yield service


def commit_of(links, base=0, session="s", **fields) -> api.Commit:
    return api.Commit(id=session, namespace=fields.pop("namespace", NS.id), base_version=base, blocks=list(links), **fields)


async def ended(service, request, tenant="default"):
    started = await service.call(tenant, "restore", request)
    return await service.call(tenant, "get_restore", api.GetRestore(restore_id=started.restore_id, wait_ms=20_000))


async def test_a_session_outlives_its_node_and_comes_back_bit_by_bit():
    store = MemoryStore()
    links = links_of(NS, 40)  # two full blocks and one of eight tokens
    async with node(store) as service:
        assert await publish(service, "default", NS, links) == [True] * 3
        receipt = await service.call("default", "commit", commit_of(links, durability="bucket"))
        assert (receipt.version, receipt.tokens, receipt.durability, receipt.cut) == (1, 40, "bucket", False)
    async with node(store, ready=False) as service:  # another machine: it learns the namespace from the bucket
        status = await ended(service, api.Restore(id="s", model="tiny"))
        assert (status.state, status.version, status.staged_tokens) == ("ready", 1, 40)
        assert status.by_tier == {"bucket": status.bytes}
        leases, miss = await service.plane.get("default", NS.id, Shard(), links, deadline_ms=0, reach="dram")
        assert (len(leases), miss) == (3, "")
        for lease, link in zip(leases, links, strict=True):
            header = codec.layout(NS, Shard(), link.tokens).header_bytes
            assert bytes(lease.view[header:]) == payload(link, lease.size - header)
            lease.release()


async def test_dram_durability_answers_while_the_bucket_is_away_and_lands_later():
    faults = Faults(MemoryStore())
    links = links_of(NS, 32)
    async with node(faults) as service:
        assert await publish(service, "default", NS, links) == [True, True]
        faults.script += [Fault(action="before", verb="put", key="*heads/*", times=2)]
        receipt = await service.call("default", "commit", commit_of(links, durability="dram"))
        assert (receipt.version, receipt.durability) == (1, "dram")
        session = await service.call("default", "get_session", api.OfSession(id="s"))  # waits for it: reads its own writes
        assert (session.version, session.tokens) == (1, 32)
        stats = await service.call("default", "stats", api.Nothing())
        assert stats.commits["pending"] == 0


async def test_local_commits_of_one_session_land_in_order_and_a_stale_base_is_refused_at_once():
    store = MemoryStore()
    links = links_of(NS, 64)
    async with node(store) as service:
        await publish(service, "default", NS, links)
        for base in range(4):
            await service.call("default", "commit", commit_of(links[: base + 1], base, durability="dram"))
        with pytest.raises(Conflict) as caught:
            await service.call("default", "commit", commit_of(links[:1], 1, durability="dram"))
        assert caught.value.facts["current"] == 4
        session = await service.call("default", "get_session", api.OfSession(id="s"))
        assert (session.version, session.tokens) == (4, 64)
        versions = await service.call("default", "versions", api.OfSession(id="s"))
        assert [each.tokens for each in versions.versions if each.version] == [64, 48, 32, 16]


async def test_nvme_durability_needs_a_disk_and_is_replayed_by_the_next_life(tmp_path):
    faults = Faults(MemoryStore())
    links = links_of(NS, 48)
    async with node(faults) as service:
        await publish(service, "default", NS, links)
        with pytest.raises(Unsupported, match="nvme"):
            await service.call("default", "commit", commit_of(links, durability="nvme"))
    async with node(faults, tmp_path, limits__drain="1s") as service:
        faults.script += [Fault(action="before", verb="put", times=10_000)]
        await publish(service, "default", NS, links)
        receipt = await service.call("default", "commit", commit_of(links, durability="nvme"))
        assert receipt.durability == "nvme"
    assert not list(await keys(faults, "names/"))  # nothing reached the bucket
    faults.script.clear()
    async with node(faults, tmp_path, ready=False) as service:
        session = await until(lambda: service.call("default", "get_session", api.OfSession(id="s")))
        assert (session.version, session.tokens) == (1, 48)
        ready = await until(lambda: settled_ready(service))
        assert ready.ok
        assert "commits" not in ready.degraded
    async with node(faults, tmp_path, ready=False) as service:  # and not a third time
        await asyncio.sleep(0.05)
        assert (await service.call("default", "get_session", api.OfSession(id="s"))).version == 1


async def test_an_intent_that_cannot_be_read_stops_nobody(tmp_path):
    store = MemoryStore()
    async with Movers.open() as movers, DiskTier.open(tmp_path / "nvme", 16 << 20, movers) as disk:
        await disk.journal.put(b"1" * 32, b"from another century")
    async with node(store, tmp_path) as service:
        ready = await until(lambda: settled_ready(service))
        assert ready.ok
        stats = await service.call("default", "stats", api.Nothing())
        assert stats.commits["unreadable"] == 1


async def settled_ready(service):
    health = await service.call("default", "ready", api.Nothing())
    if health.degraded:
        raise NotFound("still degraded")
    return health


async def keys(store, prefix):
    return [meta.key async for page in store.list(prefix) for meta in page]


async def until(attempt, tries=1500):
    for _ in range(tries):
        try:
            return await attempt()
        except (NotFound, Unavailable):
            await asyncio.sleep(0.02)
    return await attempt()


async def test_a_bucket_out_of_reach_at_start_leaves_the_local_tiers_working():
    faults = Faults(MemoryStore())
    faults.script += [Fault(action="before", times=3)]
    links = links_of(NS, 32)
    async with node(faults) as service:
        health = await service.call("default", "ready", api.Nothing())
        assert "bucket" in health.degraded
        assert await publish(service, "default", NS, links) == [True, True]
        leases, miss = await service.plane.get("default", NS.id, Shard(), links, deadline_ms=0, reach="bucket")
        assert (len(leases), miss) == (2, "")
        for lease in leases:
            lease.release()
        with pytest.raises(Unavailable):
            await service.call("default", "get_session", api.OfSession(id="s"))
        receipt = await until(lambda: service.call("default", "commit", commit_of(links, durability="bucket")))
        assert receipt.version == 1
        assert "bucket" not in (await until(lambda: settled_ready(service))).degraded


async def test_stage_1_has_no_bucket_and_says_what_to_configure():
    links = links_of(NS, 32)
    async with node(None) as service:
        assert await publish(service, "default", NS, links) == [True, True]
        found = await service.call("default", "lookup", api.Lookup(namespace=NS.id, prefix_ids=[link.prefix_id for link in links]))
        assert (found.run, found.tiers) == (2, ["dram", "dram"])
        for name, request in (("commit", commit_of(links)), ("restore", api.Restore(id="s")), ("collect", api.Collect())):
            with pytest.raises(Unsupported, match=r"\[store\] url"):
                await service.call("default", name, request)


async def test_without_a_bucket_a_node_names_the_namespaces_that_it_was_told():
    async with node(None, tenants=("ann", "bob")) as service:
        for tenant in ("ann", "bob"):
            found = await service.call(tenant, "list_namespaces", api.Nothing())
            assert [(each.fields, each.blocks) for each in found.namespaces] == [(namespace(tenant=tenant), -1)]


async def test_b20_another_tenant_finds_nothing_and_learns_nothing():
    faults = Faults(MemoryStore())
    mine, theirs = namespace(tenant="a"), namespace(tenant="b")
    links = links_of(mine, 32)
    async with node(faults, tenants=("a", "b")) as service:
        await publish(service, "a", mine, links)
        await service.call("a", "commit", commit_of(links, namespace=mine.id, durability="bucket"))
        with pytest.raises(NotFound):
            await service.call("b", "get_session", api.OfSession(id="s"))
        assert (await service.call("b", "list_sessions", api.ListSessions())).sessions == []
        with pytest.raises(NotFound):  # as for a namespace that nobody ever made
            await service.plane.get("b", mine.id, Shard(), links, deadline_ms=0, reach="bucket")
        counts = []
        for tokens in (links_of(theirs, 32), links_of(theirs, 32, first=5000)):  # a's very tokens, then cold ones
            before = len(faults.requests)
            leases, miss = await service.plane.get("b", theirs.id, Shard(), tokens, deadline_ms=0, reach="bucket")
            assert (leases, miss) == ([], "absent")
            counts.append(len(faults.requests) - before)
        assert counts[0] == counts[1]
        assert service.plane.arena("a").fd != service.plane.arena("b").fd
        with pytest.raises(Denied, match="not served"):
            await service.call("c", "stats", api.Nothing())


async def test_b44_a_thousand_cancelled_restores_leave_no_lease():
    faults = Faults(MemoryStore())
    links = links_of(NS, 160)
    async with node(faults) as service:
        await publish(service, "default", NS, links)
        await service.call("default", "commit", commit_of(links, durability="bucket"))
    async with node(faults, ready=False) as service:
        for round_ in range(1000):
            started = await service.call("default", "restore", api.Restore(id="s"))
            for _ in range(round_ % 7):
                await asyncio.sleep(0)
            ended_ = await service.call("default", "cancel_restore", api.OfRestore(restore_id=started.restore_id))
            assert ended_.state in {"cancelled", "ready"}
        stats = await service.call("default", "stats", api.Nothing())
        assert (stats.leases, stats.restores) == (0, 0)
        assert (await ended(service, api.Restore(id="s"))).state == "ready"


async def test_a_restore_is_joined_while_it_runs_and_can_be_watched():
    faults = Faults(MemoryStore())
    links = links_of(NS, 64)
    async with node(faults) as service:
        await publish(service, "default", NS, links)
        await service.call("default", "commit", commit_of(links, durability="bucket"))
    async with node(faults, ready=False) as service:
        request = api.Restore(id="s", tokens=list(range(40)))
        first = await service.call("default", "restore", request)
        again = await service.call("default", "restore", request)
        assert first.restore_id == again.restore_id
        assert (first.state, first.version, first.bytes) == ("resolving", None, None)
        states = [status.state async for status in service.watch("default", first.restore_id)]
        assert states[0] == "resolving"
        assert states[-1] == "ready"
        last = await service.call("default", "get_restore", api.GetRestore(restore_id=first.restore_id))
        assert (last.tokens, last.staged_tokens) == (32, 32)  # whole blocks that the tokens spell
        with pytest.raises(NotFound):
            await service.call("default", "get_restore", api.GetRestore(restore_id="0" * 32))


async def test_a_restore_that_does_not_fit_in_memory_reports_the_part_that_does():
    store = MemoryStore()
    links = links_of(NS, 16 * 200)
    async with node(store, dram__size="8MiB") as service:
        await publish(service, "default", NS, links)
        receipt = await service.call("default", "commit", commit_of(links, durability="bucket"))
        assert receipt.tokens == 3200
    async with node(store, ready=False, dram__size="1MiB") as service:
        status = await ended(service, api.Restore(id="s"))
        assert status.state == "partial"
        assert 0 < status.staged_tokens < 3200
        assert "full" in status.error
        assert (await service.call("default", "stats", api.Nothing())).leases == 0


async def test_b45_a_restore_right_after_a_local_commit_delivers_what_it_reports():
    faults = Faults(MemoryStore())
    links = links_of(NS, 48)
    async with node(faults) as service:
        await publish(service, "default", NS, links)
        faults.script += [Fault(action="slow", verb="put", key="*heads/*", times=3, seconds=0.05)]
        await service.call("default", "commit", commit_of(links, durability="dram"))
        status = await ended(service, api.Restore(id="s"))
        assert (status.state, status.version, status.tokens, status.staged_tokens) == ("ready", 1, 48, 48)


async def test_b38_b51_blocks_deleted_behind_our_back_shorten_the_prefix():
    store = MemoryStore()
    links = links_of(NS, 80)
    async with node(store) as service:
        await publish(service, "default", NS, links)
        await service.call("default", "commit", commit_of(links, durability="bucket"))
    gone = [key for key in await keys(store, "blocks/") if links[3].prefix_id in key]
    assert len(gone) == 1
    await store.delete(gone)
    async with node(store, ready=False) as service:
        status = await ended(service, api.Restore(id="s"))
        assert (status.state, status.staged_tokens) == ("partial", 48)
        assert "absent" in status.error


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"blocks": []}, "blocks"),
        ({"base_version": -1}, "base_version"),
        ({"shards": ()}, "shards"),
        ({"shards": ("t0of1.p0of1.g0", "t0of1.p0of1.g0")}, "shards"),
        ({"shards": ("x",)}, "shard"),
        ({"write_id": "short"}, "write_id"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"labels": {"k": "v" * 300}}, "labels"),
        ({"id": "../x"}, "session id"),
        ({"id": ""}, "session id"),
    ],
)
async def test_a_wrong_commit_names_the_field(change, field):
    links = links_of(NS, 32)
    async with node(MemoryStore()) as service:
        with pytest.raises(Invalid) as caught:
            await service.call("default", "commit", msgspec.structs.replace(commit_of(links), **change))
        assert field in caught.value.message


async def test_only_the_last_block_may_be_partial():
    links = [*links_of(NS, 8), *links_of(NS, 32)]
    async with node(MemoryStore()) as service:
        with pytest.raises(Invalid, match=r"blocks\[0\]\.tokens"):
            await service.call("default", "commit", commit_of(links))


async def test_deleted_sessions_are_gone_and_their_names_are_free_again():
    links = links_of(NS, 32)
    async with node(MemoryStore()) as service:
        await publish(service, "default", NS, links)
        await service.call("default", "commit", commit_of(links, durability="bucket"))
        await service.call("default", "delete_session", api.OfSession(id="s"))
        with pytest.raises((Gone, NotFound)):
            await service.call("default", "get_session", api.OfSession(id="s"))
        receipt = await service.call("default", "commit", commit_of(links[:1], durability="bucket"))
        assert (receipt.version, receipt.tokens) == (1, 16)


@pytest.mark.parametrize("deadline_ms", [0, 5000])
async def test_a_fresh_node_finds_the_blocks_of_a_session_that_grew_in_earlier_epochs(deadline_ms):
    """Nobody told it where they are: a get, or a look-up, lists the first one that it misses."""
    store = MemoryStore()
    links = links_of(NS, 64)
    async with node(store) as service:
        await publish(service, "default", NS, links)
        await service.call("default", "commit", commit_of(links, durability="bucket"))
        await service.call("default", "collect", api.Collect(now=True))
    fresh, asked = Faults(store), [*links, *links_of(NS, 320, first=1000)]
    async with node(fresh, ready=False) as service:
        leases, miss = await service.plane.get("default", NS.id, Shard(), asked, deadline_ms=deadline_ms, reach="bucket")
        assert (len(leases), miss) == (4, "absent")
        for lease, link in zip(leases, links, strict=True):
            header = codec.layout(NS, Shard(), link.tokens).header_bytes
            assert bytes(lease.view[header:]) == payload(link, lease.size - header)
            lease.release()
        listed = [entry for entry in fresh.requests if entry.verb == "list" and "blocks/" in entry.key]
        assert len(listed) == 2  # the first block, and the first one that is nowhere
        assert (await service.call("default", "stats", api.Nothing())).leases == 0
    async with node(fresh, ready=False) as service:
        question = api.Lookup(namespace=NS.id, prefix_ids=[link.prefix_id for link in asked], deadline_ms=5000)
        assert (await service.call("default", "lookup", question)).run == 4


async def test_a_get_of_a_cold_chain_costs_one_request_more_than_reading_it():
    fresh = Faults(MemoryStore())
    async with node(fresh) as service:
        cold, before = links_of(NS, 1024), len(fresh.requests)
        leases, miss = await service.plane.get("default", NS.id, Shard(), cold, deadline_ms=5000, reach="bucket")
        assert (leases, miss) == ([], "absent")
        assert [entry.verb for entry in fresh.requests[before:]].count("list") == 1
        before = len(fresh.requests)
        shards = [f"t{rank}of8.p0of1.g0" for rank in range(8)]
        question = api.Lookup(namespace=NS.id, prefix_ids=[link.prefix_id for link in cold], shards=shards, deadline_ms=5000)
        assert (await service.call("default", "lookup", question)).run == 0
        assert len(fresh.requests) - before <= 3  # what one rank lacks is not asked for the others


async def test_i7_damage_on_the_way_of_a_register_is_counted_in_stats_and_metrics():
    store = MemoryStore()
    async with node(store) as service:
        links = links_of(NS, 40)
        await publish(service, "default", NS, links)
        await service.call("default", "commit", commit_of(links, durability="bucket"))
    faults = Faults(store, [Fault(action="corrupt", verb="get", key="heads/*", at=200, bits=1)])
    async with node(faults, ready=False) as service:
        status = await ended(service, api.Restore(id="s", namespace=NS.id))
        assert (status.state, status.staged_tokens) == ("ready", 40)
        stats = await service.call("default", "stats", api.Nothing())
        assert stats.bucket.corrupt_reads == {"heads": 1}
        page, _ = Metrics().expose(stats, "text/plain")
        assert 'kvtier_store_corrupt_reads_total{folder="heads"} 1.0' in page.decode()
