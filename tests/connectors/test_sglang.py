"""SGLang's storage interface on a tier, with SGLang's own package replaced by the few names the connector takes from it.

tests/engines runs it under SGLang's real factory.
"""

import enum
import importlib
import sys
import time
import types
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvstore.errors import Invalid


class PoolHitPolicy(enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


class HiCacheStorage:
    def register_mem_pool_host(self, pool):
        self.mem_pool_host = pool

    def register_mem_host_pool_v2(self, pool, name):
        self.registered_pools = getattr(self, "registered_pools", {}) | {name: pool}


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict
    restorable_prefix_pages: list = None


@dataclass
class Config:
    extra_config: dict
    model_name: str = "org/model"
    is_mla_model: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1


@dataclass
class Transfer:
    name: str
    keys: list
    host_indices: object = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class HostPool:
    """Pages in two halves, K and V, as SGLang's page_first layout has them."""

    pages: int = 8
    page_size: int = 4
    layout: str = "page_first"
    dtype: str = "bf16"
    part: int = 300
    memory: np.ndarray = field(init=False)

    def __post_init__(self):
        self.memory = np.zeros((2, self.pages, self.part), np.uint8)

    def get_page_buffer_meta(self, indices):
        at = [int(i) // self.page_size for i in indices[:: self.page_size]]
        return [self.memory[half, page].ctypes.data for page in at for half in (0, 1)], [self.part] * (2 * len(at))

    def indices(self, *pages):
        return np.concatenate([np.arange(self.page_size) + page * self.page_size for page in pages])


@pytest.fixture(scope="module")
def module():
    names = ["sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.hicache_storage"]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, types.ModuleType(name))
        stub = sys.modules[names[-1]]
        stub.HiCacheStorage, stub.PoolHitPolicy, stub.PoolTransferResult = HiCacheStorage, PoolHitPolicy, PoolTransferResult
        yield importlib.import_module("kvstore.connectors.sglang")
        patch.delitem(sys.modules, "kvstore.connectors.sglang")


@pytest.fixture
def url(request):
    return f"memory://{request.node.originalname}?dram=64MiB"


@pytest.fixture
def make(module, url):
    made = []

    def build(pool=None, extra=None, **changes):
        storage = module.KVTierStorage(Config({"url": url, "revision": "1"} | (extra or {}), **changes), None)
        made.append(storage)
        assert storage._bridge.wait_connected(30)
        storage.register_mem_pool_host(pool or HostPool())
        return storage

    yield build
    for each in made:
        each.close()


def settle(storage):
    """Wait until what was stored is in the bucket, where others find it: every storage here has a node of its own."""
    quiet = 0
    while quiet < 4:  # what was just accepted is queued a moment later
        quiet = 0 if storage._bridge._kv.stats().queued_bytes else quiet + 1
        time.sleep(0.02)


@pytest.fixture
def full():
    pool = HostPool()
    pool.memory[:] = np.random.default_rng(1).integers(0, 256, pool.memory.shape, np.uint8)
    return pool


KEYS = [f"{i:064x}" for i in range(6)]


def test_pages_come_back_into_another_process_pool_as_they_were(make, full):
    writer, pool = make(full), HostPool()
    reader = make(pool)
    assert writer.batch_exists(KEYS) == 0
    assert writer.batch_set_v1(KEYS[:3], full.indices(0, 1, 2)) == [True] * 3
    settle(writer)
    assert reader.batch_exists(KEYS) == 3
    assert reader.batch_get_v1(KEYS[:4], pool.indices(5, 1, 7, 2)) == [True, True, True, False]
    assert (pool.memory[:, [5, 1, 7]] == full.memory[:, [0, 1, 2]]).all()
    assert not pool.memory[:, [0, 2, 3, 4, 6]].any()


@pytest.mark.parametrize(
    "other",
    [
        {"extra": {"revision": "2"}},
        {"extra": {"model": "another"}},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"pool": HostPool(layout="layer_first")},
        {"pool": HostPool(part=150)},
        {"pool": HostPool(dtype="fp8")},
    ],
    ids=["revision", "model", "tp", "pp", "cp", "layout", "size", "dtype"],
)
def test_what_differs_in_anything_shares_no_page(make, full, other):
    writer = make(full)
    writer.batch_set_v1(KEYS[:2], full.indices(0, 1))
    settle(writer)
    assert make(**other).batch_exists(KEYS[:2]) == 0


def test_ranks_that_hold_the_same_latent_share_pages(make, full):
    writer = make(full, is_mla_model=True, tp_size=2)
    writer.batch_set_v1(KEYS[:2], full.indices(0, 1))
    settle(writer)
    assert make(is_mla_model=True, tp_rank=1, tp_size=2).batch_exists(KEYS[:2]) == 2


def test_indices_that_do_not_match_move_nothing(make, full):
    storage = make(full)
    assert storage.batch_set_v1(KEYS[:2], full.indices(0)) == [False, False]
    assert storage.batch_get_v1(KEYS[:2], None) == [False, False]
    assert storage.batch_exists(KEYS) == 0


def test_after_clear_nothing_is_there_for_this_process_and_others_keep_theirs(make, full):
    storage, other = make(full), make()
    storage.batch_set_v1(KEYS[:2], full.indices(0, 1))
    settle(storage)
    storage.clear()
    assert storage.batch_exists(KEYS) == 0
    assert other.batch_exists(KEYS) == 2
    storage.batch_set_v1(KEYS[:1], full.indices(3))
    assert storage.batch_exists(KEYS) == 1


