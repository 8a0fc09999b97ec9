"""The secondary tier without an engine: a stub of vLLM's interface above it, a real node in this process below it."""

import mmap
import time
import types

import numpy as np
import pytest
from vllm_offload_stub import Locality, LookupResult, installed

from kvstore import codec
from kvstore.errors import Invalid
from kvstore.ids import Shard, engine_id

CHUNKS, CHUNK = 8, 8192
KEYS = [bytes([number]) * 32 + (0).to_bytes(4, "big") for number in range(CHUNKS)]


@pytest.fixture
def module(torch):
    with installed():
        from kvstore.connectors import vllm_tier  # noqa: PLC0415  only while the stub is there

        yield vllm_tier


def config(**changes):
    parallel = types.SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1)
    fields = {
        "groups": (types.SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("model.layers.0.attn",)),),
        "worker_kv_bytes_per_block": CHUNK,
        "model": types.SimpleNamespace(name="some/model", dtype="float32"),
        "cache": types.SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": parallel,
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "NHD",
    }
    return types.SimpleNamespace(**{**fields, **changes})


class Engine:
    """vLLM's side: host memory, and jobs with numbers."""

    def __init__(self, module, url, **settings):
        self.host = np.zeros((CHUNKS, CHUNK), np.int8)
        spec = types.SimpleNamespace(config=config(), kv_events_config=types.SimpleNamespace(enable_kv_cache_events=True))
        self.tier = module.KVTierSecondaryTier(
            spec, memoryview(self.host), "KVTierSecondaryTier", url=url, revision="w1", **settings
        )
        assert self.tier._bridge.wait_connected(30)
        self._jobs = 0

    def found(self, keys=KEYS, request="r"):
        """What it hears when it asks until all is known."""
        context = types.SimpleNamespace(req_id=request)
        while True:
            heard = []
            for key in keys:
                heard.append(self.tier.lookup(key, context))
                if heard[-1] is LookupResult.MISS:
                    break
            self.tier.on_schedule_end(None)
            if LookupResult.RETRY not in heard:
                return heard.count(LookupResult.HIT)

    def settle(self):
        """Wait until what was stored is in the bucket, where other nodes see it."""
        while self.tier._bridge._kv.stats().queued_bytes:
            time.sleep(0.005)

    def run(self, submit, keys, chunks):
        self._jobs += 1
        submit(types.SimpleNamespace(job_id=self._jobs, keys=keys, chunk_ids=np.array(chunks), req_context=None))
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self._jobs
        return result

    def store(self, keys, chunks):
        return self.run(self.tier.submit_store, keys, chunks)

    def load(self, keys, chunks):
        return self.run(self.tier.submit_load, keys, chunks)


