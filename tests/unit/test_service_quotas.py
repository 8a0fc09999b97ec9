"""What a tenant may have, and how it is told that it has it."""

import asyncio
from contextlib import asynccontextmanager, contextmanager

import msgspec
import pytest
from aiohttp import ClientSession
from fakes.clock import HandClock
from fakes.kv import links_of, namespace, publish

from kvstore import api
from kvstore.accounts import Accounts
from kvstore.config import Tenant, load
from kvstore.errors import Invalid, NotFound, Overloaded, Unavailable
from kvstore.ids import Shard
from kvstore.node import Node
from kvstore.objects import MemoryStore
from kvstore.server.app import HttpServer
from kvstore.server.problems import problem_response
from kvstore.service.quotas import Quotas, Rate

ANN = namespace(tenant="ann")


@asynccontextmanager
async def node(store, **tenants):
    """With these tenants, and one of them, `bob`, that has no quota."""
    base = load(flags={"dram.size": "8MiB", "node.listen": "", "limits.drain": "5s", "lifecycle.anonymous_ttl": "1s"}).settings
    settings = msgspec.structs.replace(base, tenants={"bob": Tenant(), **tenants})
    async with Node.open(settings, store=store) as opened:
        for name in settings.tenants:
            fields = namespace(tenant=name)
            await opened.service.call(name, "put_namespace", api.PutNamespace(namespace=fields.id, fields=fields))
        yield opened.service


async def commit(service, session, tenant="ann", base=0, first=0, blocks=1):
    fields = namespace(tenant=tenant)
    chain = links_of(fields, 16 * blocks, first)
    await publish(service, tenant, fields, chain)
    request = api.Commit(id=session, namespace=fields.id, base_version=base, blocks=chain, durability="bucket")
    return await service.call(tenant, "commit", request)


async def create(service, session, tenant="ann"):
    return await service.call(tenant, "create_session", api.CreateSession(id=session, namespace=namespace(tenant=tenant).id))


async def written(service):
    async with asyncio.timeout(20):
        while service.plane.queued("ann"):  # noqa: ASYNC110  a byte count that nobody tells of
            await asyncio.sleep(0.01)


@contextmanager
def refused(setting):
    with pytest.raises(Overloaded) as caught:
        yield
    assert caught.value.kind == "quota"
    assert setting in caught.value.remedy


async def begin(quotas, name, request, turns=0):
    async with quotas.admitted("a", name, request):
        for _ in range(turns):
            await asyncio.sleep(0)


async def test_sessions_are_bounded_by_tenant_and_one_that_goes_makes_room():
    async with node(MemoryStore(), ann=Tenant(max_sessions=2)) as service:
        await commit(service, "a")
        await create(service, "b")
        for work in (lambda: commit(service, "c", first=1000), lambda: create(service, "c")):
            with refused("max_sessions"):
                await work()
        with refused("max_sessions"):
            await service.call("ann", "fork", api.Fork(id="a", namespace=ANN.id, as_="c"))
        await commit(service, "a", base=1, blocks=2)  # those that are there go on
        await commit(service, "b", first=2000)  # also the first version of one that was made empty
        await service.call("ann", "delete_session", api.OfSession(id="b"))
        await create(service, "c")
        for index in range(4):
            await create(service, f"s{index}", tenant="bob")


async def test_sessions_that_were_there_before_this_node_count():
    store = MemoryStore()
    async with node(store, ann=Tenant()) as service:
        for name in ("a", "b", "c"):
            await create(service, name)
    async with node(store, ann=Tenant(max_sessions=3)) as service:
        with refused("max_sessions"):
            await create(service, "d")


async def test_bytes_are_what_the_last_collection_counted_and_what_came_since():
    store = MemoryStore()
    async with node(store, ann=Tenant(max_bytes=10_000)) as service:
        await commit(service, "a", blocks=2)  # 2 blocks of 16 tokens of 512 bytes
        with refused("max_bytes"):
            await commit(service, "a", base=1, blocks=3)
        await commit(service, "b", tenant="bob", blocks=3)
        await service.call("ann", "delete_session", api.OfSession(id="a"))
        with refused("max_bytes"):
            await commit(service, "c")
        await written(service)  # else a block that is offered late counts as one since the collection
        await service.call("ann", "collect", api.Collect(now=True))
        await commit(service, "c", first=3000)


async def test_over_its_bytes_a_tenants_blocks_stay_out_of_the_bucket_and_in_memory():
    store = MemoryStore()
    async with node(store, ann=Tenant(max_bytes=1)) as service:
        await commit(service, "a")
        chain = links_of(ANN, 16, 5000)
        await publish(service, "ann", ANN, chain)
        await written(service)
        found = await service.call("ann", "stats", api.Nothing())
        assert found.tiers["bucket"].dropped >= 1
        looked_up = await service.call("ann", "lookup", api.Lookup(namespace=ANN.id, prefix_ids=[chain[0].prefix_id], reach="dram"))
        assert looked_up.run == 1


