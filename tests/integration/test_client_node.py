"""A whole session's life on a real node, the same over every transport: Unix socket, HTTP, and a node inside this process."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
from fakes.node import SHARD, filler, links_of, namespace, pattern, payload_of

import kvstore
from kvstore.clock import RandomIds
from kvstore.config import Bytes, DramSettings, Settings, StoreSettings, Tenant
from kvstore.errors import AlreadyExists, Conflict, Gone, Invalid, NotFound
from kvstore.node import Node
from kvstore.server.app import HttpServer
from kvstore.server.limits import Limits
from kvstore.server.local import LocalServer

NS = namespace()
DRAM = DramSettings(size=Bytes(16 << 20))
LIMITS = Limits(window=4 << 20, drain=5)


@asynccontextmanager
async def faces(tmp_path, **settings):
    """A node on a memory store, and the URLs of its faces."""
    store = StoreSettings(url=f"memory://{RandomIds().new()}")  # memory stores are shared by name
    base = Settings(store=store, dram=DRAM, tenants={"default": Tenant(), "acme": Tenant()})
    async with Node.open(msgspec.structs.replace(base, **settings)) as node:
        path = str(tmp_path / "node.sock")
        async with LocalServer.open(node.service, path, limits=LIMITS), HttpServer.open(node.service, "127.0.0.1:0") as http:
            yield node, {"unix": f"kvtier+unix://{path}", "http": http.url.replace("http", "kvtier")}


@pytest.fixture(params=["unix", "http", "embedded"])
async def kv(request, tmp_path):
    if request.param == "embedded":
        async with kvstore.open(f"memory://{RandomIds().new()}?dram=16MiB") as client:
            yield client
        return
    async with faces(tmp_path) as (_, urls), kvstore.open(urls[request.param]) as client:
        yield client


async def test_a_session_from_its_creation_to_its_end(kv):
    links = links_of(NS, 6)
    assert (await kv.create_session("chat", namespace=NS, ttl_s=3600, labels={"team": "a"})).version == 0
    with pytest.raises(AlreadyExists):
        await kv.create_session("chat", namespace=NS)
    assert await kv.put(NS, SHARD, links, filler(links)) == [True] * 6
    assert (await kv.commit("chat", namespace=NS, base_version=0, blocks=links[:4])).version == 1
    receipt = await kv.commit("chat", namespace=NS, base_version=1, blocks=links)
    assert (receipt.version, receipt.tokens, receipt.blocks, receipt.durability) == (2, 96, 6, "bucket")
    with pytest.raises(Conflict) as caught:
        await kv.commit("chat", namespace=NS, base_version=1, blocks=links_of(NS, 3, start=5000))
    assert caught.value.facts["current"] == 2

    status = await kv.wait(await kv.restore("chat", model=NS, tokens=range(40)))
    assert (status.state, status.version, status.staged_tokens) == ("ready", 2, 32)
    assert [link.prefix_id for link in (await kv.manifest("chat")).blocks] == [link.prefix_id for link in links]
    with await kv.get(NS, SHARD, links) as blocks:
        assert (len(blocks), blocks.miss) == (6, "")
        assert payload_of(NS, blocks.leases[5]) == pattern(links[5], 65600)

    assert (await kv.fork("chat", as_="branch", version=1)).tokens == 64
    assert (await kv.rewind("chat", tokens=50)).tokens == 48
    assert [each.version for each in (await kv.versions("chat")).versions] == [3, 2, 1]
    assert (await kv.pin("chat")).pinned
    assert not (await kv.unpin("chat")).pinned
    assert (await kv.touch("chat", ttl_s=0)).expires == 0
    assert [each.id async for each in kv.sessions()] == ["branch", "chat"]
    assert [each.fields for each in (await kv.list_namespaces()).namespaces] == [NS]
    await kv.delete_session("chat")
    with pytest.raises((Gone, NotFound)):
        await kv.get_session("chat")
    assert (await kv.get_session("branch")).version >= 1
    assert (await kv.lookup(namespace=NS, prefix_ids=[link.prefix_id for link in links])).run == 6


async def test_b22_ids_that_would_leave_their_folder(kv):
    for bad in ("../../x", "%2e%2e/x", "\0", "", "a/../b"):
        with pytest.raises(Invalid):
            await kv.create_session(bad, namespace=NS)
        with pytest.raises(Invalid):
            await kv.restore(bad)
        with pytest.raises(Invalid):
            await kv.fork("x", as_=bad)
    assert [each.id async for each in kv.sessions()] == []


async def test_b23_distinct_ids_are_distinct_sessions(kv):
    ids = ["a b", "a+b", "a%2Bb", "x?y", "x#y", "~", "{e}", "世界"]
    for each in ids:
        await kv.create_session(each, namespace=NS)
    assert sorted([each.id async for each in kv.sessions()]) == sorted(ids)
    await kv.delete_session("a b")
    assert len([each async for each in kv.sessions()]) == len(ids) - 1


async def test_b44_restores_that_are_cancelled_leave_no_lease(kv):
    links = links_of(NS, 3)
    await kv.put(NS, SHARD, links, filler(links))
    await kv.commit("chat", namespace=NS, base_version=0, blocks=links)
    for _ in range(50):
        begun = await kv.restore("chat", model=NS)
        await kv.cancel_restore(begun.restore_id)
    assert (await kv.wait(await kv.restore("chat", model=NS))).state == "ready"
    assert (await kv.stats()).leases == 0


async def test_b20_another_tenant_sees_nothing(tmp_path):
    theirs = namespace(tenant="acme")
    async with faces(tmp_path) as (node, urls):
        async with kvstore.open(urls["unix"]) as kv, kvstore.open(urls["unix"] + "?tenant=acme") as acme:
            links = links_of(NS, 3)
            await kv.put(NS, SHARD, links, filler(links))
            await kv.commit("chat", namespace=NS, base_version=0, blocks=links)
            assert (await acme.lookup(namespace=theirs, prefix_ids=[link.prefix_id for link in links_of(theirs, 3)])).run == 0
            with pytest.raises(NotFound):
                await acme.lookup(namespace=NS.id, prefix_ids=[links[0].prefix_id])
            with pytest.raises((NotFound, Invalid)):
                await acme.put(NS, SHARD, links, filler(links))
            with pytest.raises(NotFound):
                await acme.get_session("chat")
            assert [each.id async for each in acme.sessions()] == []
        assert node.service.plane.tiers("acme").dram.count == 0


async def test_stage_one_has_blocks_and_says_what_sessions_need(tmp_path):
    async with faces(tmp_path, store=StoreSettings()) as (_, urls), kvstore.open(urls["unix"]) as kv:
        links = links_of(NS, 2)
        assert await kv.put(NS, SHARD, links, filler(links)) == [True, True]
        with await kv.get(NS, SHARD, links) as blocks:
            assert len(blocks) == 2
        with pytest.raises(kvstore.Unsupported, match=r"\[store\] url"):
            await kv.create_session("x", namespace=NS)


async def test_one_node_many_clients_of_both_faces(tmp_path):
    async with faces(tmp_path) as (_, urls):

        async def turn(number):
            async with kvstore.open(urls["unix" if number % 3 else "http"]) as kv:
                links = links_of(NS, 2, start=number * 1000)
                await kv.put(NS, SHARD, links, filler(links))
                await kv.commit(f"s{number}", namespace=NS, base_version=0, blocks=links)
                with await kv.get(NS, SHARD, links) as blocks:
                    return [payload_of(NS, lease) == pattern(link, 65600) for link, lease in zip(links, blocks.leases, strict=True)]

        assert await asyncio.gather(*map(turn, range(12))) == [[True, True]] * 12
        async with kvstore.open(urls["unix"]) as kv:
            assert len([each async for each in kv.sessions(prefix="s")]) == 12
            assert (await kv.stats()).leases == 0
