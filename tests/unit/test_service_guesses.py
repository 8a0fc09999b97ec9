"""What a node does for a guessed namespace does not depend on whether another tenant has it: else its time would tell."""

import pytest
from fakes.kv import links_of, namespace

from kvstore import api
from kvstore.config import load
from kvstore.errors import KVTierError
from kvstore.ids import Shard
from kvstore.node import Node
from kvstore.objects import MemoryStore

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