async def test_calls_per_second_and_when_to_come_again():
    async with node(MemoryStore(), ann=Tenant(requests=0.1)) as service:
        with pytest.raises(Overloaded) as caught:  # one came already: it named the namespace
            await service.call("ann", "list_namespaces", api.Nothing())
        assert caught.value.kind == "quota"
        response = problem_response(caught.value.problem())
        assert response.status == 429
        assert 1 < int(response.headers["Retry-After"]) <= 10
        for name in ("stats", "ready", "health"):
            await service.call("ann", name, api.Nothing())
        for _ in range(10):
            await service.call("bob", "list_namespaces", api.Nothing())


async def test_blocks_over_http_are_requests_too():
    async with node(MemoryStore(), default=Tenant(requests=0.1)) as service, HttpServer.open(service, "127.0.0.1:0") as server:
        block = links_of(ANN, 16)[0]
        url = f"{server.url}/v1/blocks/{namespace().id}/{Shard()}/{block.prefix_id}?tokens=16"
        async with ClientSession() as client, client.get(url) as got, client.put(url, data=b"") as put:
            assert (got.status, put.status) == (429, 429)
            assert int(got.headers["Retry-After"]) > 1
            assert (await put.json())["kind"] == "quota"


def test_what_was_not_asked_for_may_come_at_once_and_no_more_than_of_two_seconds():
    rate = Rate(10, now=0)
    assert [rate.take(0) for _ in range(20)] == [0] * 20
    assert rate.take(0) == pytest.approx(0.1)
    assert rate.take(0.1) == 0
    assert [rate.take(1000) for _ in range(20)] == [0] * 20
    assert rate.take(1000) > 0


async def test_a_count_is_not_repeated_for_everybody_who_is_refused():
    clock, counts = HandClock(), []

    async def count(tenant, most):
        counts.append(tenant)
        return most

    async def exists(tenant, request):
        raise NotFound(request.id)

    quotas = Quotas({"a": Tenant(max_sessions=3)}, Accounts(), list, count, exists, clock)
    for _ in range(50):
        with pytest.raises(Overloaded):
            await begin(quotas, "create_session", api.CreateSession(id="s", namespace=ANN.id))
    assert len(counts) == 1
    await clock.advance(11)
    with pytest.raises(Overloaded):
        await begin(quotas, "create_session", api.CreateSession(id="s", namespace=ANN.id))
    assert len(counts) == 2


async def test_many_at_once_make_no_more_than_there_may_be():
    async def count(tenant, most):
        return 1

    quotas = Quotas({"a": Tenant(max_sessions=3)}, Accounts(), list, count, count, HandClock())
    request = api.CreateSession(id="s", namespace=ANN.id)
    begun = await asyncio.gather(*(begin(quotas, "create_session", request, turns=5) for _ in range(20)), return_exceptions=True)
    assert sum(result is None for result in begun) == 2
    with pytest.raises(ZeroDivisionError):
        async with quotas.admitted("a", "delete_session", api.OfSession(id="s")):
            raise ZeroDivisionError
    with pytest.raises(Overloaded):
        await begin(quotas, "create_session", request)
    await begin(quotas, "delete_session", api.OfSession(id="s"))
    with pytest.raises(ZeroDivisionError):
        async with quotas.admitted("a", "create_session", request):
            raise ZeroDivisionError
    await begin(quotas, "create_session", request)


async def test_a_bucket_that_cannot_be_counted_keeps_nobody_from_local_promises():
    async def count(tenant, most):
        raise Unavailable("away")

    quotas = Quotas({"a": Tenant(max_sessions=3)}, Accounts(), list, count, count, HandClock())
    await begin(quotas, "commit", api.Commit(id="s", namespace=ANN.id, base_version=0, blocks=[]))


@pytest.mark.parametrize(
    "line",
    ["max_bytes = '4 bananas'", "max_byte = 1", "max_sessions = -1", "requests = -0.5", "requests = nan", "max_sessions = 'many'"],
)
def test_a_quota_that_is_none_is_refused(line):
    with pytest.raises(Invalid, match="tenants"):
        load(toml=f"[tenants.a]\n{line}\n")


def test_quotas_are_read_as_people_write_sizes():
    found = load(toml='[tenants.a]\nmax_bytes = "2GiB"\nmax_sessions = 10\nrequests = 50\n').settings.tenants["a"]
    assert (found.max_bytes, found.max_sessions, found.requests) == (2 << 30, 10, 50.0)
