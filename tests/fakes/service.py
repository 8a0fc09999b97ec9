"""A node without faces on a memory store, and sessions to restore."""

from contextlib import asynccontextmanager

from fakes.kv import links_of, namespace, publish

from kvstore import api
from kvstore.config import load
from kvstore.ids import Shard
from kvstore.node import Node
from kvstore.service.wants import block_wants

NS = namespace()
BLOCK = 16  # tokens
ME = "default"


@asynccontextmanager
async def node(store, tmp_path=None, *, clock=None, **flags):
    """Its service. `flags`: settings, with `__` for the dot."""
    base = {"dram.size": "8MiB", "node.listen": "", "limits.drain": "5s"}
    if tmp_path is not None:
        base |= {"nvme.path": str(tmp_path / "nvme"), "nvme.size": "16MiB"}
    settings = load(flags=base | {name.replace("__", "."): value for name, value in flags.items()}).settings
    async with Node.open(settings, store=store, clock=clock) as opened:
        await opened.service.call(ME, "put_namespace", api.PutNamespace(namespace=NS.id, fields=NS))
        yield opened.service


def links(blocks, first=0):
    """A chain of that many full blocks; chains that start elsewhere share nothing."""
    return links_of(NS, blocks * BLOCK, first * 100_000)


async def saved(store, *, key_file="", **sessions):
    """Sessions in the bucket, by name: so many blocks each, that nothing else shares. A node wrote them and is gone."""
    chains = {}
    async with node(store, dram__size="64MiB", encryption__key_file=key_file) as service:
        for index, (name, blocks) in enumerate(sessions.items()):
            chains[name] = links(blocks, first=index + 1)
            assert all(await publish(service, ME, NS, chains[name]))
            request = api.Commit(id=name, namespace=NS.id, base_version=0, blocks=chains[name], durability="bucket")
            await service.call(ME, "commit", request)
    return chains


async def restore(service, name, **fields):
    return await service.call(ME, "restore", api.Restore(id=name, **fields))


async def get_restore(service, restore_id, wait_ms=0):
    return await service.call(ME, "get_restore", api.GetRestore(restore_id=restore_id, wait_ms=wait_ms))


async def restored(service, name, **fields):
    return await get_restore(service, (await restore(service, name, **fields)).restore_id, wait_ms=20_000)


async def cancel(service, restore_id):
    return await service.call(ME, "cancel_restore", api.OfRestore(restore_id=restore_id))


async def hint(service, name, event, **fields):
    return await service.call(ME, "hint", api.Hint(id=name, event=event, **fields))


async def stats(service):
    return await service.call(ME, "stats", api.Nothing())


async def read(service, chain, reach="bucket"):
    """How many leading blocks come, as a request gets them; they are released again."""
    leases, _ = await service.plane.get(ME, NS.id, Shard(), chain, deadline_ms=0, reach=reach)
    for lease in leases:
        lease.release()
    return len(leases)


def in_memory(service, chain):
    """How many leading blocks are in memory, without touching them."""
    wants = block_wants(NS, Shard(), chain)
    return [*service.plane.tiers(ME).dram.contains_many([want.key for want in wants]), False].index(False)
