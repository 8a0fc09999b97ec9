"""What a commit touches on this node: the bytes of its blocks in the local tiers, and the protocol that it ends in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from kvstore import api
from kvstore.errors import Unavailable
from kvstore.ids import BlockName, Namespace, Shard
from kvstore.repo import Proposal, want
from kvstore.repo.slices import sliced
from kvstore.service.bucket import Bucket
from kvstore.service.parts import Parts
from kvstore.service.plane import Plane
from kvstore.service.registry import Registry
from kvstore.service.wants import block_wants
from tiering import DiskTier, Lease, Miss, Reach, Want

_GONE: Final = frozenset({Miss.ABSENT, Miss.CORRUPT})


class LocalCommits:
    """Applies commits, and keeps their blocks safe on the disk until then.

    Args:
        disk: None where there is no disk tier.
    """

    def __init__(self, plane: Plane, registry: Registry, bucket: Bucket, disk: DiskTier | None) -> None:
        self._plane, self._registry, self._bucket, self._disk = plane, registry, bucket, disk
        self._parts = Parts(disk.limit // plane.tenants) if disk is not None and plane.tenants > 1 else None

    async def fields(self, tenant: str, namespace: str) -> Namespace:
        """A namespace's. Raises `NotFound`."""
        return await self._registry.held(tenant, namespace)

    def learn(self, fields: Namespace) -> None:
        """A namespace that an intent brings along, so that replaying it needs no bucket."""
        self._registry.learn(fields)

    async def apply(self, tenant: str, request: api.Commit) -> api.Receipt:
        """The protocol's commit, reading blocks from the local tiers only. Raises as `Repo.commit` does.

        What was promised with `nvme` is not cut because memory is full at the moment: it raises `Unavailable`.
        """
        fields = await self._registry.held(tenant, request.namespace)
        stack = self._plane.tiers(tenant).stack

        async def source(name: BlockName) -> Lease | None:
            found = (await stack.get_many([want(fields, name)], reach=Reach.DISK))[0]
            if request.durability == "nvme" and isinstance(found, Miss) and found not in _GONE:
                raise Unavailable(f"a block of a promised commit cannot be read now: {found.value}")
            return found if isinstance(found, Lease) else None

        await self._bucket.repo.put_namespace(fields)  # the client may have named it while the bucket was out of reach
        proposal = Proposal(
            namespace=fields,
            base=request.base_version,
            branch=request.branch,
            base_prefix=request.base_prefix_id,
            links=tuple(request.blocks),
            shards=request.shards,
            labels=request.labels or None,
            ttl=request.ttl_s,
            write_id=request.write_id,
        )
        return await self._bucket.repo.commit(tenant, request.id, request.lane, proposal, source)

    async def secure(self, tenant: str, request: api.Commit, *, promised: bool = False) -> bool:
        """Make the blocks of a commit outlive a kill -9, and protect them from eviction until `release`.

        What is on no local tier must be in the bucket already: an earlier version's blocks usually are. Raises `Overloaded` where
        tenants share the disk and this one's commits would hold more than an even part of it, unless it was `promised` before.
        """
        assert self._disk is not None
        wants = await self._wants(tenant, request)
        keys = [one.key for one in wants]
        if self._parts is not None:
            if not promised:
                self._parts.refuse(tenant, wants)
            self._parts.take(tenant, wants)
        self._disk.hold(keys)
        kept = False
        try:
            durable = await self._plane.tiers(tenant).stack.flush(wants)
            elsewhere = [one for one, here in zip(wants, durable, strict=True) if not here]
            kept = not elsewhere or await self._bucket.contains(elsewhere) == len(elsewhere)
        finally:
            if not kept:
                self._let_go(tenant, wants)
        return kept

    async def release(self, tenant: str, request: api.Commit) -> None:
        """Let the blocks of a commit be evicted again."""
        self._let_go(tenant, await self._wants(tenant, request))

    def _let_go(self, tenant: str, wants: Sequence[Want]) -> None:
        assert self._disk is not None
        self._disk.release([one.key for one in wants])
        if self._parts is not None:
            self._parts.give(tenant, wants)

    async def _wants(self, tenant: str, request: api.Commit) -> list[Want]:
        fields = await self._registry.held(tenant, request.namespace)
        shards = [Shard.parse(text) for text in request.shards]
        return [one for shard in shards for one in await sliced(partial(block_wants, fields, shard), request.blocks)]
