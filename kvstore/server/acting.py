"""A call on behalf of whoever asks: what that may do, for whom, and how much of the answer is for such eyes."""

from __future__ import annotations

import msgspec

from kvstore import api
from kvstore.access import Access
from kvstore.server.ports import Service

ARENA = "dram"  # the one tier that is a tenant's alone


async def act(service: Service, access: Access, call: api.Call, request: api.Request) -> api.Answer:
    """Run a call for a caller.

    Raises:
        Denied: Its access does not include the call's scope.
        KVTierError: As the call.
    """
    access.check(call.scope)
    answer = await service.call(access.tenant, call.name, request)
    if access.may("admin"):
        return answer
    if isinstance(answer, api.Stats):
        return own_stats(answer, access.tenant)
    if isinstance(answer, api.Health):
        return _unexplained(answer)
    return answer


def own_stats(stats: api.Stats, tenant: str) -> api.Stats:
    """What a node's statistics say of the caller's tenant alone. Named one by one: what is added later is not told by mistake.

    Counts of the whole node would tell a tenant when others work, and how much of it; addresses and the bucket's URL are the
    operator's. Its own memory tier, leases, queue and bytes in the bucket are the tenant's.
    """
    tiers = {name: msgspec.structs.replace(tier, tokens=0) for name, tier in stats.tiers.items() if name == ARENA}
    return api.Stats(
        whole=False,
        node=stats.node,
        version=stats.version,
        uptime_s=stats.uptime_s,
        tiers=tiers,
        leases=stats.leases,
        queued_bytes=stats.queued_bytes,
        restores=0,
        commits={},
        store_requests={},
        store="",
        held_bytes=stats.held_bytes,
        collector=api.CollectorStats(last_success=stats.collector.last_success, usage=stats.collector.usage),
        cost=[_unpriced(cost) for cost in stats.cost if cost.tenant == tenant],
        mesh=api.MeshStats() if stats.mesh is not None else None,  # that there is one says how dear a block elsewhere is
    )


def _unpriced(cost: api.Cost) -> api.Cost:
    """Counts without sums: what things are bought for is the operator's."""
    return msgspec.structs.replace(cost, requests_cost=0.0, egress_cost=0.0, month_cost=0.0, saved=0.0)


def _unexplained(health: api.Health) -> api.Health:
    """Which guarantees are degraded, without the reasons: those quote errors, and errors name keys."""
    return msgspec.structs.replace(health, degraded=dict.fromkeys(health.degraded, ""))
