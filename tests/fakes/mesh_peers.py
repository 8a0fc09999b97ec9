"""Nodes of a mesh in one process: memory, a listener, and the peers as an origin; and a directory that is told what to say."""

from contextlib import AsyncExitStack, asynccontextmanager

from fakes.kv import payload

from kvstore import codec
from kvstore.clock import SystemClock
from kvstore.ids import BlockName, Namespace, Shard, chain
from kvstore.lifecycle.prestage import Turns
from kvstore.mesh.connections import LinkSettings
from kvstore.mesh.link import Links
from kvstore.mesh.members import Member
from kvstore.mesh.peers import Peers
from kvstore.repo import want
from kvstore.server.peering import Peering, PeeringLimits
from kvstore.service.plane import Plane, TenantTiers
from kvstore.service.registry import Registry
from tiering import DiskTier, DramTier, Lease, Miss, Movers, Stack, StackSettings

ME = "default"
NS = Namespace(model="mesh", revision="1", layers=4, kv_heads=2, head_dim=64, dtype="BF16", block_tokens=128)  # 256 KiB a block

# A busy machine is no reason for a miss.
CALM, LENIENT = LinkSettings(connect_s=30), PeeringLimits(tiers_s=60, through_s=60)


class Told:
    """A directory that says what a test wants. `places`: holders by key; by default it looks into the others' tiers."""

    def __init__(self):
        self.others, self.places, self.wrongs, self.asked = {}, {}, [], 0

    def members(self):
        return list(self.others)

    async def locate(self, keys):
        self.asked += 1
        return [self.places[key] if key in self.places else self._look(key) for key in keys]

    def _look(self, key):
        return tuple(member for member, node in self.others.items() if node is not None and node.stack.locate([key])[0])

    def added(self, keys):
        pass

    def dropped(self, keys):
        pass

    def wrong(self, member, keys):
        self.wrongs += [(member.node, key) for key in keys]


class MeshNode:
    def __init__(self, name, directory, links, peers, dram, stack, peering):
        self.name, self.directory, self.links, self.peers = name, directory, links, peers
        self.dram, self.stack, self.peering = dram, stack, peering

    @property
    def member(self):
        host, port = self.peering.address
        return Member(self.name, 1, host, port)

    def put(self, wants):
        """Blocks, as their engine would have published them."""
        for each in wants:
            slot = self.dram.reserve(each)
            assert not isinstance(slot, Miss)
            slot.view[:] = block(each)
            slot.commit().release()

    async def read(self, wants, **how):
        """Bytes of the leading blocks that come, and where from."""
        found = await self.stack.get_many(wants, **how)
        leases = [got for got in found if isinstance(got, Lease)]
        try:
            return [bytes(lease.view) for lease in leases], [lease.source for lease in leases]
        finally:
            for lease in leases:
                lease.release()


class Counted:
    """A bucket that has everything, and counts how often it is asked for each block. `held`: fetches wait for it."""

    name = "bucket"

    def __init__(self, has=True):
        self.has, self.asked, self.held = has, {}, None

    async def fetch(self, want, into, tell=None):
        self.asked[want.key] = self.asked.get(want.key, 0) + 1
        if self.held is not None:
            await self.held.wait()
        if not self.has:
            return Miss.ABSENT
        into[:] = block(want)
        return None

    async def offer(self, want, value):
        return False

    def ready(self):
        return True

    async def contains(self, wants):
        return len(wants) if self.has else 0


@asynccontextmanager
async def mesh_node(
    name, *, dram=32 << 20, bucket=None, nvme=None, limits=None, settings=None, links=None, networks=(), placement=True, tls=None
):
    clock, directory = SystemClock(), Told()
    async with AsyncExitStack() as life:
        enter = life.enter_async_context
        movers = await enter(Movers.open())
        tier = await enter(DramTier.open("dram", dram, movers))
        disk = await enter(DiskTier.open(nvme, 64 << 20, movers)) if nvme else None
        lines = await enter(Links.open(links or CALM, tls=tls))
        peers = await enter(Peers.open(name, directory, lines, clock, settings, placement=placement))
        origins = [peers, bucket] if bucket is not None else [peers]
        stack = await enter(Stack.open(tier, disk, origins, StackSettings(lenders=frozenset({"peer"}))))
        tiers = {ME: TenantTiers(tier, stack, ())}
        plane = Plane(tiers, Registry(None), None, clock, movers, Turns(speculative=1))
        life.push_async_callback(plane.aclose)
        opening = Peering.open(plane, tiers, movers, clock, peers.owns, limits=limits or LENIENT, networks=networks, tls=tls)
        yield MeshNode(name, directory, lines, peers, tier, stack, await enter(opening))


def introduce(*nodes):
    """Each knows the others."""
    for node in nodes:
        node.directory.others = {other.member: other for other in nodes if other is not node}


def wants_of(blocks, first=0, ns=NS):
    """A chain of full blocks; chains that start elsewhere share nothing."""
    links = chain(ns, range(first * 1_000_000, first * 1_000_000 + blocks * ns.block_tokens))
    return [want(ns, BlockName(ns.id, Shard(), link.prefix_id, link.tokens)) for link in links]


def block(wanted):
    """A sealed raw object whose bytes follow from its name."""
    ref = wanted.ref
    body = bytearray(wanted.size)
    plan = codec.layout(ref.namespace, ref.name.shard, ref.name.tokens)
    body[plan.header_bytes :] = payload(ref.name, plan.payload_bytes)
    codec.seal(memoryview(body), ref.name, ref.namespace)
    return bytes(body)
