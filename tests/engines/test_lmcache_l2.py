"""The multiprocess server's L2 adapter: through LMCache's own plugin loader, its storage manager and its own check."""

import json
import os
import select
import subprocess
import sys
import time
from itertools import count
from types import SimpleNamespace

import pytest

from kvstore.errors import Invalid

try:
    import torch
    from conftest import UNPACKED
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
    from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.distributed.storage_manager import StorageManager
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
except ImportError as error:
    pytest.skip(f"LMCache is not unpacked here: {error}", allow_module_level=True)

NUMBERS = count()
LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 16, 192])], [torch.bfloat16])


def plugin(url, **params):
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "kvstore.connectors.lmcache_l2",
            "class_name": "KVTierL2Adapter",
            "adapter_params": {"url": url, "revision": "1", **params},
        }
    )


def adapters(*specs):
    return parse_args_to_l2_adapters_config(SimpleNamespace(l2_adapter=list(specs)))


def keys(*hashes, rank=0, group=0, salt=""):
    return [ObjectKey(number.to_bytes(4, "big"), "org/model", rank, group, salt) for number in hashes]


@pytest.fixture
def url(request):
    return f"memory://{request.node.originalname}-{next(NUMBERS)}?dram=64MiB"


@pytest.fixture
def make(url):
    made = []

    def build(where=url, **params):
        adapter = create_l2_adapter(adapters(plugin(where, **params)).adapters[0], l1_memory_desc=None)
        made.append(adapter)
        return adapter

    yield build
    for each in made:
        each.close()


def connected(adapter):
    assert adapter._bridge.wait_connected(30)
    return adapter


def chunk(value, shape=(2, 4, 16, 192)):
    data = torch.full(shape, value, dtype=torch.bfloat16).reshape(-1)
    meta = MemoryObjMetadata(torch.Size(shape), torch.bfloat16, data.data_ptr(), data.nbytes, MemoryFormat.KV_2LTD, 1)
    meta.shapes, meta.dtypes = [torch.Size(shape)], [torch.bfloat16]
    return TensorMemoryObj(data, meta, parent_allocator=None)


def ended(fd):
    assert select.select([fd], [], [], 60)[0]
    os.eventfd_read(fd)


def store(adapter, keys, chunks):
    task = adapter.submit_store_task(keys, chunks)
    ended(adapter.get_store_event_fd())
    quiet = 0
    while adapter._bridge.connected and quiet < 4:  # until it is in the bucket: every adapter here has a node of its own
        quiet = 0 if adapter._bridge._kv.stats().queued_bytes else quiet + 1  # what was just accepted is queued a moment later
        time.sleep(0.02)
    return adapter.pop_completed_store_tasks()[task]


def found(adapter, keys, layouts=None):
    task = adapter.submit_lookup_and_lock_task(keys, {0: LAYOUT, 1: LAYOUT} if layouts is None else layouts)
    ended(adapter.get_lookup_and_lock_event_fd())
    bits = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    return [bits.test(i) for i in range(len(keys))]


def load(adapter, keys, chunks):
    task = adapter.submit_load_task(keys, chunks)
    ended(adapter.get_load_event_fd())
    bits = adapter.query_load_result(task)
    return [bits.test(i) for i in range(len(keys))]


def test_what_one_server_stored_another_finds_key_by_key_and_loads(make):
    writer, reader = connected(make()), connected(make())
    one, two = keys(1, 3, rank=1), keys(1, 2, 3, rank=2)
    result = store(writer, [*one, *two], [chunk(i) for i in range(5)])
    assert (result.is_successful(), result.bytes_transferred()) == (True, 5 * chunk(0).get_size())
    asked = [*keys(1, 2, 3, rank=1), *two]
    assert found(reader, asked) == [True, False, True, True, True, True]  # a hole of one rank is not another's
    assert found(reader, keys(1, rank=1, salt="s")) == found(reader, keys(1, rank=1, group=1)) == [False]
    into = [chunk(-1) for _ in range(4)]
    assert load(reader, [*one, *keys(2, rank=1), two[0]], into) == [True, True, False, True]
    assert [float(each.tensor.float().mean()) for each in into] == [0, 1, -1, 2]


@pytest.mark.parametrize(
    ("other", "layout"),
    [
        ({"revision": "2"}, LAYOUT),
        ({"tenant": "other"}, LAYOUT),
        ({"revision": {"org/model": "2"}}, LAYOUT),
        ({}, MemoryLayoutDesc([torch.Size([2, 4, 32, 96])], [torch.bfloat16])),
        ({}, MemoryLayoutDesc([torch.Size([2, 4, 16, 192])], [torch.float16])),
    ],
)
def test_other_weights_tenants_and_shapes_find_nothing(make, other, layout):
    writer = connected(make())
    assert store(writer, keys(1), [chunk(1)]).is_successful()
    assert found(connected(make(**other)), keys(1), {0: layout}) == [False]
    assert found(writer, keys(1)) == [True]


def test_without_a_node_tasks_end_and_nothing_is_there(make, tmp_path):
    adapter = make(f"kvtier+unix://{tmp_path}/nobody.sock")
    assert not store(adapter, keys(1), [chunk(1)]).is_successful()
    assert found(adapter, keys(1)) == [False]
    assert load(adapter, keys(1), [chunk(1)]) == [False]
    assert not adapter.report_status()["is_healthy"]


@pytest.mark.parametrize(("params", "said"), [({"url": ""}, "url"), ({"url": "nonsense"}, "scheme"), ({"colour": "red"}, "colour")])
def test_a_wrong_parameter_is_named(params, said):
    with pytest.raises(Invalid, match=said):
        create_l2_adapter(adapters(plugin(**{"url": "memory://x", **params})).adapters[0])


def server(where):
    """LMCache's storage manager, as its multiprocess server has it."""
    return StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name="")),
            EvictionConfig("LRU"),
            adapters(plugin(where)),
        )
    )


def test_a_storage_manager_stores_behind_its_memory_and_prefetches_in_another_process(node):
    wanted = keys(1, 2, 3)
    first = server(node.url)
    try:
        assert first.l2_adapters()[0][1]._bridge.wait_connected(30)
        reserved = first.reserve_write(wanted, LAYOUT)
        for i, key in enumerate(wanted):
            reserved[key].tensor.fill_(i + 1)
        first.finish_write(wanted)
        until(lambda: first.l2_adapters()[0][1].report_status()["blocks"].get("saved") == 3)
    finally:
        first.close()
    node.settled()
    node.wipe()
    second = server(node.url)
    try:
        assert second.l2_adapters()[0][1]._bridge.wait_connected(30)
        asked = [*wanted, *keys(4)]
        handle = second.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(asked, 0, LAYOUT)]))
        assert second.wait_prefetch_status(handle, 60)
        hits = second.query_prefetch_status(handle).l2_hit_cells[0]
        assert [hits.test(i) for i in range(4)] == [True, True, True, False]
        with second.read_prefetched_results(wanted) as chunks:
            assert [float(each.tensor.float().mean()) for each in chunks] == [1, 2, 3]
        second.finish_read_prefetched(wanted)
    finally:
        second.close()


def until(true, seconds=60):
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_lmcaches_own_check(url):
    """Its contract test for L2 adapters, as its users run it: without hints of layouts."""
    run = subprocess.run(
        [sys.executable, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--l2-adapter", plugin(url)],
        env=os.environ | UNPACKED,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "FAIL" not in run.stdout
    assert "Failed" not in run.stdout
    assert run.stdout.count("5/5") >= 4, run.stdout
