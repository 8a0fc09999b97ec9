"""The tier under vLLM's native offloading (0.32), by configuration alone.

::

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10000000000,
      "secondary_tiers": [{"type": "KVTierSecondaryTier", "module_path": "kvstore.connectors.vllm_tier",
                           "url": "kvtier+unix:///run/kvtier/node.sock"}]}}'

Chunks are stored under vLLM's own hashes, which tell adapters, salts and images apart, as opaque rows of its host memory. So there
are no sessions here: `KVTierConnector` has those. See docs/engines/vllm.md.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import torch
import vllm
from blake3 import blake3
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadingEvent, RequestOffloadingContext, get_offload_group_idx
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvstore.config import StorageUrl
from kvstore.connectors.bridge import Bridge
from kvstore.connectors.pages import SAVE_S, Pages
from kvstore.connectors.revisions import model_name, weights_revision
from kvstore.connectors.transfers import Transfer
from kvstore.connectors.verdicts import MISS, Verdicts
from kvstore.copying import copy
from kvstore.ids import Namespace, Shard, canonical_json

IDENTITY: Final = "vllm-block-hash"
_DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # others are stored as bytes
_LAST_SAVES_S: Final = 5.0  # a shutdown waits that long for what it was told to keep


class _Job(msgspec.Struct):
    """A transfer, and what vLLM wants to hear when it has ended. `given_up`: it was stopped, and counts as failed."""

    keys: list[bytes]
    transfer: Transfer
    is_load: bool
    begun: float
    given_up: bool = False


class KVTierSecondaryTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is installed where this runs
    """Runs in vLLM's scheduler, and never makes it wait. A tier that is not there is one where nothing is found.

    Args:
        offloading_spec: vLLM's: what is offloaded, and how it lies in host memory.
        primary_kv_view: vLLM's host memory, u8 [chunks, bytes of a chunk].
        tier_type: vLLM's name for this tier.
        backpressure_detector: vLLM's, or None.
        url: A storage URL.
        revision: What identifies the weights, where vLLM was not given a local folder, whose digest is taken. Change it with
            all else that changes the KV and is unknown to vLLM's offloading configuration: quantization at load, overrides of RoPE.
        enable_kv_events: Publish `BlockStored` for what was stored, where vLLM publishes events.
        locality: `LOCAL` or `REMOTE`, for vLLM's filters and events.

    Raises:
        Invalid: A setting is missing or wrong.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        url: str,
        revision: str = "",
        enable_kv_events: bool = False,
        locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        tenant = StorageUrl.parse(url).tenant or "default"
        namespace = namespace_of(offloading_spec.config, self.block_size_bytes, revision=revision, tenant=tenant)
        # Rows of a view of two dimensions cannot be sliced; and only a cast leaves vLLM free to release its own view at the end.
        self._flat = primary_kv_view.cast("B")
        self._rows: np.ndarray | None = np.frombuffer(self._flat, np.uint8).reshape(-1, self.block_size_bytes)
        self._bridge = Bridge(url)
        self._pages = Pages(self._bridge, namespace, Shard())  # a row holds the parts of all ranks
        self._verdicts = Verdicts(self._pages.look)
        self._jobs: dict[int, _Job] = {}
        self._tells = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._stored: list[bytes] = []

    # --- questions ---

    def on_new_request(self, req_context: Any) -> Any:  # noqa: ARG002  vLLM's signature
        """Chunks as they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """`RETRY` while the answer is on its way, for a quarter of a second at most."""
        tier = self._verdicts.of(key, req_context.req_id, get_offload_group_idx(key))
        if tier is None:
            return LookupResult.RETRY
        return LookupResult.MISS if tier == MISS else LookupResult.HIT

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002  vLLM's signature
        """Ask for all that was looked up in this step."""
        self._verdicts.ask()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what it asked."""
        self._verdicts.forget(req_context.req_id)

    # --- transfers ---

    def submit_store(self, job_metadata: Any) -> None:
        """Offer chunks of host memory, which vLLM holds until this is reported as finished."""
        keys, rows = list(job_metadata.keys), job_metadata.chunk_ids.tolist()

        def fill(index: int, room: memoryview) -> None:
            copy(room, self._row(rows[index]))

        self._begin(job_metadata.job_id, keys, self._pages.save(keys, fill), is_load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Bring chunks into host memory."""
        keys, rows = list(job_metadata.keys), job_metadata.chunk_ids.tolist()

        def place(index: int, page: memoryview) -> None:
            copy(self._row(rows[index]), page)

        transfer = self._pages.load(keys, place, near=self._verdicts.near(keys))
        self._begin(job_metadata.job_id, keys, transfer, is_load=True)

    def get_finished_jobs(self) -> Iterable[Any]:
        """What has ended since the last call. The chunks that a load brought before it failed are kept."""
        ended = [number for number, job in self._jobs.items() if job.given_up or job.transfer.done]
        return [self._result(number, self._jobs.pop(number)) for number in ended]

    def _begin(self, number: int, keys: list[bytes], transfer: Transfer, *, is_load: bool) -> None:
        self._jobs[number] = _Job(keys, transfer, is_load, time.monotonic())

    def _result(self, number: int, job: _Job) -> Any:
        run = 0 if job.given_up else job.transfer.run
        if job.is_load:
            self._verdicts.miss(job.keys[run:])
        elif self._tells:
            self._stored += job.keys[:run]
        return JobResult(
            job_id=number,
            success=run == len(job.keys),
            successful_keys=tuple(job.keys[:run]) if job.is_load and 0 < run < len(job.keys) else None,
            transfer_time=time.monotonic() - job.begun,
            transfer_bytes=run * self._pages.nbytes,
        )

    def _row(self, index: int) -> np.ndarray:
        assert self._rows is not None  # shutdown stops every transfer first
        row: np.ndarray = self._rows[index]
        return row

    # --- the rest ---

    def take_events(self) -> Iterable[Any]:
        """`BlockStored`, where events are wanted."""
        if self._stored:
            keys, self._stored = self._stored, []
            yield OffloadingEvent(keys=keys, medium=self.medium, removed=False, locality=self.locality)

    def drain_jobs(self) -> None:
        """Wait until no transfer touches vLLM's memory; what takes far too long is stopped, and has failed."""
        self._end(self._jobs.values(), SAVE_S)

    def shutdown(self) -> None:
        """Give the last stores a moment, then let go of everything."""
        self._end([job for job in self._jobs.values() if not job.is_load], _LAST_SAVES_S)
        self._end(self._jobs.values(), 0.0)
        self._bridge.close()
        self._rows = None
        self._flat.release()

    @staticmethod
    def _end(jobs: Collection[_Job], patience_s: float) -> None:
        ends = time.monotonic() + patience_s
        for job in jobs:
            if not job.transfer.wait(max(0.0, ends - time.monotonic())):
                job.transfer.stop()
                job.given_up = True


def namespace_of(config: Any, chunk_bytes: int, *, revision: str, tenant: str) -> Namespace:
    """Everything that the bytes of a chunk depend on, besides its hash.

    Args:
        config: vLLM's `OffloadingConfig`.
        chunk_bytes: Of one chunk, with the parts of all ranks.
        revision: See :class:`KVTierSecondaryTier`.
        tenant: As in `Namespace`.

    Raises:
        Invalid: Nothing identifies the weights.
    """
    parallel = config.parallel
    chunk_tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
    shape = {
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "worker_bytes": config.worker_kv_bytes_per_block,
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
    }
    release = ".".join(vllm.__version__.split(".")[:2])
    parts = [
        f"vllm-{release}",
        _device(),
        config.kv_cache_layout or "default",
        config.model.dtype,
        f"chunk{chunk_tokens}",
        f"tp{parallel.tp_size}",
        blake3(canonical_json(shape).encode()).hexdigest()[:32],
    ]
    return Namespace(
        model=model_name(config.model.name),
        revision=weights_revision(config.model.name, revision),
        layers=1,
        page_bytes=chunk_bytes,
        dtype=_DTYPES.get(config.model.dtype, "U8"),
        layout="/".join(parts),
        block_tokens=chunk_tokens,
        tenant=tenant,
        identity=IDENTITY,
    )


def _device() -> str:
    """What attention runs on. A CPU's instructions decide how a block's bytes are arranged."""
    if current_platform.device_type != "cpu":
        return str(current_platform.device_type)
    tiles = "-amx" if torch.cpu._is_amx_tile_supported() else ""  # noqa: SLF001  as vLLM asks
    return f"cpu-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}{tiles}".lower()
