"""KVTierStorage between SGLang's real factory and its real host pools."""

import time
from itertools import count

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str, storage_namespace_seed

LAYERS, PAGES = 3, 16
NUMBERS = count()


def capacity(pool):
    return {
        "device_capacity_tokens": pool.size,
        "start_layer": pool.start_layer,
        "end_layer": pool.end_layer,
    }


def mha(layout, page=8, heads=2, v_dim=16):
    pool = MHATokenToKVPool(PAGES * page, page, torch.bfloat16, heads, 16, LAYERS, "cpu", False, v_head_dim=v_dim)
    info = pool.get_device_pool_infos()[0].buffer_info
    return MHATokenToKVPoolHost(info, 1, 0, page, layout, False, "cpu", **capacity(pool))


def mla(layout, page=8):
    pool = MLATokenToKVPool(PAGES * page, page, torch.bfloat16, 32, 8, LAYERS, "cpu", False)
    info = pool.get_device_pool_infos()[0].buffer_info
    return MLATokenToKVPoolHost(info, 1, 0, page, layout, False, "cpu", target_layer_num=LAYERS, **capacity(pool))


POOLS = {
    f"{kind.__name__} {layout}": (kind, layout)
    for kind in (mha, mla)
    for layout in ("layer_first", "page_first", "page_first_direct")
}


@pytest.fixture
def url():
    return f"memory://sglang-{next(NUMBERS)}?dram=128MiB"


@pytest.fixture
def make(url):
    made = []

    def build(pool, where=url, mla=None, **changes):
        fields = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": isinstance(pool, MLATokenToKVPoolHost) if mla is None else mla,
            "enable_storage_metrics": False,
            "is_page_first_layout": pool.layout == "page_first",
            "model_name": "org/model",
            "extra_config": {
                "backend_name": "kvtier",
                "module_path": "kvstore.connectors.sglang",
                "class_name": "KVTierStorage",
                "interface_v1": 1,
                "url": where,
                "revision": "1",
            },
        }
        fields["extra_config"] |= changes.pop("extra_config", {})
        storage = StorageBackendFactory.create_backend("dynamic", HiCacheStorageConfig(**(fields | changes)), pool)
        made.append(storage)
        assert real(storage)._bridge.wait_connected(30)
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, PoolName.KV)
        return storage

    yield build
    for each in made:
        each.close()


def settle(storage):
    """Wait until what was stored is in the bucket, where others find it: every storage here has a node of its own."""
    quiet = 0
    while quiet < 4:  # what was just accepted is queued a moment later
        quiet = 0 if real(storage)._bridge._kv.stats().queued_bytes else quiet + 1
        time.sleep(0.02)


def real(storage):
    return storage._backend if isinstance(storage, HiCacheStorageFailureInjector) else storage


def buffers(pool):
    names = [name for name in ("kv_buffer", "k_buffer", "v_buffer") if isinstance(getattr(pool, name, None), torch.Tensor)]
    return [getattr(pool, name) for name in names]