def test_a_prefix_counts_as_far_as_every_pool_has_what_its_policy_wants(make, full):
    storage, state = make(full), HostPool(part=90)
    state.memory[:] = 7
    storage.register_mem_host_pool_v2(state, "mamba")
    storage.register_mem_host_pool_v2(HostPool(part=30), "indexer")
    assert storage.batch_set_v2([Transfer("kv", KEYS[:4], full.indices(0, 1, 2, 3))]) == {"kv": [True] * 4}
    assert storage.batch_set_v2([Transfer("mamba", KEYS[1:3], state.indices(0, 1))]) == {"mamba": [True] * 2}
    trailing = Transfer("mamba", KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = storage.batch_exists_v2(KEYS, [trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [2, 3])
    assert storage.batch_exists_v2(KEYS, [Transfer("indexer", KEYS)]).kv_hit_pages == 0
    assert storage.batch_exists_v2(KEYS).kv_hit_pages == 4
    got = HostPool(part=90)
    storage.registered_pools["mamba"] = got
    assert storage.batch_get_v2([Transfer("mamba", KEYS[1:3], state.indices(4, 5))]) == {"mamba": [True, True]}
    assert (state.memory[:, [4, 5]] == 7).all()
    unknown = Transfer("mamba", KEYS, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    assert storage.batch_exists_v2(KEYS, [unknown]).kv_hit_pages == 0  # and nothing is raised into the engine


def test_pages_as_tensors(make, torch, url):
    storage = make()
    pages = [torch.arange(75, dtype=torch.float32) + i for i in range(3)]
    assert storage.batch_set(KEYS[:3], pages)
    assert storage.exists(KEYS[0])
    targets = [torch.zeros(75) for _ in range(4)]
    got = storage.batch_get(KEYS[:4], targets)
    assert got[3] is None
    assert all(torch.equal(a, b) for a, b in zip(got[:3], pages, strict=True))
    assert storage.get(KEYS[1], torch.zeros(75)) is not None
    assert storage.get(KEYS[5], torch.zeros(75)) is None
    assert not storage.batch_set(KEYS[:2], pages[:1])


def test_a_target_whose_bytes_do_not_lie_together_is_not_said_to_be_filled(make, torch):
    storage = make()
    assert storage.batch_set(KEYS[:1], [torch.arange(75, dtype=torch.float32)])
    assert storage.batch_get(KEYS[:2], [torch.zeros(75), torch.zeros(150)[::2]]) == [None, None]
    assert storage.batch_get(KEYS[:1], [torch.zeros(75)]) != [None]


def test_a_pool_in_the_place_of_another_is_the_one_that_is_written(make):
    storage, before, after = make(), HostPool(part=90), HostPool(part=90)
    before.memory[:] = 7
    storage.register_mem_host_pool_v2(before, "mamba")
    assert storage.batch_set_v2([Transfer("mamba", KEYS[:1], before.indices(0))]) == {"mamba": [True]}
    storage.register_mem_host_pool_v2(after, "mamba")
    before.memory[:] = 0
    assert storage.batch_get_v2([Transfer("mamba", KEYS[:1], after.indices(2))]) == {"mamba": [True]}
    assert (after.memory[:, 2] == 7).all()
    assert not before.memory.any()


@pytest.mark.parametrize(
    "meta",
    [
        lambda pool, _: None,
        lambda pool, _: ([pool.memory.ctypes.data] * 3, [300] * 3),
        lambda pool, _: ([pool.memory.ctypes.data] * 4, [300, 300, 300, 200]),
        lambda pool, _: ([pool.memory.ctypes.data] * 4, [300]),
        lambda pool, _: ([], []),
        lambda pool, indices: pool.nothing[indices],
        lambda pool, indices: [][indices[0]],
    ],
    ids=["None", "parts", "lengths", "sizes", "empty", "no attribute", "no index"],
)
def test_a_pool_that_says_nothing_of_use_moves_nothing_and_raises_nothing(make, full, monkeypatch, meta):
    storage = make(full)
    monkeypatch.setattr(HostPool, "get_page_buffer_meta", meta)
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_set_v1(KEYS[:2], full.indices(0, 1)) == [False] * 2
    assert storage.batch_get_v1(KEYS[:2], full.indices(0, 1)) == [False] * 2


def test_without_a_node_there_is_nothing_and_nothing_breaks(module, tmp_path, full):
    storage = module.KVTierStorage(Config({"url": f"kvtier+unix://{tmp_path}/nobody.sock", "revision": "1"}), None)
    storage.register_mem_pool_host(full)
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_get_v1(KEYS[:1], full.indices(0)) == [False]
    assert storage.batch_set_v1(KEYS[:1], full.indices(0)) == [False]
    assert storage.get_stats()["looks"] == {"unavailable": 1}
    storage.close()


@pytest.mark.parametrize(
    ("extra", "said"), [({}, "url"), ({"url": "memory://x"}, "revision"), ({"url": "nonsense", "revision": "1"}, "scheme")]
)
def test_a_missing_setting_is_named(module, extra, said):
    with pytest.raises(Invalid, match=said):
        module.KVTierStorage(Config(extra), None)
