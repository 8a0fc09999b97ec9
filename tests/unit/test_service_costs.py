"""What is counted for whom, and what is made of it."""

from collections import Counter

import pytest
from fakes.kv import links_of, namespace, publish
from fakes.service import BLOCK, ME, NS, links, node, read, saved, stats

from kvstore import api
from kvstore.access import Access
from kvstore.accounts import MOST, OTHER, Accounts
from kvstore.config import PricesSettings, load
from kvstore.errors import Invalid
from kvstore.ids import Shard
from kvstore.objects import MemoryStore
from kvstore.server.acting import act
from kvstore.server.cost_metrics import cost_metrics
from kvstore.server.metrics import Metrics
from kvstore.service.costs import Costs
from kvstore.service.registry import Registry

PRICED = {
    "prices__source": "a test",
    "prices__put_1000": "5",
    "prices__get_1000": "0.4",
    "prices__list_1000": "5",
    "prices__gb_month": "23",
    "prices__gb_egress": "90",
    "prices__gpu_hour": "3600",
    "prices__prefill": "16",
}


def of(found, namespace_id, tenant=ME):
    [row] = [row for row in found.cost if (row.tenant, row.namespace) == (tenant, namespace_id)]
    return row


async def test_requests_and_bytes_go_to_the_namespace_they_were_made_for():
    store, chain = MemoryStore(), links(4)
    async with node(store) as service:
        assert all(await publish(service, ME, NS, chain))
        await service.call(ME, "commit", api.Commit(id="s", namespace=NS.id, base_version=0, blocks=chain, durability="bucket"))
        await service.call(ME, "list_sessions", api.ListSessions())
        found = await stats(service)
    mine, sessions = of(found, NS.id), of(found, "")
    assert mine.requests["put"] >= 4 + 2  # blocks, manifest, head
    assert mine.sent >= 4 * BLOCK * 2 * 2 * 2 * 16 * 4  # KV of float32: layers, K and V, heads, width
    assert mine.written >= mine.sent * 0.9
    assert sessions.requests["list"] >= 1
    assert of(found, "", tenant="").requests["put"] >= 1  # the probe and the root are nobody's
    counted = sum((Counter(row.requests) for row in found.cost), Counter())
    sent = Counter()
    for key, count in found.store_requests.items():
        sent[key.partition(" ")[0]] += count
    assert counted == sent  # each once


async def test_what_is_read_counts_by_tier_and_a_rank_more_counts_no_token_twice():
    store = MemoryStore()
    chain = (await saved(store, s=3))["s"]
    async with node(store) as service:
        assert await read(service, chain) == 3
        assert await read(service, chain, reach="dram") == 3
        shard = Shard(rank=1, ranks=2)
        leases, _ = await service.plane.get(ME, NS.id, shard, chain, deadline_ms=0, reach="dram")
        assert leases == []
        prefixes = b"".join(bytes.fromhex(link.prefix_id) for link in chain)
        tokens = [link.tokens for link in chain]
        pins = service.plane.pin_now(ME, NS.id, str(Shard()), prefixes, tokens)
        service.plane.pinned(ME, NS.id, str(Shard()), pins, tokens)
        service.plane.unpin(ME, pins)
        row = of(await stats(service), NS.id)
    assert row.tokens == {"bucket": 3 * BLOCK, "dram": 2 * 3 * BLOCK}
    assert row.read["dram"] == 2 * row.read["bucket"]
    assert row.fetched >= row.read["bucket"]
    assert row.load_s > 0
    assert row.recompute_s == row.saved == 0  # nobody said what computing takes


async def test_the_second_rank_counts_its_bytes_and_no_tokens():
    async with node(None) as service:
        two, chain = Shard(rank=1, ranks=2), links(2)
        assert all([*await publish(service, ME, NS, chain, Shard(ranks=2)), *await publish(service, ME, NS, chain, two)])
        for shard in (Shard(ranks=2), two):
            leases, _ = await service.plane.get(ME, NS.id, shard, chain, deadline_ms=0, reach="dram")
            for lease in leases:
                lease.release()
        row = of(await stats(service), NS.id)
    assert row.tokens == {"dram": 2 * BLOCK}
    assert row.read["dram"] == row.written
    assert row.gpus == 2


async def test_estimates_follow_from_counts_and_prices():
    store = MemoryStore()
    chain = (await saved(store, s=3))["s"]
    async with node(store, **PRICED) as service:
        await read(service, chain)
        await service.call(ME, "collect", api.Collect())
        found = await stats(service)
    row = of(found, NS.id)
    requests = Counter(row.requests)
    assert row.requests_cost == pytest.approx(
        (5 * (requests["put"] + requests["copy"] + requests["list"]) + 0.4 * (requests["get"] + requests["head"])) / 1000
    )
    assert row.egress_cost == pytest.approx(row.fetched / 1e9 * 90)
    assert row.stored > 0
    assert row.month_cost == pytest.approx(row.stored / 1e9 * 23)
    assert row.recompute_s == 3 * BLOCK / 16
    assert row.avoided_s == pytest.approx(row.recompute_s - row.load_s)
    assert row.saved == pytest.approx(row.avoided_s)
    assert found.prices.source == "a test"
    collector = of(found, "", tenant="")
    assert collector.requests["list"] >= 1  # whoever asked for the collection


