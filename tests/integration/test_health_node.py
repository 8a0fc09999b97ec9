"""A node whose store is slow, busy, dead, or refuses it: what readers and writers get, and what readiness says."""

import asyncio
import errno
import threading
import time
from contextlib import asynccontextmanager

import pytest
from fakes.kv import links_of, namespace, payload, publish

from kvstore import api, codec
from kvstore.clock import SystemClock, VirtualClock
from kvstore.config import load
from kvstore.errors import KVTierError, Unavailable
from kvstore.ids import Shard
from kvstore.node import Node
from kvstore.objects import Fault, Faults, MemoryStore, S3Settings, S3Store, hedge
from kvstore.objects.credentials import Credentials
from kvstore.objects.hedge import HedgeSettings
from kvstore.server.metrics import Metrics

NS = namespace()
FOR_EVER = 1_000_000


@asynccontextmanager
async def node(store, tmp_path=None, **flags):
    base = {"dram.size": "8MiB", "node.listen": "", "limits.drain": "1s"}
    if tmp_path is not None:
        base |= {"nvme.path": str(tmp_path / "nvme"), "nvme.size": "16MiB"}
    settings = load(flags=base | {name.replace("__", "."): value for name, value in flags.items()}).settings
    async with Node.open(settings, store=store) as opened:
        yield opened.service


async def call(service, name, request=None):
    return await service.call("default", name, request or api.Nothing())


async def register(service):
    await call(service, "put_namespace", api.PutNamespace(namespace=NS.id, fields=NS))


async def saved(store, tokens=160, session="s"):
    """A session that another node left in the bucket."""
    links = links_of(NS, tokens)
    async with node(store) as service:
        await register(service)
        await publish(service, "default", NS, links)
        await commit(service, links, session=session)
    return links


async def commit(service, links, base=0, session="s", durability="bucket"):
    request = api.Commit(id=session, namespace=NS.id, base_version=base, blocks=list(links), durability=durability)
    return await call(service, "commit", request)


async def lookup(service, links, **options):
    return await call(service, "lookup", api.Lookup(namespace=NS.id, prefix_ids=[link.prefix_id for link in links], **options))


async def get(service, links, deadline_ms=250):
    """How many blocks came, verified, and why not more."""
    leases, miss = await service.plane.get("default", NS.id, Shard(), links, deadline_ms=deadline_ms, reach="bucket")
    for lease, link in zip(leases, links, strict=False):
        header = codec.layout(NS, Shard(), link.tokens).header_bytes
        assert bytes(lease.view[header:]) == payload(link, lease.size - header)
        lease.release()
    return len(leases), miss


async def degraded(service):
    return (await call(service, "ready")).degraded


