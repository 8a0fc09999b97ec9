"""What the console is shown with: a node with sessions and forks, a collection behind it, and a bucket that takes its time."""

import asyncio
import socket
from contextlib import asynccontextmanager

import msgspec

from kvstore import api
from kvstore.config import Bytes, DramSettings, NvmeSettings, PeersSettings, PricesSettings, Settings, StoreSettings
from kvstore.ids import Namespace, Shard, chain
from kvstore.node import Node
from kvstore.objects import Faults, MemoryStore
from kvstore.objects.faults import Fault
from kvstore.server.app import HttpServer
from kvstore.server.peering import Peering

# 16 KiB a block.
NS = Namespace(model="meta-llama/Llama-3.1-8B", revision="r1", layers=2, kv_heads=2, head_dim=64, block_tokens=16)
SHARD = Shard()
LONG, LONG_BLOCKS = "agents/research-41d0", 320  # five steps of a restore
SESSIONS = ("agents/billing-7f3a", "agents/billing-91c2", LONG, "chat-2041", "chat-2042", "code-review/pr-1182", "warmup/system")
SLOW_S = 0.08  # of a block from the bucket
HOSTILE = (
    "<img src=x onerror=\"window.hacked='img'\">",
    "\"><script>window.hacked='script'</script>",
    "a/b?c#d %2e {e} é",
    "invoice-\u202efdp.exe",
)


def links_of(session, blocks, more=0):
    """A prefix of its own for each session; `more` blocks after it are another one's."""
    first = 100_000 * (1 + sum(map(ord, session)) % 1000)
    return chain(NS, [*range(first, first + blocks * NS.block_tokens), *range(more * NS.block_tokens)])


async def written(service, session, links, base, **fields):
    """Blocks, and a version that names them."""
    await published(service, links)
    said = {"durability": "bucket", "labels": {"team": "support", "<b>": "<i>bold</i>"}, **fields}
    await service.call("default", "commit", api.Commit(id=session, namespace=NS.id, base_version=base, blocks=links, **said))


async def published(service, links):
    """Blocks in memory."""
    for link in links:
        room = await service.plane.reserve("default", NS.id, SHARD, link)
        if room is not None:
            room.payload[:] = (bytes.fromhex(link.prefix_id) * (len(room.payload) // 32 + 1))[: len(room.payload)]
            await room.publish()


async def furnish(node, sessions):
    """Sessions of several versions, forks of one, one that was deleted and one that expires at once, and a collection."""
    service = node.service
    await service.call("default", "put_namespace", api.PutNamespace(namespace=NS.id, fields=NS))
    for number, session in enumerate(sessions):
        links = links_of(session, LONG_BLOCKS if session == LONG else 12 + 8 * (number % 3))
        for base, upto in enumerate((4, 8, len(links))):
            await written(service, session, links[:upto], base)
    first = sessions[0]
    await service.call("default", "fork", api.Fork(id=first, as_=f"{first}~retry", version=2))
    await service.call("default", "fork", api.Fork(id=first, as_=f"{first}~branch"))
    await written(service, f"{first}~retry", links_of(first, 8, more=6), 2)
    await service.call("default", "fork", api.Fork(id=f"{first}~retry", as_=f"{first}~retry~2", version=3))
    await service.call("default", "pin", api.OfSession(id=sessions[1]))
    await written(service, "scratch/deleted", links_of("scratch/deleted", 20), 0)
    await service.call("default", "collect", api.Collect())
    await service.call("default", "delete_session", api.OfSession(id="scratch/deleted"))
    await written(service, "scratch/expired", links_of("scratch/expired", 3), 0, ttl_s=1)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as here:
        return here.getsockname()[1]


def settings(folder, node="node-a"):
    """A node with a disk tier, prices, and a peer that is gone."""
    own = free_port()
    base = Settings(
        store=StoreSettings(url="memory://console"),
        dram=DramSettings(size=Bytes(24 << 20)),
        nvme=NvmeSettings(path=str(folder / "nvme"), size=Bytes(64 << 20)),
        peers=PeersSettings(listen=f"127.0.0.1:{own}", static=(f"{node}=127.0.0.1:{own}", "node-z=127.0.0.1:9")),
        prices=PricesSettings(
            source="made up",
            put_1000=0.005,
            get_1000=0.0004,
            list_1000=0.005,
            gb_month=0.023,
            gb_egress=0.09,
            gpu_hour=2.5,
            prefill=9000,
        ),
    )
    replace = msgspec.structs.replace
    return replace(base, node=replace(base.node, id=node, listen="", socket=""))


@asynccontextmanager
async def opened(folder, sessions, listen="127.0.0.1:0", **face):
    """A node that others wrote to the bucket of, and its HTTP face: (node, server)."""
    memory = MemoryStore()
    async with Node.open(settings(folder / "writer", "writer"), store=memory) as writer:
        await furnish(writer, sessions)
    slow = Faults(memory, [Fault(action="slow", verb="get", key="*blocks/*", times=1 << 30, seconds=SLOW_S)])
    async with Node.open(settings(folder / "shown"), store=slow) as node, HttpServer.open(node.service, listen, **face) as server:
        yield node, server


@asynccontextmanager
async def member(folder, name, directory):
    """A node without a bucket that others of that directory find, and which serves them."""
    peers = PeersSettings(listen=f"127.0.0.1:{free_port()}", directory=directory)
    alone = msgspec.structs.replace(settings(folder / name, name), store=StoreSettings(), peers=peers)
    async with Node.open(alone) as node:
        asked = (node.service.plane, node.tiers, node.movers, node.clock, node.mesh.peers.owns)
        async with Peering.open(*asked, listen=peers.listen), node.joined(node.mesh):
            await node.service.call("default", "put_namespace", api.PutNamespace(namespace=NS.id, fields=NS))
            yield node


async def read(node, links):
    """How many of them a node has, or gets from others."""
    leases, _ = await node.service.plane.get("default", NS.id, SHARD, links, deadline_ms=5000, reach="bucket")
    for lease in leases:
        lease.release()
    return len(leases)


async def busy(node, sessions):
    """Readers: what they find in memory, and what they find in the bucket. Runs until cancelled."""
    turn = 0
    while True:
        links = links_of(sessions[turn % len(sessions)], 12)[: 4 + turn % 9]
        await read(node, links)
        turn += 1
        await asyncio.sleep(0.02 + 0.1 * (turn % 40 > 25))
