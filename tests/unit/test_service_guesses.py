"""What a node does for a guessed namespace does not depend on whether another tenant has it: else its time would tell."""

import asyncio
import gc
import weakref

import pytest
from fakes.kv import links_of, namespace

from kvstore import api
from kvstore.config import load
from kvstore.errors import KVTierError
from kvstore.ids import Shard
from kvstore.node import Node
from kvstore.objects import MemoryStore
from kvstore.service.latest import Latest

TENANTS = "[tenants.acme]\n[tenants.rival]\n"
USED, STORED, NOBODYS, OWN = (namespace(tenant=tenant, model=tenant + model) for tenant, model in (
    ("acme", "used"), ("acme", "stored"), ("acme", "never"), ("rival", "own"),
))  # fmt: skip
LINKS = links_of(NOBODYS, 32)


class Recording(MemoryStore):
    """Remembers what was asked of it about namespaces."""

    def __init__(self):
        super().__init__()
        self.asked = []

    async def get(self, key, *args, **kwargs):
        self.saw("get", key)
        return await super().get(key, *args, **kwargs)

    async def head(self, key):
        self.saw("head", key)
        return await super().head(key)

    async def list(self, prefix, **kwargs):
        self.saw("list", prefix)
        async for page in super().list(prefix, **kwargs):
            yield page

    def saw(self, verb, key):
        if "namespaces/" in key:
            self.asked.append((verb, key))


def node(store):
    flags = {"dram.size": "8MiB", "node.listen": "", "limits.drain": "5s"}
    return Node.open(load(toml=TENANTS, flags=flags).settings, store=store)


async def put(service, fields):
    await service.call(fields.tenant, "put_namespace", api.PutNamespace(namespace=fields.id, fields=fields))


ASKING = {
    "lookup": lambda of, ns: of.call("rival", "lookup", api.Lookup(namespace=ns, prefix_ids=[LINKS[0].prefix_id])),
    "create": lambda of, ns: of.call("rival", "create_session", api.CreateSession(id="s", namespace=ns)),
    "commit": lambda of, ns: of.call("rival", "commit", api.Commit(id="s", namespace=ns, base_version=0, blocks=LINKS)),
    "delete": lambda of, ns: of.call("rival", "delete_namespace", api.OfNamespace(namespace=ns)),
    "get": lambda of, ns: of.plane.get("rival", ns, Shard(), LINKS, deadline_ms=0, reach="bucket"),
    "reserve": lambda of, ns: of.plane.reserve("rival", ns, Shard(), LINKS[0]),
    "size": lambda of, ns: of.plane.payload_bytes("rival", ns, Shard(), 16),
}


@pytest.mark.parametrize("how", ASKING)
async def test_a_guess_is_looked_for_alike_whoever_has_it(how):
    store, seen = Recording(), {}
    async with node(store) as opened:
        await put(opened.service, STORED)
    for guess in (USED, STORED, NOBODYS):
        async with node(store) as opened:  # one that has asked for nothing yet
            await put(opened.service, USED)
            for time in ("first", "again"):
                store.asked.clear()
                with pytest.raises(KVTierError) as caught:
                    await ASKING[how](opened.service, guess.id)
                assert caught.value.kind == "not_found"
                seen[guess.model, time] = list(store.asked)
    for time in ("first", "again"):
        nothing = seen[NOBODYS.model, time]
        assert nothing
        assert seen[USED.model, time] == seen[STORED.model, time] == nothing


async def test_what_another_node_has_made_known_is_found():
    store = Recording()
    async with node(store) as first, node(store) as second:
        with pytest.raises(KVTierError):
            await ASKING["lookup"](second.service, OWN.id)
        await put(first.service, OWN)
        assert (await ASKING["lookup"](second.service, OWN.id)).run == 0
        store.asked.clear()
        await ASKING["lookup"](second.service, OWN.id)
        assert not store.asked  # it is known from then on


async def test_a_tenant_with_more_namespaces_than_are_kept_finds_each_and_pushes_out_nobodys(monkeypatch):
    monkeypatch.setattr("kvstore.service.registry._CACHED", 3)
    many = [namespace(tenant="rival", model=f"m{index}") for index in range(5)]
    store = MemoryStore()
    async with node(store) as first:
        for each in many:
            await put(first.service, each)
    async with node(store) as second:
        await put(second.service, USED)
        for each in (many[0], many[-1]):
            assert (await ASKING["lookup"](second.service, each.id)).run == 0
        assert second.registry.known(USED.tenant, USED.id) is not None


async def test_questions_at_once_share_a_listing_that_is_as_new_as_they_are():
    begun, go_on, runs = [], asyncio.Event(), []

    async def work():
        begun.append(len(begun))
        await go_on.wait()
        runs.append(begun[-1])

    latest = Latest(work)
    first = asyncio.create_task(latest())
    await asyncio.sleep(0)
    later = [asyncio.create_task(latest()) for _ in range(50)]
    await asyncio.sleep(0)
    assert begun in ([], [0])
    go_on.set()
    await asyncio.gather(first, *later)
    assert runs == [0, 1]


async def test_a_listing_that_failed_is_no_answer_to_those_who_asked_later():
    outcomes = iter([KVTierError("no"), None])

    async def work():
        await asyncio.sleep(0)
        if (error := next(outcomes)) is not None:
            raise error

    latest = Latest(work)
    first, second = asyncio.create_task(latest()), asyncio.create_task(latest())
    found = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(each) for each in found] == [KVTierError, type(None)]


async def test_what_was_found_is_not_kept_when_those_who_asked_have_it():
    class Found:
        pass

    async def work():
        return Found()

    latest = Latest(work)
    kept = weakref.ref(await latest())
    await asyncio.sleep(0)
    gc.collect()
    assert kept() is None
