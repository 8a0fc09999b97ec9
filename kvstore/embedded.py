"""A node inside the caller's process: `kvstore.open("s3://...")`. Found by the entry-point group `kvtier.transports`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Self

import msgspec

from kvstore import api
from kvstore.blocks import BlockLease, Blocks, DeviceBlocks
from kvstore.clock import SystemClock
from kvstore.config import Settings, StorageUrl, Tenant
from kvstore.errors import Closed, Unsupported
from kvstore.ids import Link, Namespace, Shard
from kvstore.node import Node
from kvstore.service.ondevice import OnDevice

Fill = Callable[[int, memoryview], None]
NO_DEVICE = "this store keeps nothing in a device's memory"


def embedded_settings(url: StorageUrl) -> Settings:
    """What a storage URL says about a node: sizes, codec, durability, tenant. No HTTP, no socket."""
    defaults = Settings()
    replace = msgspec.structs.replace
    return replace(
        defaults,
        store=replace(
            defaults.store,
            url=url.store_url(),
            codec=url.codec or defaults.store.codec,
            durability=url.durability or defaults.store.durability,
        ),
        dram=replace(defaults.dram, size=url.dram or defaults.dram.size),
        nvme=replace(defaults.nvme, path=url.nvme_path, size=url.nvme or defaults.nvme.size),
        node=replace(defaults.node, listen="", socket=""),
        encryption=replace(defaults.encryption, key_file=url.key_file),
        tenants={url.tenant: Tenant()},
    )


class EmbeddedTransport:
    """Carries a client's calls straight to a node of the same process; see :class:`kvstore.client.transport.Transport`."""

    def __init__(self, node: Node, tenant: str, lifetime: AsyncExitStack, above: OnDevice | None) -> None:
        self._service, self._tenant, self._lifetime, self._above = node.service, tenant, lifetime, above
        self._closed = False

    @classmethod
    async def open(cls, url: StorageUrl) -> Self:
        """Open the node, and the device above it. Raises as `Node.open` does, and `Invalid` where there is no such device."""
        async with AsyncExitStack() as lifetime:
            node = await lifetime.enter_async_context(Node.open(embedded_settings(url)))
            above = None
            if url.device:
                opening = OnDevice.open(node.service, url.tenant, SystemClock(), device=url.device, nbytes=int(url.device_bytes))
                above = await lifetime.enter_async_context(opening)
            return cls(node, url.tenant, lifetime.pop_all(), above)

    async def call(self, name: str, request: api.Request) -> api.Answer:
        """One call."""
        self._check()
        if self._above is not None:
            return await self._above.call(name, request)
        return await self._service.call(self._tenant, name, request)

    async def get(self, namespace: Namespace, shard: Shard, links: Sequence[Link], *, deadline_ms: int, reach: api.Tier) -> Blocks:
        """Leases on the node's own arena."""
        self._check()
        leases, miss = await self._service.plane.get(self._tenant, namespace.id, shard, links, deadline_ms=deadline_ms, reach=reach)
        return Blocks([BlockLease(lease.view, lease.release) for lease in leases], miss)

    async def get_on_device(
        self, namespace: Namespace, shard: Shard, links: Sequence[Link], *, deadline_ms: int, early: bool
    ) -> DeviceBlocks:
        """Leases in the device's memory."""
        self._check()
        if self._above is None:
            raise Unsupported(NO_DEVICE, remedy="add device=cuda:0 to the store's URL")
        get = self._above.get_early if early else self._above.get
        return await get(namespace, shard, links, deadline_ms=deadline_ms)

    async def put(self, namespace: Namespace, shard: Shard, links: Sequence[Link], fill: Fill) -> list[bool]:
        """`fill` writes straight into the arena."""
        self._check()
        plane, taken = self._service.plane, []
        for index, link in enumerate(links):
            room = await plane.reserve(self._tenant, namespace.id, shard, link)
            if room is None:
                taken.append(False)
                continue
            try:
                await plane.run(fill, index, room.payload)
                taken.append(await room.publish())
            finally:
                room.abort()
        return taken

    async def aclose(self) -> None:
        """Drain and close the node."""
        self._closed = True
        await self._lifetime.aclose()

    def _check(self) -> None:
        if self._closed:
            raise Closed("this embedded node was closed")


async def embedded(url: StorageUrl) -> EmbeddedTransport:
    """The entry point of the schemes `s3` and `memory`."""
    return await EmbeddedTransport.open(url)