def fill(pool, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers(pool):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return pool


def empty(pool):
    for buffer in buffers(pool):
        buffer.zero_()
    return pool


def indices(pool, *pages):
    return torch.cat([torch.arange(pool.page_size) + page * pool.page_size for page in pages])


def page(pool, number):
    """As SGLang itself flattens it."""
    return pool.get_data_page(number * pool.page_size, flat=True).clone()


def hashes(pages, page_size=8, extra_key=None, cache_salt=None, seed=0):
    """A prompt's page hashes, as SGLang's cache makes them for its storage."""
    ids = np.random.default_rng(seed).integers(0, 1000, pages * page_size).tolist()
    return list(get_storage_hash_str(ids, storage_namespace_seed(extra_key, cache_salt), page_size=page_size))


@pytest.mark.parametrize("name", POOLS)
def test_pages_come_back_bit_by_bit_through_v1_v2_and_tensors(make, name):
    kind, layout = POOLS[name]
    source, target = fill(kind(layout)), empty(kind(layout))
    writer, reader, keys = make(source), make(target), hashes(6)
    assert writer.batch_set_v1(keys[:3], indices(source, 5, 2, 9)) == [True] * 3
    settle(writer)
    assert reader.batch_exists(keys) == 3
    assert reader.batch_get_v1(keys[:4], indices(target, 1, 0, 7, 3)) == [True, True, True, False]
    assert [torch.equal(page(target, a), page(source, b)) for a, b in ((1, 5), (0, 2), (7, 9))] == [True] * 3
    assert not page(target, 3).any()
    assert writer.batch_set_v2([PoolTransfer(PoolName.KV, indices(source, 4), keys=keys[3:4])]) == {"kv": [True]}
    settle(writer)
    assert reader.batch_exists_v2(keys).kv_hit_pages == 4
    got = reader.batch_get_v2([PoolTransfer(PoolName.KV, indices(target, 8, 9), keys=keys[3:5])])
    assert got == {"kv": [True, False]}
    assert torch.equal(page(target, 8), page(source, 4))
    flat = hashes(3, seed=1)
    assert writer.batch_set(flat[:2], [page(source, 1), page(source, 3)])
    settle(writer)
    assert reader.batch_exists(flat) == 2
    got = reader.batch_get(flat, [target.get_dummy_flat_data_page() for _ in flat])
    assert [torch.equal(a, page(source, b)) for a, b in zip(got[:2], (1, 3), strict=True)] == [True, True]
    assert got[2] is None


@pytest.mark.parametrize(
    ("pool", "changes"),
    [
        (lambda: mha("page_first", page=4), {}),
        (lambda: mha("page_first", page=16), {}),
        (lambda: mha("page_first", heads=1), {}),
        (lambda: mha("layer_first"), {}),
        (lambda: mha("page_first"), {"tp_rank": 1, "tp_size": 2}),
        (lambda: mha("page_first"), {"tp_rank": 0, "tp_size": 2}),
        (lambda: mha("page_first"), {"pp_rank": 1, "pp_size": 2}),
        (lambda: mha("page_first"), {"attn_cp_rank": 1, "attn_cp_size": 2}),
        (lambda: mha("page_first"), {"extra_config": {"revision": "2"}}),
        (lambda: mha("page_first"), {"extra_config": {"tenant": "other"}}),
    ],
)
def test_pages_of_another_size_shape_layout_rank_or_weights_are_never_served(make, pool, changes):
    source, keys = fill(mha("page_first")), hashes(2)
    writer, target = make(source), empty(pool())
    assert writer.batch_set_v1(keys, indices(source, 0, 1)) == [True, True]
    settle(writer)
    other = make(target, **changes)
    assert other.batch_exists(keys) == 0
    assert other.batch_exists_v2(keys).kv_hit_pages == 0
    assert other.batch_get_v1(keys, indices(target, 0, 1)) == [False, False]
    assert not page(target, 0).any()
    assert writer.batch_exists(keys) == 2


def test_ranks_that_hold_the_same_latent_share_pages(make):
    source, target, keys = fill(mla("page_first")), empty(mla("page_first")), hashes(2)
    writer = make(source, tp_rank=0, tp_size=2)
    assert all(writer.batch_set_v1(keys, indices(source, 0, 1)))
    settle(writer)
    assert all(make(target, tp_rank=1, tp_size=2).batch_get_v1(keys, indices(target, 3, 4)))
    assert torch.equal(page(target, 4), page(source, 1))


def test_ranks_that_share_out_the_tokens_of_a_page_keep_a_part_each(make):
    def part(rank, seed=None):
        pool = MLATokenToKVPool(PAGES * 8, 8, torch.bfloat16, 32, 8, LAYERS, "cpu", False)
        info = pool.get_device_pool_infos()[0].buffer_info
        host = MLATokenToKVPoolHost(
            info, 1, 0, 16, "page_first", False, "cpu", dcp_size=2, dcp_rank=rank, target_layer_num=LAYERS, **capacity(pool)
        )
        return empty(host) if seed is None else fill(host, seed)

    def wide(*pages):
        return torch.cat([torch.arange(16) + at * 16 for at in pages])

    def ranked(pool, rank):
        return make(pool, tp_rank=rank, tp_size=2, dcp_rank=rank, dcp_size=2, logical_page_size=16)

    keys, sources, targets = hashes(2, 16), [part(0, 1), part(1, 2)], [part(0), part(1)]
    for rank in (0, 1):
        writer = ranked(sources[rank], rank)
        assert writer.batch_set_v1(keys, wide(0, 1)) == [True, True]
        settle(writer)
    for rank in (0, 1):
        reader = ranked(targets[rank], rank)
        assert reader.batch_exists(keys) == 2
        assert reader.batch_get_v1(keys, wide(1, 3)) == [True, True]
        assert torch.equal(targets[rank].kv_buffer[8:16], sources[rank].kv_buffer[:8])
        assert torch.equal(targets[rank].kv_buffer[24:32], sources[rank].kv_buffer[8:16])


def test_salts_and_extra_keys_are_in_the_hashes(make):
    source = fill(mha("page_first"))
    storage = make(source)
    kinds = [{}, {"extra_key": "lora-1"}, {"cache_salt": "lora-1"}, {"extra_key": "a", "cache_salt": "b"}, {"extra_key": "ab"}]
    chains = [hashes(2, **kind) for kind in kinds]
    assert len({chain[0] for chain in chains}) == len(kinds)
    for i, chain in enumerate(chains):
        assert storage.batch_exists(chain) == 0
        assert storage.batch_set_v1(chain, indices(source, i, i + 1)) == [True, True]
    assert [storage.batch_exists(hashes(2, **kind)) for kind in kinds] == [2] * len(kinds)


def test_clear_touches_only_its_own(make):
    source, keys = fill(mha("page_first")), hashes(2)
    mine, another = make(source), make(mha("page_first"))
    assert mine.batch_set_v1(keys, indices(source, 0, 1)) == [True, True]
    settle(mine)
    mine.clear()
    assert mine.batch_exists(keys) == 0
    assert another.batch_exists(keys) == 2


def test_a_state_that_only_some_prefixes_have(make):
    pool, state = fill(mha("page_first")), fill(mla("page_first"), 3)
    storage, keys = make(pool), hashes(5)
    storage.register_mem_host_pool_v2(state, PoolName.MAMBA)
    assert all(storage.batch_set_v1(keys[:4], indices(pool, 0, 1, 2, 3)))
    stored = storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, indices(state, 0), keys=[keys[2]])])
    assert list(stored.values()) == [[True]]
    trailing = PoolTransfer(PoolName.MAMBA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = storage.batch_exists_v2(keys, [trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])


def test_a_pool_without_addresses_or_a_store_without_a_node_is_a_miss(make, tmp_path):
    pool, keys = mha("page_head"), hashes(2)
    storage = make(fill(pool))
    assert storage.batch_set_v1(keys, indices(pool, 0)) == [False, False]  # indices that do not match
    asymmetric = mha("page_first")
    alone = StorageBackendFactory.create_backend(
        "dynamic",
        HiCacheStorageConfig(
            0, 1, 0, 1, 0, 1, False, False, True, "org/model",
            extra_config={
                "backend_name": "kvtier", "module_path": "kvstore.connectors.sglang", "class_name": "KVTierStorage",
                "url": f"kvtier+unix://{tmp_path}/nobody.sock", "revision": "1",
            },
        ),
        asymmetric,
    )  # fmt: skip
    alone.register_mem_pool_host(asymmetric)
    assert alone.batch_exists(keys) == 0
    assert alone.batch_set_v1(keys, indices(asymmetric, 0, 1)) == [False, False]
    assert alone.batch_get_v1(keys, indices(asymmetric, 0, 1)) == [False, False]
    alone.close()


def test_with_sglangs_failure_injector_on_no_wrong_byte_comes(make):
    """Whatever fails or is late at SGLang's interface: what comes is right, and what was stored is there in the end."""
    source, target = fill(mha("page_first")), mha("page_first")
    writer, reader = make(source), make(target)
    assert isinstance(writer, HiCacheStorageFailureInjector)
    failed = 0
    for turn in range(40):
        keys, at = hashes(3, seed=turn), [turn % PAGES, (turn + 5) % PAGES, (turn + 9) % PAGES]
        while not all(writer.batch_set_v1(keys, indices(source, *at))):
            failed += 1
        settle(writer)
        empty(target)
        while not all(got := reader.batch_get_v1(keys, indices(target, 1, 2, 3))):
            failed += 1
            assert not any(got)
        assert [torch.equal(page(target, i + 1), page(source, at[i])) for i in range(3)] == [True] * 3
        assert reader.batch_exists(keys) in (0, 3)
    assert failed > 0
    assert reader.get_stats()["blocks"].get("lost", 0) == 0