async def until(condition, seconds=20):
    """The condition's first true value."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                if value := await condition():
                    return value
            except Unavailable:
                pass
            await asyncio.sleep(0.02)


# B46


async def test_b46_with_30_s_of_latency_look_ups_and_reads_are_misses_within_their_deadline():
    faults = Faults(MemoryStore())
    links = await saved(faults)
    async with node(faults) as service:
        faults.script.append(Fault(action="slow", seconds=30, times=FOR_EVER))
        begun = time.monotonic()
        assert (await lookup(service, links)).run == 0  # not even the namespace is known: that is the bucket's to say, too
        assert await get(service, links) == (0, "timeout")
        await register(service)  # an engine starts all the same
        assert (await lookup(service, links)).run == 0
        assert await get(service, links) == (0, "timeout")
        assert time.monotonic() - begun < 15  # four deadlines of 250 ms, and two seconds for the namespace; not 30 s each
        stats = await call(service, "stats")
        assert stats.reads == {"lookup miss": 2, "get miss": 2}
        assert stats.tokens_missed == {"timeout": 2 * 160}
        assert stats.leases == 0
        assert (await call(service, "health")).ok
        assert (await call(service, "ready")).ok  # a tier never fails a request


async def test_b46_a_slow_store_asked_with_short_deadlines_comes_to_hit():
    faults = Faults(MemoryStore())
    links = await saved(faults)
    async with node(faults) as service:
        await register(service)
        faults.script.append(Fault(action="slow", seconds=0.3, times=FOR_EVER))
        assert (await lookup(service, links, deadline_ms=20)).run == 0

        async def found():
            return (await lookup(service, links, deadline_ms=20)).run == len(links)

        await until(found)
        assert await get(service, links, 20) == (0, "timeout")

        async def warm():
            return await get(service, links, 20) == (len(links), "")

        await until(warm)
        assert await get(service, links, 1) == (len(links), "")
        stats = await call(service, "stats")
        assert (stats.leases, stats.tiers["bucket"].hits) == (0, len(links))  # each was fetched once
        assert stats.tiers["dram"].tokens >= 160


async def test_b46_a_hundred_clients_that_retry_send_at_most_twice_the_requests():
    faults = Faults(MemoryStore())
    links = await saved(faults)
    async with node(faults) as service:
        await register(service)
        faults.script.append(Fault(action="busy", times=FOR_EVER))
        before = len(faults.requests)

        async def client(n):
            for _ in range(5):
                with pytest.raises(Unavailable):
                    await call(service, "get_session", api.OfSession(id=f"s{n}", namespace=NS.id))
                assert await get(service, [links[n % 10]], 100) in [(0, "unavailable"), (0, "timeout")]

        await asyncio.gather(*(client(n) for n in range(100)))
        assert len(faults.requests) - before <= 200  # of 1,000 calls
        stats = await call(service, "stats")
        assert stats.bucket.breaker != "closed"
        assert stats.bucket.refused > 0


async def test_b46_slow_down_inside_a_200_is_an_error(fake_s3):
    async with s3(fake_s3) as store, node(store) as service:
        await register(service)
        fake_s3.on("LIST", times=FOR_EVER, status=200, code="SlowDown")
        with pytest.raises(Unavailable) as caught:
            await call(service, "list_sessions", api.ListSessions())  # an empty page would be a lie
        assert "SlowDown" in caught.value.message
        assert (await call(service, "stats")).store_requests["list store_busy"] >= 1


@pytest.mark.parametrize("layers", [2, 96], ids=["small", "large"])
async def test_b46_a_server_that_stalls_costs_a_deadline_and_no_more(fake_s3, layers):
    """Small blocks come through obstore, large ones over sockets in threads."""
    go = threading.Event()
    ns = namespace(layers=layers, kv_heads=4, head_dim=32)
    links = links_of(ns, 32)
    async with s3(fake_s3) as store:
        async with node(store) as service:
            await call(service, "put_namespace", api.PutNamespace(namespace=ns.id, fields=ns))
            await publish(service, "default", ns, links)
            request = api.Commit(id="s", namespace=ns.id, base_version=0, blocks=links)
            await call(service, "commit", request)
        async with node(store) as service:
            await call(service, "put_namespace", api.PutNamespace(namespace=ns.id, fields=ns))
            fake_s3.on("*", times=FOR_EVER, until=go)
            try:
                begun = time.monotonic()
                for _ in range(3):
                    found = await call(
                        service, "lookup", api.Lookup(namespace=ns.id, prefix_ids=[link.prefix_id for link in links])
                    )
                    assert found.run == 0
                    leases, miss = await service.plane.get("default", ns.id, Shard(), links, deadline_ms=250, reach="bucket")
                    assert (leases, miss) == ([], "timeout")
                assert time.monotonic() - begun < 15  # six deadlines of 250 ms; the store's own would be 5 s for each
            finally:
                go.set()


async def test_a_read_slower_than_most_is_asked_for_again(monkeypatch):
    monkeypatch.setattr(hedge, "HedgeSettings", lambda: HedgeSettings(share=1, saved=1000))  # whatever this machine stalls on
    faults = Faults(MemoryStore())
    links = await saved(faults, 16 * 60)
    async with node(faults) as service:
        await register(service)
        assert await get(service, links[:50], 0) == (50, "")
        faults.script.append(Fault(action="stall", verb="get", key="blocks/*"))
        assert await get(service, links, 0) == (60, "")  # though that GET never ends
        stats = await call(service, "stats")
        assert stats.bucket.hedges_won >= 1
        assert f'kvtier_hedges_total{{outcome="won"}} {stats.bucket.hedges_won}.0' in exposed(stats)
        assert stats.leases == 0


# The breaker


async def test_a_dead_store_costs_readers_and_writers_nothing_and_is_found_again_by_itself():
    faults = Faults(MemoryStore())
    links = await saved(faults)
    fresh = links_of(NS, 64, first=5000)
    async with node(faults) as service:
        await register(service)
        faults.script.append(Fault(action="before", times=FOR_EVER))

        async def opened():
            await get(service, links[:1])
            return "breaker" in await degraded(service)

        await until(opened)
        sent = len(faults.requests)
        for _ in range(50):
            assert await get(service, links) == (0, "unavailable")
            assert (await lookup(service, links)).run == 0
        assert await publish(service, "default", NS, fresh) == [True] * 4  # the local tiers go on
        with pytest.raises(Unavailable, match="left alone"):
            await commit(service, fresh, session="t")
        assert len(faults.requests) - sent <= 6  # probes
        receipt = await commit(service, fresh, session="u", durability="dram")
        assert receipt.durability == "dram"
        stats = await call(service, "stats")
        assert (stats.commits["pending"], stats.tiers["bucket"].queued_bytes) == (1, 0)  # uploads are declined, not queued
        assert stats.tiers["bucket"].dropped >= 4
        page = exposed(stats)
        assert 'kvtier_breaker_state{state="closed"} 0.0' in page
        assert 'kvtier_commits_total{outcome="circuit_open"}' in page
        faults.script.clear()

        async def landed():
            return (await call(service, "get_session", api.OfSession(id="u"))).version == 1

        await until(landed)
        assert await get(service, links, 5000) == (len(links), "")
        assert "breaker" not in await degraded(service)


async def test_a_store_that_never_answers_is_given_up_though_every_deadline_is_short():
    faults = Faults(MemoryStore())
    links = await saved(faults)
    async with node(faults) as service:
        await register(service)
        breaker = service._signs.breaker
        breaker._settings = type(breaker._settings)(silence_s=0.2)
        service.plane.tiers("default").stack._flights._most = 0  # nothing lingers: each caller gives its request up
        faults.script.append(Fault(action="stall", times=FOR_EVER))

        async def opened():
            await get(service, links, 20)
            return breaker.state != "closed"

        await until(opened)
        begun = time.monotonic()
        assert await get(service, links, 60_000) == (0, "unavailable")
        assert time.monotonic() - begun < 20
        assert "nothing was answered" in (await degraded(service))["breaker"]


# What readiness names


@asynccontextmanager
async def s3(fake_s3, credentials=lambda: Credentials("key", "secret")):
    settings = S3Settings(bucket="bucket", endpoint=fake_s3.endpoint, timeout_s=5.0)
    async with S3Store.open(settings, credentials=credentials) as store:
        yield store


async def test_b50_three_faults_of_access_are_three_health_errors_and_never_a_silent_miss(fake_s3):
    keys = ["key"]
    async with s3(fake_s3, lambda: Credentials(keys[0], "secret")) as store:
        links = await saved(store)
        async with node(store) as service:
            await register(service)
            assert await degraded(service) == {}
            # 403 for an absent key: the principal lacks the right to list.
            fake_s3.on("*", "blocks/*", times=FOR_EVER, status=403, code="AccessDenied")
            assert await get(service, links, 5000) == (0, "unavailable")
            assert (await degraded(service))["bucket"].startswith("access_denied: ")
            fake_s3._acts.clear()

            fake_s3.keys = {"key": "RequestTimeTooSkewed"}
            assert await get(service, links, 5000) == (0, "unavailable")
            assert "clock_skew: " in (await degraded(service))["bucket"]

            fake_s3.keys = {"key": "InvalidAccessKeyId", "new": ""}
            assert await get(service, links, 5000) == (0, "unavailable")
            assert "bad_credentials: " in (await degraded(service))["bucket"]
            assert (await call(service, "ready")).ok
            assert "breaker" not in await degraded(service)  # the store answers: it is not left alone

            keys[0] = "new"  # rotated; no restart

            async def back():
                return await get(service, links, 5000) == (len(links), "")

            await until(back)
            left = (await degraded(service)).get("bucket", "")
            assert "bad_credentials" not in left
            assert "clock_skew" not in left
            outcomes = (await call(service, "stats")).store_requests
            assert {"get access_denied", "get clock_skew", "get bad_credentials"} <= set(outcomes)


async def test_a_clock_far_from_the_stores_is_named(monkeypatch):
    monkeypatch.setattr("kvstore.service.bucket._FIRST_WAIT", 0.01)
    far = VirtualClock(SystemClock().now() + 3600)
    async with node(MemoryStore(far)) as service:

        async def named():
            return (await degraded(service)).get("clock", "")

        assert "behind the store's" in await until(named)
        assert (await call(service, "ready")).ok


async def test_b40_a_disk_that_is_full_is_named_and_reads_go_on(tmp_path, monkeypatch):
    links = links_of(NS, 64)
    async with node(MemoryStore(), tmp_path) as service:
        await register(service)
        disk = service.plane.tiers("default").stack.disk

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(disk._slab, "write", full)
        assert await publish(service, "default", NS, links) == [True] * 4

        async def named():
            return (await degraded(service)).get("nvme", "")

        assert "No space left on device" in await until(named)
        assert await get(service, links) == (4, "")

        async def counted():
            return 'kvtier_tier_errors_total{tier="nvme"} 4.0' in exposed(await call(service, "stats"))

        await until(counted)


async def test_a_full_write_queue_drops_counts_and_is_named():
    faults = Faults(MemoryStore())
    links = links_of(NS, 16 * 40)
    async with node(faults, limits__write_behind="100KB") as service:
        await register(service)
        faults.script.append(Fault(action="stall", verb="put", times=FOR_EVER))
        assert await publish(service, "default", NS, links) == [True] * 40  # nobody who publishes waits
        stats = await call(service, "stats")
        bucket = stats.tiers["bucket"]
        size = (stats.tiers["dram"].used) // 40
        assert 0 < bucket.queued_bytes <= 100_000
        assert bucket.dropped == 40 - bucket.queued_bytes // size > 0
        assert stats.queued_bytes == bucket.queued_bytes
        assert "dropped" in (await degraded(service))["write_queue"]
        page = exposed(stats)
        assert f'kvtier_tier_queued_bytes{{tier="bucket"}} {bucket.queued_bytes}.0' in page
        assert f'kvtier_tier_dropped_total{{tier="bucket"}} {bucket.dropped}.0' in page
        faults.release.set()

        async def drained():
            return (await call(service, "stats")).queued_bytes == 0

        await until(drained)


async def test_healthz_and_readyz_never_touch_the_store():
    faults = Faults(MemoryStore())
    async with node(faults) as service:
        await asyncio.sleep(0.05)  # the first check of the bucket is over
        before = len(faults.requests)
        faults.script.append(Fault(action="stall", times=FOR_EVER))
        for _ in range(20):
            assert (await call(service, "health")).ok
            assert (await call(service, "ready")).ok
            await call(service, "stats")
        assert len(faults.requests) == before


async def test_metrics_tell_what_readers_got_from_where():
    store = MemoryStore()
    links = await saved(store)
    async with node(store) as service:
        await register(service)
        assert await get(service, links, 0) == (10, "")
        assert await get(service, links, 0) == (10, "")
        assert await get(service, links_of(NS, 32, first=9000), 0) == (0, "absent")
        await lookup(service, links)
        page = exposed(await call(service, "stats"))
    for line in (
        'kvtier_tier_tokens_total{tier="bucket"} 160.0',
        'kvtier_tier_tokens_total{tier="dram"} 160.0',
        'kvtier_tier_read_seconds_count{tier="bucket"} 10.0',
        'kvtier_tier_read_seconds_bucket{le="+Inf",tier="bucket"} 10.0',
        'kvtier_tier_misses_total{reason="absent",tier="bucket"}',
        'kvtier_reads_total{op="get",outcome="complete"} 2.0',
        'kvtier_reads_total{op="get",outcome="miss"} 1.0',
        'kvtier_reads_total{op="lookup",outcome="complete"} 1.0',
        'kvtier_missed_tokens_total{reason="absent"} 32.0',
        'kvtier_breaker_state{state="closed"} 1.0',
        'kvtier_hedges_total{outcome="sent"} 0.0',
        'kvtier_store_requests_total{op="get",outcome="ok"}',
    ):
        assert line in page


def exposed(stats) -> str:
    return Metrics().expose(stats, "")[0].decode()


# B51


class DeletesMidRead(MemoryStore):
    """When one block is read, another is deleted, as a collection may do."""

    trigger = victim = ""

    async def get(self, key, **options):
        if self.trigger and self.trigger in key:
            gone = [name for name in self._objects if self.victim in name and name.startswith("blocks/")]
            assert len(gone) == 1
            self.trigger = ""
            await self.delete(gone)
        return await super().get(key, **options)


@pytest.mark.parametrize("way", ["get", "restore"])
async def test_b51_block_60_of_100_deleted_mid_read_gives_59_blocks(way):
    store = DeletesMidRead()
    links = await saved(store, 1600)
    assert len(links) == 100
    async with node(store) as service:
        await register(service)
        store.trigger, store.victim = links[29].prefix_id, links[59].prefix_id
        if way == "get":
            assert await get(service, links, 0) == (59, "absent")
        else:
            started = await call(service, "restore", api.Restore(id="s"))
            status = await call(service, "get_restore", api.GetRestore(restore_id=started.restore_id, wait_ms=20_000))
            assert (status.state, status.staged_tokens) == ("partial", 59 * 16)
            assert await get(service, links, 0) == (59, "absent")  # reported == delivered
        assert (await call(service, "stats")).leases == 0


async def test_b51_a_writer_stopped_past_its_epochs_is_refused_and_its_redo_lands_at_the_new_one():
    inner = MemoryStore()
    faults = Faults(inner)
    links = links_of(NS, 64)
    async with node(faults) as writer:
        await register(writer)
        await publish(writer, "default", NS, links)
        await commit(writer, links[:2])
        faults.script.append(Fault(action="stall", verb="put", key="*heads/*"))
        second = asyncio.create_task(commit(writer, links, base=1))

        async def stopped():
            return faults.script[-1].times == 0

        await until(stopped)
        async with node(inner) as other:  # two collections, two epochs each
            for _ in range(2):
                await call(other, "collect", api.Collect(now=True))
            epoch = (await call(other, "collect", api.Collect(dry_run=True))).epoch
        faults.release.set()
        receipt = await second
        assert (receipt.version, receipt.tokens, receipt.cut) == (2, 64, False)
        assert any(entry.verb == "put" and "heads/" in entry.key and entry.outcome == "Refused" for entry in faults.requests)
    gens = {key.rpartition("/")[2].partition("-")[0] for key in inner._objects if key.startswith("manifests/")}
    assert f"{epoch:010d}" in gens
    async with node(inner) as reader:
        await call(reader, "collect", api.Collect(now=True))
        await call(reader, "collect", api.Collect(now=True))
        started = await call(reader, "restore", api.Restore(id="s"))
        status = await call(reader, "get_restore", api.GetRestore(restore_id=started.restore_id, wait_ms=20_000))
        assert (status.state, status.version, status.staged_tokens) == ("ready", 2, 64)
        assert await get(reader, links, 0) == (4, "")


async def test_whatever_a_store_does_a_caller_gets_a_miss_or_an_error_of_kvtier():
    faults = Faults(MemoryStore())
    links = await saved(faults)
    async with node(faults) as service:
        await register(service)
        for action in ("before", "lost", "busy", "corrupt"):
            faults.script[:] = [Fault(action=action, times=FOR_EVER)]
            assert (await get(service, links, 200))[0] == 0
            with pytest.raises(KVTierError) as caught:
                await call(service, "get_session", api.OfSession(id="s"))
            assert caught.value.kind in {"unavailable", "store_busy", "circuit_open", "corrupt"}
