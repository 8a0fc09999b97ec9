"""Removals and shared prefixes through a node's calls and through the commands."""

import asyncio
import json
from contextlib import asynccontextmanager

import msgspec
import pytest
from fakes.kv import links_of, namespace, publish
from typer.testing import CliRunner

import kvstore
from kvstore import api
from kvstore.cli.commands import app
from kvstore.config import Tenant, load
from kvstore.errors import Denied, Gone, NotFound, Unsupported
from kvstore.ids import Shard
from kvstore.node import Node
from kvstore.objects import MemoryStore

NS, NEW = namespace(), namespace(revision="2")


@asynccontextmanager
async def node(store, *tenants):
    settings = load(flags={"dram.size": "8MiB", "node.listen": "", "limits.drain": "5s"}).settings
    settings = msgspec.structs.replace(settings, tenants={name: Tenant() for name in tenants})
    async with Node.open(settings, store=store) as opened:
        for tenant in tenants or ["default"]:
            for fields in (namespace(tenant=tenant), namespace(tenant=tenant, revision="2")):
                await opened.service.call(tenant, "put_namespace", api.PutNamespace(namespace=fields.id, fields=fields))
        yield opened.service


async def committed(service, session, fields, tokens=40, tenant="default"):
    links = links_of(fields, tokens)
    assert all(await publish(service, tenant, fields, links))
    request = api.Commit(id=session, namespace=fields.id, base_version=0, blocks=links, durability="bucket")
    return await service.call(tenant, "commit", request)


async def ended(service, restore_id, tenant="default"):
    return await service.call(tenant, "get_restore", api.GetRestore(restore_id=restore_id, wait_ms=20_000))


async def test_a_weight_update_drops_the_old_models_sessions_and_says_what_is_left():
    async with node(MemoryStore()) as service:
        for session in ("a", "b"):
            await committed(service, session, NS)
        await committed(service, "a", NEW)
        await service.call("default", "collect", api.Collect())
        listed = await service.call("default", "list_namespaces", api.Nothing())
        assert {info.namespace: info.blocks for info in listed.namespaces} == {NS.id: 3, NEW.id: 3}

        dropped = await service.call("default", "delete_namespace", api.OfNamespace(namespace=NS.id))
        assert (dropped.sessions, dropped.families, dropped.failed) == (2, 2, 0)
        with pytest.raises(Gone):
            await service.call("default", "get_session", api.OfSession(id="b"))
        assert (await service.call("default", "get_session", api.OfSession(id="a"))).namespace == NEW.id
        await service.call("default", "collect", api.Collect(now=True))
        listed = await service.call("default", "list_namespaces", api.Nothing())
        assert {info.namespace: info.blocks for info in listed.namespaces} == {NS.id: 0, NEW.id: 3}
        assert (await committed(service, "b", NS)).version == 1  # nobody is kept from using it again


async def test_b20_nobody_drops_what_another_tenant_has():
    async with node(MemoryStore(), "ann", "bob") as service:
        theirs = namespace(tenant="bob")
        await committed(service, "s", theirs, tenant="bob")
        with pytest.raises(NotFound):
            await service.call("ann", "delete_namespace", api.OfNamespace(namespace=theirs.id))
        with pytest.raises(Denied, match="own tenant"):
            await service.call("ann", "delete_tenant", api.OfTenant(tenant="bob"))
        assert (await service.call("ann", "delete_tenant", api.OfTenant(tenant="ann"))).sessions == 0
        assert (await service.call("bob", "get_session", api.OfSession(id="s"))).tokens == 40
        assert (await service.call("bob", "delete_tenant", api.OfTenant(tenant="bob"))).sessions == 1
        with pytest.raises(Gone):
            await service.call("bob", "get_session", api.OfSession(id="s"))


