"""A tenant that asks for many restores delays another's by a few of them, not by all."""

import msgspec
from fakes.kv import links_of, namespace, publish

from kvstore import api
from kvstore.config import Tenant, load
from kvstore.node import Node
from kvstore.objects import MemoryStore

FLOOD = 100
MOST = 20  # of the flood, before the other one is done: 16 sessions are looked up at once, and two restores work in each lane


async def committed(service, tenant, sessions):
    fields = namespace(tenant=tenant)
    await service.call(tenant, "put_namespace", api.PutNamespace(namespace=fields.id, fields=fields))
    for index in range(sessions):
        chain = links_of(fields, 16 * 2, first=index * 1000)
        await publish(service, tenant, fields, chain)
        request = api.Commit(id=f"s{index}", namespace=fields.id, base_version=0, blocks=chain, durability="bucket")
        await service.call(tenant, "commit", request)


async def test_a_flood_of_restores_delays_another_tenant_by_few_of_them():
    base = load(flags={"dram.size": "16MiB", "node.listen": "", "limits.drain": "5s"}).settings
    settings = msgspec.structs.replace(base, tenants={"flood": Tenant(), "late": Tenant()})
    store = MemoryStore()
    async with Node.open(settings, store=store) as node:
        await committed(node.service, "flood", FLOOD)
        await committed(node.service, "late", 1)
    async with Node.open(settings, store=store) as node:
        service = node.service
        flood = [await service.call("flood", "restore", api.Restore(id=f"s{index}")) for index in range(FLOOD)]
        late = await service.call("late", "restore", api.Restore(id="s0"))
        done = await service.call("late", "get_restore", api.GetRestore(restore_id=late.restore_id, wait_ms=60_000))
        assert (done.state, done.by_tier["bucket"]) == ("ready", done.bytes)
        over = 0
        for each in flood:
            status = await service.call("flood", "get_restore", api.GetRestore(restore_id=each.restore_id))
            over += status.state not in {"resolving", "staging"}
        assert over <= MOST
