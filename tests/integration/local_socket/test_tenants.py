"""Tenants on one socket share nothing: no name, no memory, no lease."""

import asyncio
import os

import pytest
from fakes.node import SHARD, filler, links_of, namespace
from fakes.raw_socket import NS, answer, get_of, leased, url

import kvstore
from kvstore import wire
from kvstore.errors import Denied, Invalid, NotFound


async def test_b20_tenants_share_nothing(server, service, path):
    theirs = namespace(tenant="acme")
    async with kvstore.open(url(path)) as kv, kvstore.open(url(path, tenant="acme")) as acme:
        links = links_of(NS, 2)
        await kv.put(NS, SHARD, links, filler(links))
        found = await acme.lookup(namespace=theirs, prefix_ids=[link.prefix_id for link in links_of(theirs, 2)])
        assert found.run == 0
        with pytest.raises(NotFound):
            await acme.lookup(namespace=NS.id, prefix_ids=[link.prefix_id for link in links])
        with pytest.raises(Invalid):
            await acme.get(NS, SHARD, links)
        with pytest.raises(NotFound):
            (await acme._transport.get(NS, SHARD, links, deadline_ms=0, reach="dram")).release()


async def test_another_tenants_arena_is_never_handed_over(raw, service):
    mine, theirs = (os.fstat(service.plane.arena(tenant).fd) for tenant in ("default", "acme"))
    client = await raw()
    handed = [os.fstat(fd) for fd in client.fds]
    assert len(handed) == 2
    assert os.path.samestat(handed[0], mine)
    assert not any(os.path.samestat(each, theirs) for each in handed)


async def test_nothing_is_published_into_another_tenants_namespace(raw, service):
    service.plane.namespaces[NS.id] = NS
    client = await raw(hello=False)
    assert isinstance(await asyncio.to_thread(client.hello, tenant="acme"), wire.Welcome)
    prefix = bytes.fromhex(links_of(NS, 1)[0].prefix_id)
    for number, filled in ((1, True), (2, False)):
        fault = await answer(client, wire.Publish(number, NS.id, str(SHARD), prefix, [(16, 0, 65600)], filled=filled))
        assert (fault.id, fault.problem.kind) == (number, "not_found")
    fault = await answer(client, get_of(3, links_of(NS, 1)[0]))
    assert (fault.id, fault.problem.kind) == (3, "not_found")
    assert [tier.used for tier in service.plane.tiers.values()] == [0, 0]


async def test_lease_numbers_of_another_connection_release_nothing(raw, server, service, path):
    links = links_of(NS, 2)
    async with kvstore.open(url(path)) as kv:
        await kv.put(NS, SHARD, links, filler(links))
    first, second = await raw(), await raw()
    held = await answer(first, get_of(1, links[0]))
    assert len(held.offsets) == 1
    second.send(wire.Release([(held.first, 1), (0, 60_000)]))
    assert isinstance(await answer(second, get_of(1, links[1])), wire.Leased)
    assert leased(service) == 2


async def test_a_user_outside_the_table_is_denied(server, service, path):
    service.plane.uids["acme"] = {os.getuid() + 1}
    with pytest.raises(Denied, match="acme"):
        await kvstore.connect(url(path, tenant="acme"))
    with pytest.raises(Denied):
        await kvstore.connect(url(path, tenant="nobody-knows"))
