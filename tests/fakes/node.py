"""A small node: real memory tiers and namespaces, scripted sessions and restores, and faults on demand."""

import asyncio
import os
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from kvstore import api, codec
from kvstore.errors import Invalid, NotFound
from kvstore.ids import BlockName, Link, Namespace, Shard, chain, prefix_id, unpack_prefixes
from kvstore.keys import check_id
from kvstore.service.landing import Landing
from tiering import DramTier, Miss, Movers, Want

VERSION = "0.1.0"
SHARD = Shard()


class Arena(msgspec.Struct):
    fd: int
    size: int


class FakeRoom:
    def __init__(self, slot, name, namespace, movers):
        self._slot, self._name, self._namespace, self._movers = slot, name, namespace, movers
        self.payload = slot.view[codec.layout(namespace, name.shard, name.tokens).header_bytes :]

    async def publish(self):
        try:
            await self._movers.run(codec.seal, self._slot.view, self._name, self._namespace)
        except BaseException:
            self._slot.abort()
            raise
        self._slot.commit().release()
        return True

    def abort(self):
        self._slot.abort()


class FakePlane:
    """`gate`: where set, reads wait for it. `full`: no room for writes."""

    def __init__(self, tiers, movers):
        self.tiers, self.movers = tiers, movers
        self.landing = Landing(movers, 64 << 20)
        self.namespaces = {}
        self.uids = {tenant: {os.getuid()} for tenant in tiers}
        self.gate = None
        self.full = False
        self.waiting = 0
        self.writers = {}

    @property
    def run(self):
        return self.movers.run

    def allowed(self, uid, tenant):
        return uid in self.uids.get(tenant, ())

    def arena(self, tenant):
        return Arena(self.tiers[tenant].fd, self.tiers[tenant].size)

    def namespace(self, tenant, wanted):
        found = self.namespaces.get(wanted)
        if found is None or found.tenant != tenant:
            raise NotFound(f"namespace {wanted} is not known")
        return found

    def want(self, tenant, namespace, shard, link):
        fields = self.namespace(tenant, namespace)
        size = codec.layout(fields, shard, link.tokens).raw_bytes
        return Want(BlockName(namespace, shard, prefix_id(link.prefix_id), link.tokens).tier_key, size)

    async def get(self, tenant, namespace, shard, links, *, deadline_ms, reach):
        await self.settled(tenant)
        wants = [self.want(tenant, namespace, shard, link) for link in links]
        if self.gate is not None:
            self.waiting += 1
            try:
                await self.gate.wait()
            finally:
                self.waiting -= 1
        run = []
        for want in wants:
            found = self.tiers[tenant].lease_many([want])[0]
            if isinstance(found, Miss):
                return run, found.value
            run.append(found)
        return run, ""

    def pin_now(self, tenant, namespace, shard, prefixes, tokens):
        if self.gate is not None:
            return None
        links = map(Link, unpack_prefixes(prefixes), tokens)
        wants = [self.want(tenant, namespace, Shard.parse(shard), link) for link in links]
        return self.tiers[tenant].pin_all([want.key for want in wants], [want.size for want in wants])

    def pinned(self, tenant, namespace, shard, pins, tokens):
        self.tiers[tenant].pinned(pins)

    def unpin(self, tenant, pins):
        self.tiers[tenant].unpin_all(pins)

    def lookup_now(self, tenant, request):
        return None

    def rooms_now(self, tenant, namespace, shard, prefixes, tokens, slots):
        return None

    def ahead(self, tenant, namespace, shard, tokens, count):
        return []

    def not_wanted(self, tenant, slots):
        for slot in slots:
            slot.abort()

    def writing(self, tenant):
        return self.writers.setdefault(tenant, set())

    @property
    def copying(self):
        return self.landing.copying

    def land(self, tenant, rooms, copy, copied, *, soon):
        self.landing.take(tenant, rooms, copy, copied, soon=soon)

    async def settled(self, tenant):
        await self.landing.settled(tenant)

    async def reserve(self, tenant, namespace, shard, link):
        slot = Miss.FULL if self.full else self.tiers[tenant].reserve(self.want(tenant, namespace, shard, link))
        if isinstance(slot, Miss):
            return None
        fields = self.namespace(tenant, namespace)
        return FakeRoom(slot, BlockName(fields.id, shard, link.prefix_id, link.tokens), fields, self.movers)

    async def payload_bytes(self, tenant, namespace, shard, tokens):
        return codec.layout(self.namespace(tenant, namespace), shard, tokens).payload_bytes


