"""A disk tier and the disk it is on: too large a one is refused before it is made, and a disk that fills later stops nobody."""

import asyncio
import os
import shutil
import subprocess
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest
from fakes.kv import links_of, namespace, publish

from kvstore import api
from kvstore.config import Tenant, load
from kvstore.errors import Invalid, Overloaded
from kvstore.ids import Shard
from kvstore.node import Node
from kvstore.objects import Fault, Faults, MemoryStore
from kvstore.service.wants import block_wants
from tiering import SECOND_SIGHT_KEYS

NS = namespace()


@asynccontextmanager
async def node(path, size, store=None):
    flags = {"dram.size": "8MiB", "node.listen": "", "limits.drain": "5s", "nvme.path": str(path), "nvme.size": size}
    async with Node.open(load(flags=flags).settings, store=store or MemoryStore()) as opened:
        await opened.service.call("default", "put_namespace", api.PutNamespace(namespace=NS.id, fields=NS))
        yield opened.service


async def test_a_tier_larger_than_its_disk_is_refused_before_anything_is_made(tmp_path):
    path = tmp_path / "nvme"
    with pytest.raises(Invalid) as caught:
        async with node(path, "900TiB"):
            pass
    assert "nvme.size is 943,718,400 MiB" in caught.value.message
    assert caught.value.message.endswith(" MiB free")
    assert "lower nvme.size" in caught.value.remedy
    assert not path.exists()


async def test_what_a_tier_needs_includes_its_index_and_a_margin(tmp_path, monkeypatch):
    at = {"free": 100 << 20}
    monkeypatch.setattr("kvstore.service.room.disk_usage", lambda _: SimpleNamespace(**at))
    async with node(tmp_path / "small", "32MiB"):
        pass
    with pytest.raises(Invalid, match="has 100 MiB free"):
        async with node(tmp_path / "large", "33MiB"):
            pass
    at["free"] = 0
    async with node(tmp_path / "small", "32MiB"):  # its slab is there already
        pass
    with pytest.raises(Invalid, match="of its own"):
        async with node(tmp_path / "small", "64MiB"):
            pass


@pytest.fixture
def disk(tmp_path):
    """A real file system of 120 MiB."""
    at = tmp_path / "mounted"
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "kvtier-test", at], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.decode().strip()}")
    yield at
    subprocess.run(["umount", "-l", at], check=True)


def fill(at):
    (at / "filler").write_bytes(bytes(shutil.disk_usage(at).free))


async def test_b40_a_disk_that_is_filled_later_stops_no_node_and_no_read(disk):
    path, links, store = disk / "nvme", links_of(NS, 160), MemoryStore()
    async with node(path, "16MiB", store):
        pass
    size = (path / "slab").stat().st_size
    os.truncate(path / "slab", 0)
    os.truncate(path / "slab", size)  # a slab whose pages the disk has yet to find
    fill(disk)
    assert shutil.disk_usage(disk).free < 1 << 20
    async with node(path, "16MiB", store) as service:
        assert await publish(service, "default", NS, links) == [True] * 10
        request = api.Commit(id="s", namespace=NS.id, base_version=0, blocks=links, durability="bucket")
        assert (await service.call("default", "commit", request)).tokens == 160
        for _ in range(500):
            degraded = (await service.call("default", "ready", api.Nothing())).degraded
            if "nvme" in degraded:
                break
            await asyncio.sleep(0.01)
        assert "No space left on device" in degraded["nvme"]
        leases, miss = await service.plane.get("default", NS.id, Shard(), links, deadline_ms=0, reach="bucket")
        assert (len(leases), miss) == (10, "")
        for lease in leases:
            lease.release()
        assert (await service.call("default", "stats", api.Nothing())).tiers["nvme"].dropped > 0


async def test_a_flood_of_one_tenant_leaves_another_its_part_of_the_disk(tmp_path):
    flags = {"dram.size": "8MiB", "node.listen": "", "nvme.path": str(tmp_path / "nvme"), "nvme.size": "1MiB"}
    settings = msgspec.structs.replace(load(flags=flags).settings, tenants={"flood": Tenant(), "small": Tenant()})
    async with Node.open(settings, store=MemoryStore()) as opened:
        there = {}
        for tenant, blocks in (("small", 8), ("flood", 120)):
            fields, stack = namespace(tenant=tenant), opened.tiers[tenant].stack
            await opened.service.call(tenant, "put_namespace", api.PutNamespace(namespace=fields.id, fields=fields))
            links = links_of(fields, 16 * blocks)
            assert all(await publish(opened.service, tenant, fields, links))
            keys = [want.key for want in block_wants(fields, Shard(), links)]
            await stack._to_disk.wait(keys)
            there[tenant] = lambda keys=keys, disk=stack.disk: sum(disk.contains_many(keys))
        assert there["small"]() == 8
        assert 40 < there["flood"]() < 120


async def test_what_one_was_promised_while_the_bucket_is_away_leaves_another_its_part_of_the_disk(tmp_path):
    flags = {"dram.size": "8MiB", "node.listen": "", "nvme.path": str(tmp_path / "nvme"), "nvme.size": "1MiB", "limits.drain": "0s"}
    settings = msgspec.structs.replace(load(flags=flags).settings, tenants={"flood": Tenant(), "small": Tenant()})
    away = Faults(MemoryStore())

    async def promise(service, tenant, name, blocks):
        fields = namespace(tenant=tenant)
        await service.call(tenant, "put_namespace", api.PutNamespace(namespace=fields.id, fields=fields))
        links = links_of(fields, 16 * blocks, first=100_000 * ord(name))
        assert all(await publish(service, tenant, fields, links))
        request = api.Commit(id=name, namespace=fields.id, base_version=0, blocks=links, durability="nvme")
        await service.call(tenant, "commit", request)

    async with Node.open(settings, store=away) as opened:
        away.script += [Fault(action="before", verb="put", times=100_000)]
        await promise(opened.service, "flood", "a", 25)  # of the 42 in its part
        with pytest.raises(Overloaded, match="an even part"):
            await promise(opened.service, "flood", "b", 18)
        await promise(opened.service, "flood", "c", 15)
        await promise(opened.service, "small", "d", 20)
    away.script.clear()
    settings = msgspec.structs.replace(settings, tenants=settings.tenants | {"new": Tenant()})
    async with Node.open(settings, store=away) as opened:  # what was promised is kept, though a part is less now
        for _ in range(2000):
            counts = (await opened.service.call("flood", "stats", api.Nothing())).commits
            if counts.get("ok") == 3 and not counts["pending"]:
                break
            await asyncio.sleep(0.01)
        await promise(opened.service, "flood", "b", 18)


async def test_what_a_node_remembers_of_blocks_it_did_not_write_does_not_grow_with_its_tenants(tmp_path):
    flags = {
        "dram.size": "8MiB",
        "node.listen": "",
        "nvme.path": str(tmp_path / "nvme"),
        "nvme.size": "1MiB",
        "nvme.admission": "second",
    }
    settings = msgspec.structs.replace(load(flags=flags).settings, tenants={name: Tenant() for name in "abcd"})
    async with Node.open(settings, store=MemoryStore()) as opened:
        owners = opened.tiers["a"].stack.disk._catalog._owners
        assert sum(each.policy._remembered for each in owners._all) == SECOND_SIGHT_KEYS
