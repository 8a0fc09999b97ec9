"""vLLM's native offloading on the CPU backend, for tests: in tree it wants a GPU for the copies to host memory.

Everything else (scheduler, manager, shared memory, secondary tiers) is vLLM's own and needs no device. One KV group, direct layout:
a chunk is [tensor 0: its blocks][tensor 1: its blocks]...
"""

import time

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    def __init__(self, kv_caches, blocks_per_chunk, region):
        assert len(kv_caches.group_data_refs) == 1
        self._blocks, self._region, self._done = blocks_per_chunk, region, []
        self._caches = [
            (each.tensor, region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk), each.page_size_bytes)
            for each in kv_caches.tensors
        ]

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, into_host=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, into_host=False)

    def _copy(self, job_id, engine, host, *, into_host):
        begun, copied = time.perf_counter(), 0
        first = int(engine.block_indices[0]) % self._blocks  # a chunk may be entered in its middle
        for tensor, chunks, nbytes in self._caches:
            for number, block in enumerate(engine.block_ids.tolist(), first):
                place = number % self._blocks * nbytes
                there = chunks[int(host.block_ids[number // self._blocks])][place : place + nbytes]
                here = tensor[block].reshape(-1)[:nbytes]
                there.copy_(here) if into_host else here.copy_(there)
                copied += nbytes
        self._done.append(TransferResult(job_id, True, copied, time.perf_counter() - begun))
        return True

    def get_finished(self):
        done, self._done = self._done, []
        return done

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self._caches = []
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