class FakeService:
    """`answers`: by call name, an answer or a coroutine function that gives one. `calls`: (tenant, name, request) seen."""

    def __init__(self, plane):
        self.node_id, self.version, self.plane = "node-1", VERSION, plane
        self.calls, self.answers = [], {}
        self.restores = {}

    def admit(self, tenant):
        pass

    async def call(self, tenant, name, request):
        self.calls.append((tenant, name, request))
        if isinstance(request, api.OfSession):
            check_id(request.id, "session id")
        answer = self.answers.get(name, getattr(self, name, None))
        if answer is None:
            raise NotFound(f"{name}: there is nothing in this fake")
        return await answer(tenant, request) if callable(answer) else answer

    async def put_namespace(self, tenant, request):
        if request.fields.tenant != tenant or request.fields.id != request.namespace:
            raise Invalid("namespace is not the caller's")
        self.plane.namespaces[request.namespace] = request.fields
        return api.Done()

    async def lookup(self, tenant, request):
        await self.plane.settled(tenant)
        fields = self.plane.namespace(tenant, request.namespace)
        names = [BlockName(fields.id, SHARD, prefix, fields.block_tokens).tier_key for prefix in request.prefix_ids]
        here = self.plane.tiers[tenant].contains_many(names)
        run = [*here, False].index(False)
        return api.Found(run=run, tiers=["dram"] * run)

    async def health(self, tenant, request):
        return api.Health(ok=True, node=self.node_id, version=self.version)

    ready = health

    async def stats(self, tenant, request):
        tier = self.plane.tiers[tenant]
        counts = api.TierStats(
            used=tier.used, limit=tier.limit, hits=3, misses=1, bytes_in=10, bytes_out=20, evictions=0, dropped=0, corrupt=0
        )
        return api.Stats(
            node=self.node_id, version=self.version, uptime_s=1.5, tiers={"dram": counts}, leases=tier.leases, queued_bytes=0,
            restores=0, commits={"committed": 2, "pending": 1}, store_requests={"get ok": 5}, store="",
        )  # fmt: skip

    # --- restores: whatever the test pushes ---

    async def restore(self, tenant, request):
        status = api.RestoreStatus(
            restore_id=f"r{len(self.restores)}", id=request.id, state="resolving", node=self.node_id, tier=request.tier
        )
        self.restores[status.restore_id] = (status, asyncio.Condition())
        return status

    async def advance(self, restore_id, **changes):
        status, changed = self.restores[restore_id]
        async with changed:
            self.restores[restore_id] = (msgspec.structs.replace(status, **changes), changed)
            changed.notify_all()

    async def get_restore(self, tenant, request):
        if request.restore_id not in self.restores:
            raise NotFound(f"restore {request.restore_id!r} is not known")
        _, changed = self.restores[request.restore_id]
        try:
            async with asyncio.timeout(request.wait_ms / 1000), changed:
                while self.restores[request.restore_id][0].state in {"resolving", "staging"}:
                    await changed.wait()
        except TimeoutError:
            pass
        return self.restores[request.restore_id][0]

    async def watch(self, tenant, restore_id):
        if restore_id not in self.restores:
            raise NotFound(f"restore {restore_id!r} is not known")
        seen = None
        while True:
            status, changed = self.restores[restore_id]
            if status is not seen:
                seen = status
                yield status
                if status.state not in {"resolving", "staging"}:
                    return
                continue
            async with changed:
                if self.restores[restore_id][0] is seen:
                    await changed.wait()


@asynccontextmanager
async def fake_service(*tenants, limit=32 << 20):
    async with AsyncExitStack() as stack:
        movers = await stack.enter_async_context(Movers.open(2))
        tiers = {
            tenant: await stack.enter_async_context(DramTier.open("dram", limit, movers)) for tenant in tenants or ("default",)
        }
        yield FakeService(FakePlane(tiers, movers))


def namespace(**changes):
    """Blocks of 16 tokens: 65,536 bytes of KV and 64 of token ids."""
    fields = {"model": "m", "revision": "r", "layers": 2, "kv_heads": 4, "head_dim": 128, "block_tokens": 16, "dtype": "BF16"}
    return Namespace(**{**fields, **changes})


def links_of(ns, blocks, start=0):
    return chain(ns, range(start, start + blocks * ns.block_tokens))


def filler(links):
    """Fills payload i with bytes that follow from the block's name."""

    def fill(index, payload):
        payload[:] = pattern(links[index], payload.nbytes)

    return fill


def pattern(link, size):
    return (bytes.fromhex(link.prefix_id) * (size // 32 + 1))[:size]


def payload_of(ns, lease, tokens=None):
    plan = codec.layout(ns, SHARD, tokens or ns.block_tokens)
    return bytes(lease.view[plan.header_bytes :])


async def until(condition, seconds=60):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  what is waited for is in another process or thread, or has no event
            await asyncio.sleep(0.002)