@pytest.fixture
def start(module, request):
    engines = []

    def start(**settings):
        engines.append(Engine(module, f"memory://{request.node.name}?dram=32MiB", **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.tier.shutdown()


def content(number):
    return np.random.default_rng(number).integers(-128, 128, CHUNK, np.int8)


def test_chunks_of_one_engine_are_found_and_loaded_by_another(start):
    first, second = start(), start()
    assert first.found() == 0
    for chunk in range(5):
        first.host[chunk] = content(chunk)
    stored = first.store(KEYS[:5], [0, 1, 2, 3, 4])
    assert (stored.success, stored.transfer_bytes) == (True, 5 * CHUNK)
    first.settle()
    assert second.found() == 5
    loaded = second.load(KEYS[:5], [6, 0, 2, 7, 1])
    assert (loaded.success, loaded.successful_keys) == (True, None)
    for key, chunk in enumerate([6, 0, 2, 7, 1]):
        assert (second.host[chunk] == content(key)).all()
    assert not second.host[3:6].any()


def test_after_a_load_that_fails_in_the_middle_the_first_chunks_are_kept_and_the_others_missing(start):
    engine = start()
    for chunk in range(2):
        engine.host[chunk] = content(chunk)
    engine.store(KEYS[:2], [0, 1])
    assert engine.found(KEYS[:2]) == 2
    result = engine.load([KEYS[0], KEYS[5], KEYS[1]], [4, 5, 6])  # the one in the middle was never stored
    assert (result.success, result.successful_keys) == (False, (KEYS[0],))
    assert (engine.host[4] == content(0)).all()
    assert not engine.host[5:7].any()
    assert engine.found([KEYS[1]]) == 0  # for this request; another one asks anew
    assert engine.found([KEYS[1]], request="other") == 0  # the verdict stands while the first request lives
    engine.tier.on_request_finished(types.SimpleNamespace(req_id="r"))
    engine.tier.on_request_finished(types.SimpleNamespace(req_id="other"))
    assert engine.found([KEYS[1]], request="third") == 1


def test_without_a_node_everything_is_missing_at_once_and_nothing_raises(module, tmp_path):
    host = np.zeros((CHUNKS, CHUNK), np.int8)
    spec = types.SimpleNamespace(config=config(), kv_events_config=None)
    tier = module.KVTierSecondaryTier(
        spec, memoryview(host), "KVTierSecondaryTier", url=f"kvtier+unix://{tmp_path}/none.sock", revision="w1"
    )
    context = types.SimpleNamespace(req_id="r")
    assert tier.lookup(KEYS[0], context) is LookupResult.RETRY
    tier.on_schedule_end(None)
    assert tier.lookup(KEYS[0], context) is LookupResult.MISS
    job = types.SimpleNamespace(job_id=1, keys=KEYS[:2], chunk_ids=np.array([0, 1]), req_context=context)
    for submit in (tier.submit_store, tier.submit_load):
        submit(job)
        tier.drain_jobs()
        (result,) = tier.get_finished_jobs()
        assert (result.success, result.transfer_bytes) == (False, 0)
    tier.shutdown()


def test_events_tell_of_what_was_stored_where_they_are_wanted(start):
    silent, telling = start(), start(enable_kv_events=True, locality="REMOTE")
    silent.store(KEYS[:1], [0])
    assert list(silent.tier.take_events()) == []
    telling.store(KEYS[1:3], [1, 2])
    (event,) = telling.tier.take_events()
    assert (event.keys, event.removed, event.locality) == (KEYS[1:3], False, Locality.REMOTE)
    assert list(telling.tier.take_events()) == []


def test_the_engine_gets_its_memory_back_at_the_end(module, request):
    memory = mmap.mmap(-1, CHUNKS * CHUNK)
    flat = memoryview(memory)
    view = flat.cast("B", (CHUNKS, CHUNK))
    spec = types.SimpleNamespace(config=config(), kv_events_config=None)
    tier = module.KVTierSecondaryTier(spec, view, "KVTierSecondaryTier", url=f"memory://{request.node.name}", revision="w1")
    job = types.SimpleNamespace(job_id=1, keys=KEYS, chunk_ids=np.arange(CHUNKS), req_context=None)
    tier.submit_store(job)  # still under way when the engine ends
    tier.shutdown()
    view.release()
    flat.release()
    memory.close()  # raises while anybody holds a part of it


def test_whatever_changes_the_bytes_changes_the_namespace(module):
    def ident(revision="w1", chunk=CHUNK, **changes):
        return module.namespace_of(config(**changes), chunk, revision=revision, tenant="default").id

    known = [
        ident(),
        ident(revision="w2"),
        ident(chunk=2 * CHUNK),
        ident(model=types.SimpleNamespace(name="other/model", dtype="float32")),
        ident(model=types.SimpleNamespace(name="some/model", dtype="fp8_e4m3")),
        ident(cache=types.SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2)),
        ident(cache=types.SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1)),
        ident(parallel=types.SimpleNamespace(world_size=2, tp_size=2, pp_size=1, pcp_size=1, dcp_size=1)),
        ident(parallel=types.SimpleNamespace(world_size=2, tp_size=1, pp_size=2, pcp_size=1, dcp_size=1)),
        ident(groups=(types.SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("model.layers.1.attn",)),)),
        ident(kv_cache_layout="HND"),
        ident(canonical_layout=True),
    ]
    assert len(set(known)) == len(known)
    assert ident() == known[0]


def test_a_model_that_is_no_folder_needs_a_name_for_its_weights(module, tmp_path):
    with pytest.raises(Invalid, match="which weights"):
        module.namespace_of(config(), CHUNK, revision="", tenant="default")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    model = types.SimpleNamespace(name=str(tmp_path), dtype="float32")
    before = module.namespace_of(config(model=model), CHUNK, revision="", tenant="default")
    assert before.model == tmp_path.name
    (tmp_path / "model.safetensors").write_bytes(b"weights of another day")
    assert module.namespace_of(config(model=model), CHUNK, revision="", tenant="default").id != before.id


def test_keys_of_another_group_are_other_blocks(module):
    namespace = module.namespace_of(config(), CHUNK, revision="w1", tenant="default")
    other = KEYS[0][:-4] + (1).to_bytes(4, "big")
    assert engine_id(namespace.id, KEYS[0]) != engine_id(namespace.id, other)
    assert codec.layout(namespace, Shard(), namespace.block_tokens).payload_bytes == CHUNK