async def test_a_warm_prefix_is_found_by_a_node_that_starts_after_its_session_was_deleted_and_collected():
    store = MemoryStore()
    async with node(store) as service:
        await committed(service, "origin", NS)  # two full blocks and a partial one
        warmed = await service.call("default", "warm", api.Warm(id="origin", as_="prompt", tokens=32))
        assert (warmed.session.id, warmed.session.tokens, warmed.session.pinned) == ("warm/prompt", 32, True)
        status = await ended(service, warmed.restore_id)
        assert (status.state, status.staged_tokens) == ("ready", 32)
        await service.call("default", "delete_session", api.OfSession(id="origin"))
        for _ in range(2):
            await service.call("default", "collect", api.Collect(now=True))
    async with node(store) as service:
        ids = [link.prefix_id for link in links_of(NS, 64, partial=False)]  # a longer prompt with the same beginning
        found = api.Found(run=0, tiers=[])
        for _ in range(200):  # it learns of prefixes when it starts, in the background
            found = await service.call("default", "lookup", api.Lookup(namespace=NS.id, prefix_ids=ids, deadline_ms=1000))
            if found.run:
                break
            await asyncio.sleep(0.01)
        assert (found.run, found.tiers) == (2, ["bucket", "bucket"])
        leases, miss = await service.plane.get("default", NS.id, Shard(), links_of(NS, 48), deadline_ms=0, reach="bucket")
        assert (len(leases), miss) == (2, "absent")
        for lease in leases:
            lease.release()


# --- the commands ---


@pytest.fixture
def url(root):
    return f"memory://{root}?dram=16MiB"


@pytest.fixture
def kvtier(url):
    def run(*arguments, code=0, where=("--url", url), said=None):
        result = CliRunner().invoke(app, [*arguments, *where], catch_exceptions=False, input=said)
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def sessions(url):
    with kvstore.open_sync(url) as kv:
        for fields, ids in ((NS, "abc"), (NEW, "a")):
            links = links_of(fields, 40)
            assert all(kv.put(fields, Shard(), links, lambda _, room: room.__setitem__(slice(None), bytes(len(room)))))
            for session in ids:
                kv.commit(session, namespace=fields, base_version=0, blocks=links, durability="bucket")


def alive(kvtier):
    return [json.loads(line)["id"] for line in kvtier("sessions", "ls", "--format", "json").stdout.splitlines()]


def test_namespaces_rm_takes_the_beginning_of_an_id_and_asks_first(kvtier, sessions):
    kvtier("namespaces", "rm", NS.id[:12], said="n\n", code=1)
    assert sorted(alive(kvtier)) == ["a", "a", "b", "c"]
    assert kvtier("namespaces", "rm", NS.id[:12], said="y\n").stdout.count("dropped 3 sessions of 3 families") == 1
    assert alive(kvtier) == ["a"]
    again = json.loads(kvtier("namespaces", "rm", NS.id, "--yes", "--format", "json").stdout)
    assert again == {"sessions": 0, "families": 0, "failed": 0}
    assert "there is no namespace" in kvtier("namespaces", "rm", "0123456789abcdef", "--yes", code=3).stderr


def test_tenants_rm_asks_first_and_goes_for_the_callers_own(kvtier, sessions):
    kvtier("tenants", "rm", "default", said="n\n", code=1)
    assert len(alive(kvtier)) == 4
    assert "own tenant" in kvtier("tenants", "rm", "somebody", "--yes", code=1).stderr
    assert kvtier("tenants", "rm", "default", "--yes").stdout.startswith("dropped 4 sessions of 4 families")
    assert alive(kvtier) == []


def test_tenants_rm_without_a_node(kvtier, sessions, url):
    where = ("--store", url.partition("?")[0])
    assert kvtier("tenants", "rm", "somebody", "--yes", where=where).stdout.startswith("dropped 0 sessions")
    assert json.loads(kvtier("tenants", "rm", "default", "--yes", "--format", "json", where=where).stdout)["sessions"] == 4
    assert alive(kvtier) == []


def test_warm_publishes_and_fetches(kvtier, sessions):
    shown = kvtier("warm", "b", "--as", "prompt", "--tokens", "32").stdout
    assert "warm/prompt" in shown
    assert "32 tokens" in shown
    [status] = [json.loads(line) for line in kvtier("warm", "b", "--format", "json").stdout.splitlines()]
    assert (status["id"], status["state"], status["staged_tokens"]) == ("warm/b", "ready", 40)
    assert sorted(alive(kvtier))[-2:] == ["warm/b", "warm/prompt"]
    assert "exists already" in kvtier("warm", "b", code=1).stderr
    kvtier("warm", "nobody", code=3)


async def test_stage_1_has_nothing_to_drop():
    settings = load(flags={"dram.size": "8MiB", "node.listen": "", "store.url": ""}).settings
    async with Node.open(settings) as opened:
        for name, request in (
            ("delete_namespace", api.OfNamespace(namespace=NS.id)),
            ("delete_tenant", api.OfTenant(tenant="default")),
            ("warm", api.Warm(id="s")),
        ):
            with pytest.raises(Unsupported):
                await opened.service.call("default", name, request)
