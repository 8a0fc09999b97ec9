"""LMCache's real parts around our plugin: for test_lmcache.py, and for a process that stores (`lmcache_parts.py URL`)."""

import asyncio
import os
import sys
import threading
from contextlib import contextmanager

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

os.environ["LMCACHE_TRACK_USAGE"] = "false"
MODEL, LAYERS, TOKENS = "m/smollm2", 4, 256
DTYPE = torch.bfloat16


class Backends:
    """LMCache's memory and its remote backend with our plugin, as its storage manager makes them."""

    def __init__(self, url, loop, *, mla=False, layerwise=False, timeout_s=10, memory_gb=0.25, worker=0, **settings):
        shape = (LAYERS, 1, TOKENS, 1, 72) if mla else (LAYERS, 2, TOKENS, 3, 64)
        self.metadata = LMCacheMetadata(MODEL, 2, 2, worker, worker, DTYPE, shape, use_mla=mla, chunk_size=TOKENS)
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,
            max_local_cpu_size=memory_gb,
            use_layerwise=layerwise,
            blocking_timeout_secs=timeout_s,
            lmcache_instance_id="test",
            remote_storage_plugins=["kvtier"],
        )
        plugin = "remote_storage_plugin.kvtier."
        settings = {"url": url, "revision": "1", **settings}
        self.config.extra_config = {
            plugin + "module_path": "kvstore.connectors.lmcache",
            plugin + "class_name": "KVTierAdapter",
            **{plugin + key: value for key, value in settings.items()},
        }
        self.fmt = MemoryFormat.KV_MLA_FMT if mla else MemoryFormat.KV_T2D if layerwise else MemoryFormat.KV_2LTD
        self.layerwise = layerwise
        self.memory = LocalCPUBackend(self.config, self.metadata, dst_device="cpu")
        self.remote = RemoteBackend(self.config, self.metadata, loop, self.memory, dst_device="cpu", plugin_name="kvtier")
        self.ours = self.remote.connection.getWrappedConnector()

    def chunk(self, seed, tokens=TOKENS):
        """Memory of LMCache's with random numbers in it."""
        shape = list(self.metadata.get_shapes(tokens)[0])
        if self.layerwise:  # one layer: [tokens, 2, hidden]
            shape = [tokens, shape[0], shape[3]]
        chunk = self.memory.allocate(torch.Size(shape), DTYPE, self.fmt)
        chunk.tensor.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        return chunk

    def keys(self, *hashes):
        """Of chunks, or with `layerwise` of every layer of them."""
        keys = [CacheEngineKey(MODEL, 2, self.metadata.worker_id, number, DTYPE) for number in hashes]
        return [layer for key in keys for layer in key.split_layers(LAYERS)] if self.layerwise else keys

    def stored(self, keys, chunks, timeout_s=60):
        """Put, and wait until LMCache was told of the last one."""
        told = threading.Semaphore(0)
        self.remote.batched_submit_put_task(keys, chunks, on_complete_callback=lambda _: told.release())
        for _ in keys:
            assert told.acquire(timeout=timeout_s)

    @property
    def used(self):
        """Bytes of its memory that LMCache has given away."""
        return self.memory.memory_allocator.pin_allocator.total_allocated_size


@contextmanager
def running_loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def backends(url, loop, **options):
    made = Backends(url, loop, **options)
    try:
        yield made
    finally:
        made.remote.close()


if __name__ == "__main__":
    with running_loop() as loop, backends(sys.argv[1], loop) as made:
        assert made.ours._bridge.wait_connected(30)
        chunks = [made.chunk(1), made.chunk(2), made.chunk(3, tokens=70)]
        made.stored(made.keys(1, 2, 3), chunks)
        assert made.remote.batched_contains(made.keys(1, 2, 3)) == 3
        for each in chunks:
            each.ref_count_down()
