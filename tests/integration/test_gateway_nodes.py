"""What a gateway learns of the nodes beside its engines, and how little it waits for one that says nothing."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from kvstore import api
from kvstore.errors import Unavailable
from kvstore.gateway import whereabouts
from kvstore.gateway.choosing import ASSUMED, Routing
from kvstore.gateway.engines import Engines, EngineSettings
from kvstore.gateway.whereabouts import Whereabouts
from kvstore.ids import Namespace, Shard, chain, tier_key, tier_key_head
from kvstore.mesh.members import Member
from kvstore.mesh.router import Candidate, Prompt, Router

FIELDS = {"revision": "r", "layers": 1, "page_bytes": 1 << 20, "layout": "opaque"}
OURS = Namespace(model="m", block_tokens=128, **FIELDS)
TOKENS = range(1024)
BLOCKS = [link.prefix_id for link in chain(OURS, TOKENS)]
KEYS = [bytes.fromhex(block) for block in BLOCKS]


class FakeNode:
    """Answers look-ups with `tiers`, or raises `fault`."""

    def __init__(self, node, *stored):
        self.node, self.stored, self.tiers, self.fault, self.asked = node, stored, [], None, 0
        self.mesh = api.MeshStats()

    async def stats(self):
        return SimpleNamespace(mesh=self.mesh, node=self.node)

    async def list_namespaces(self):
        found = [api.NamespaceInfo(namespace=each.id, fields=each, blocks=blocks) for each, blocks in self.stored]
        return api.Namespaces(namespaces=found)

    async def lookup(self, **_):
        self.asked += 1
        if self.fault:
            raise self.fault
        return SimpleNamespace(tiers=self.tiers)

    async def aclose(self):
        pass


class FakeDirectory:
    """Says that nodes have leading blocks: `has`, by id. Until it is `complete` it may have more to say."""

    def __init__(self):
        self.has, self.complete = {}, False

    async def said(self, keys):
        head = tier_key_head(OURS.id, Shard())
        assert keys == [tier_key(head, block) for block in BLOCKS]
        return [[Member(id_, 1, "h", 1) for id_, most in self.has.items() if at < most] for at in range(len(keys))], self.complete


@pytest.fixture
async def place(monkeypatch, request):
    """A router, two nodes and what tells the one of the others."""
    nodes, now, directory = {"one": FakeNode("n1"), "two": FakeNode("n2")}, [0.0], FakeDirectory()
    nodes["two"].mesh = getattr(request, "param", nodes["two"].mesh)

    async def connect(url):
        return nodes[url]

    monkeypatch.setattr(whereabouts, "connect", connect)
    router = Router(lambda: now[0], lambda: 0.0)
    for name, node in (("a", "one"), ("b", "two")):
        router.join(Candidate(name, node), msgspec.structs.replace(ASSUMED, token_s=1.0))  # computing is never sooner
    found = Whereabouts(router, {url: Shard() for url in nodes}, lambda: now[0], directory)
    keeping = asyncio.create_task(found.keep())
    await asyncio.sleep(0.01)

    async def tokens(fresh=()):
        """By engine, after a look."""
        await found.look(OURS, BLOCKS, KEYS, lambda _: fresh)
        return {each.candidate: each.tokens for each in router.rank(Prompt(KEYS, len(TOKENS), OURS.block_tokens, 1 << 13))}

    yield SimpleNamespace(nodes=nodes, now=now, found=found, tokens=tokens, directory=directory)
    keeping.cancel()
    await found.aclose()


@pytest.mark.parametrize("place", [None], indirect=True)
async def test_a_node_outside_of_the_mesh_loads_nothing_from_others_nor_they_from_it(place):
    place.nodes["one"].tiers, place.nodes["two"].tiers = ["dram"] * 4, ["dram"] * 2
    found = await place.tokens()
    assert (found["a"].dram, found["b"].dram, found["b"].peer) == (512, 256, 0)


async def test_each_node_says_what_it_has(place):
    place.nodes["one"].tiers = ["dram"] * 4 + ["nvme"] * 2
    place.nodes["two"].tiers = ["peer"] * 6 + ["bucket"] * 2
    found = await place.tokens()
    assert (found["a"].dram, found["a"].nvme, found["a"].bucket) == (512, 256, 255)
    assert (found["b"].dram, found["b"].peer, found["b"].bucket) == (0, 768, 255)
    place.nodes["one"].tiers = []
    assert (await place.tokens())["b"].peer == 0


async def test_a_directory_tells_of_nodes_without_engines(place):
    place.directory.has, place.directory.complete = {"n1": 2, "far": 6}, True
    place.nodes["one"].tiers = ["dram"] * 2
    found = await place.tokens()
    assert (found["a"].dram, found["a"].peer, found["b"].dram, found["b"].peer) == (256, 512, 0, 768)
    place.directory.has = {}
    assert (await place.tokens())["b"].peer == 256


async def test_b34_a_node_that_cleared_its_cache_has_nothing_at_the_next_request_whatever_a_directory_says(place):
    place.directory.has, place.directory.complete = {"n1": 8}, True
    place.nodes["one"].tiers = ["dram"] * 8
    assert (await place.tokens())["b"].peer == 1023
    place.nodes["one"].tiers = []
    found = await place.tokens()
    assert (found["a"].dram, found["a"].nvme, found["a"].peer, found["b"].peer) == (0, 0, 0, 0)


async def test_a_directory_speaks_for_a_node_that_does_not_and_its_own_silence_takes_nothing_back(place):
    place.directory.has, place.directory.complete = {"n1": 8}, True
    place.nodes["one"].fault = Unavailable("gone")
    assert (await place.tokens())["a"].nvme == 1023
    place.directory.has, place.directory.complete = {}, False
    assert (await place.tokens())["a"].nvme == 1023
    place.directory.complete = True
    assert (await place.tokens())["a"].nvme == 0


async def test_a_node_that_is_silent_is_left_alone_and_then_has_nothing(place):
    one = place.nodes["one"]
    one.tiers = ["dram"] * 8
    assert (await place.tokens())["a"].dram == 1023
    one.fault = Unavailable("gone")
    assert (await place.tokens())["a"].dram == 1023  # once may be chance
    await place.tokens()
    assert one.asked == 2
    place.now[0] += 2
    assert (await place.tokens())["a"].dram == 0
    one.fault = None
    place.now[0] += 2
    assert (await place.tokens())["a"].dram == 1023


async def test_the_namespace_with_most_blocks_counts(place, caplog):
    other, later = Namespace(model="other", **FIELDS), Namespace(model="m", block_tokens=64, **FIELDS)
    place.nodes["one"].stored = ((other, 99),)
    assert await place.found.namespace("m") is None
    assert caplog.messages.count("no KV of model 'm' is stored yet, but of other") == 1
    assert await place.found.namespace("m") is None
    assert len(caplog.messages) == 1
    place.nodes["two"].stored = ((other, 99), (OURS, 5), (later, 4))
    assert await place.found.namespace("m") == OURS


async def test_a_model_that_no_node_names_is_said_once(place, caplog):
    def said():
        return [each for each in caplog.messages if each.startswith("no node names a namespace of model 'm' yet (2 of 2 ")]

    await place.found.namespace("m")
    assert not said()
    place.now[0] += 60
    await place.found.namespace("m")
    await place.found.namespace("m")
    assert len(said()) == 1


@pytest.mark.parametrize("model", ["org/m", "/models/m", ""])
async def test_a_model_may_be_named_by_its_folder(model):
    engines = Engines({"a": EngineSettings(url="http://h", node="one")}, None)
    routing = Routing(engines, None, model=model, jitter=lambda: 0.0)
    asked = []

    async def namespace(name):
        asked.append(name)
        return OURS

    routing.whereabouts.namespace = namespace
    following = asyncio.create_task(routing.follow())
    await asyncio.sleep(0.01)
    following.cancel()
    assert asked[:1] == {"org/m": ["org/m"], "/models/m": ["m"], "": []}[model]
    assert routing.namespace.block_tokens == (OURS.block_tokens if model else 256)
