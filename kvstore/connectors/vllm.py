"""vLLM's KV connector: `kv_connector` `KVTierConnector` with `kv_connector_module_path` `kvstore.connectors.vllm`.

It only hands on what vLLM says: to the scheduler's half in the scheduler's process, to the worker's half in each worker's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvstore.connectors.bridge import Bridge
from kvstore.connectors.vllm_events import events
from kvstore.connectors.vllm_messages import Report, Step
from kvstore.connectors.vllm_metrics import TierMetrics, TierStats
from kvstore.connectors.vllm_names import Place, Settings, model_of
from kvstore.connectors.vllm_scheduler import SchedulerHalf
from kvstore.connectors.vllm_worker import WorkerHalf

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said below its own logger, and of others warnings only


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where the types are checked
    """From the scheduler's half to the workers'."""

    def __init__(self, step: Step) -> None:
        self.step = step


class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers' halves to the scheduler's."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both together."""
        return ReportMetadata(self.report.with_(other.report))


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KV that outlives the engine. See docs/engines/vllm.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        model = model_of(vllm_config, kv_cache_config, settings)
        self._bridge = Bridge.shared(settings.url)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        parallel = vllm_config.parallel_config
        if role == KVConnectorRole.SCHEDULER:
            told = getattr(vllm_config, "kv_events_config", None)
            self._tells = told is not None and told.enable_kv_cache_events
            self._hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or vllm_config.cache_config.block_size
            self._scheduler = SchedulerHalf(model, settings, self._bridge, parallel.world_size, tells=self._tells)
            log.info("kvtier: %s keeps the KV of namespace %s", settings.url, model.namespace.id)
        else:
            self._worker = WorkerHalf(model, Place.of_worker(parallel), self._bridge, kv_cache_config.num_blocks)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what could not be saved is computed again."""
        return False

    # --- the scheduler's half ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        assert self._scheduler is not None
        if num_external_tokens > 0:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See the base class."""
        assert self._scheduler is not None
        return StepMetadata(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        assert self._scheduler is not None
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, ReportMetadata) else None
        self._scheduler.reported(report, connector_output.finished_recving or ())

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002  vLLM's signature
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        assert self._scheduler is not None
        return self._scheduler.finished(request)

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002  vLLM's signature
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `SupportsHMA`."""
        assert self._scheduler is not None
        return self._scheduler.finished(request)

    def reset_cache(self) -> bool | None:
        """See the base class. What is stored cannot be told apart from what new weights would give: no more of either."""
        assert self._scheduler is not None
        self._scheduler.stop()
        return True

    def take_events(self) -> Iterable[Any]:
        """See the base class. `BlockStored` and `BlockRemoved` with medium `STORAGE` and ownership `kvtier`."""
        assert self._scheduler is not None
        return list(events(self._scheduler.take_news(), self._hash_tokens)) if self._tells else ()

    # --- the workers' halves ---

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See the base class."""
        assert self._worker is not None
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See the base class."""
        assert self._worker is not None
        if isinstance(kv_connector_metadata, StepMetadata):
            self._worker.before(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002  vLLM's signature
        """See the base class."""
        assert self._worker is not None
        self._worker.begin_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps: there is nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the pass."""

    def wait_for_save(self) -> None:
        """See the base class. Begins the saves of this step, and waits for nothing."""
        assert self._worker is not None
        self._worker.begin_saves(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002  as vLLM
        """See the base class."""
        assert self._worker is not None
        return self._worker.finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See the base class. With several groups a failure is told by request: block ids would not say whose."""
        assert self._worker is not None
        results = super().get_transfer_results(finished_req_ids)
        broken = self._worker.take_broken_requests()
        if len(self._kv_cache_config.kv_cache_groups) > 1:
            results.failed_recving |= broken
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        assert self._worker is not None
        broken = self._worker.take_broken_blocks()
        return broken if len(self._kv_cache_config.kv_cache_groups) == 1 else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See the base class."""
        report = self._worker.take_report() if self._worker is not None else None
        return None if report is None else ReportMetadata(report)

    # --- both ---

    def get_kv_connector_stats(self) -> Any:
        """See the base class."""
        news = self._bridge.news()
        return TierStats(data=news) if news else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """See the base class."""
        return TierStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> Any:
        """See the base class."""
        return TierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """See the base class."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._bridge.close()

    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        return metadata.step if isinstance(metadata, StepMetadata) else Step()