async def test_a_model_may_have_a_rate_of_its_own():
    async with node(None, prices__prefill="1", prices__models=f"{NS.model}=32,other=7") as service:
        await publish(service, ME, NS, links(2))
        await read(service, links(2), reach="dram")
        assert of(await stats(service), NS.id).recompute_s == 2 * BLOCK / 32


@pytest.mark.parametrize(
    "flags", [{"prices.models": "m"}, {"prices.models": "m=fast"}, {"prices.models": "m=0"}, {"prices.gb_month": "-1"}]
)
def test_prices_that_are_none_are_refused(flags):
    with pytest.raises(Invalid, match=r"prices\."):
        load(flags=flags)


async def test_a_caller_without_admin_sees_counts_of_its_tenant_and_no_sums():
    store = MemoryStore()
    async with node(store, **PRICED) as service:
        await publish(service, ME, NS, links(2))
        await read(service, links(2))
        found = await act(service, Access(tenant=ME, scopes=frozenset({"read"})), api.BY_NAME["stats"], api.Nothing())
    assert {row.tenant for row in found.cost} == {ME}
    assert of(found, NS.id).tokens
    assert not any(row.saved or row.requests_cost for row in found.cost)
    assert found.prices == api.Prices()


async def test_metrics_show_what_stats_say():
    async with node(MemoryStore(), **PRICED) as service:
        await publish(service, ME, NS, links(2))
        await read(service, links(2), reach="dram")
        page, _ = Metrics().expose(await stats(service), "")
    lines = page.decode().splitlines()
    assert f'kvtier_cost_tokens_total{{namespace="{NS.id}",tenant="{ME}",tier="dram"}} 32.0' in lines
    assert f'kvtier_cost_recompute_seconds_total{{namespace="{NS.id}",tenant="{ME}"}} 2.0' in lines
    assert any(line.startswith("kvtier_cost_spent_total{") and 'currency="USD"' in line for line in lines)


async def test_a_flood_of_namespaces_shares_one_account_and_keeps_every_count():
    async with node(None, dram__size="64MiB") as service:
        for index in range(MOST + 20):
            one = namespace(revision=f"r{index}")
            await service.call(ME, "put_namespace", api.PutNamespace(namespace=one.id, fields=one))
            chain = links_of(one, BLOCK)
            await publish(service, ME, one, chain)
            leases, _ = await service.plane.get(ME, one.id, Shard(), chain, deadline_ms=0, reach="dram")
            leases[0].release()
        found = await stats(service)
    assert len(found.cost) <= MOST + 2
    assert sum(sum(row.tokens.values()) for row in found.cost) == (MOST + 20) * BLOCK
    assert sum(of(found, OTHER).tokens.values()) >= 20 * BLOCK


def test_an_account_is_small():
    accounts = Accounts()
    for index in range(100_000):
        accounts.of("tenant", f"namespace-{index}").tokens["dram"] += 1
    assert len(list(accounts)) == MOST + 1
    assert accounts.of("tenant", OTHER).tokens["dram"] == 100_000 - MOST


def test_what_is_stored_of_namespaces_beyond_the_bound_is_told_together():
    costs = Costs(Accounts(), Registry(None), PricesSettings())
    usage = [api.Usage(tenant="t", namespace=f"n{index}", blocks=1, bytes=10) for index in range(1000)]
    found = costs.now(usage)
    assert len(found) == MOST + 1
    assert sum(row.stored for row in found) == 10_000
    [other] = [row for row in found if row.namespace == OTHER]
    assert other.stored == (1000 - MOST) * 10


def test_what_no_collection_has_told_of_is_unknown_and_not_nothing():
    accounts = Accounts()
    for name in ("told", "new", ""):
        accounts.of("t", name)
    costs = Costs(accounts, Registry(None), PricesSettings(gb_month=1.0))
    found = {row.namespace: row for row in costs.now([api.Usage(tenant="t", namespace="told", blocks=1, bytes=10)])}
    assert {name: row.stored for name, row in found.items()} == {"told": 10, "new": -1, "": 0}
    assert found["new"].month_cost == 0
    page = [family for family in cost_metrics(list(found.values()), api.Prices()) if family.name == "kvtier_cost_stored_bytes"]
    assert {sample.labels["namespace"]: sample.value for sample in page[0].samples} == {"told": 10, "": 0}


async def test_a_namespace_that_came_after_a_collection_is_unknown_and_one_that_went_has_nothing():
    later = namespace(revision="later")

    async def collected(service):
        await service.call(ME, "collect", api.Collect(now=True))

    async def told(service, fields):
        [info] = [
            each for each in (await service.call(ME, "list_namespaces", api.Nothing())).namespaces if each.namespace == fields.id
        ]
        assert of(await stats(service), fields.id).stored == info.bytes
        return info.blocks

    async with node(MemoryStore()) as service:
        for fields, count in ((NS, 2), (later, 3)):
            await service.call(ME, "put_namespace", api.PutNamespace(namespace=fields.id, fields=fields))
            chain = links_of(fields, BLOCK * count)
            await publish(service, ME, fields, chain)
            request = api.Commit(id=f"s{count}", namespace=fields.id, base_version=0, blocks=chain, durability="bucket")
            await service.call(ME, "commit", request)
            if fields is NS:
                assert await told(service, NS) == -1
                await collected(service)
        assert (await told(service, NS), await told(service, later)) == (2, -1)
        await service.call(ME, "delete_session", api.OfSession(id="s2", namespace=NS.id))
        await collected(service)
        assert (await told(service, NS), await told(service, later)) == (0, 3)
