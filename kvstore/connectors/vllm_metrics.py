"""What the connector counts, as vLLM gathers it from its processes and shows it to Prometheus."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


class TierStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where the types are checked
    """What happened since the last time, by attribute of :class:`kvstore.connectors.transfers.Counts` and outcome."""

    def reset(self) -> None:
        """See the base class."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> TierStats:
        """See the base class."""
        for field, counts in other.data.items():
            mine = self.data.setdefault(field, {})
            for outcome, count in counts.items():
                mine[outcome] = mine.get(outcome, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """See the base class."""
        return {f"{field} {outcome}": count for field, counts in self.data.items() for outcome, count in counts.items()}

    def is_empty(self) -> bool:
        """See the base class."""
        return not self.data


class TierMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters `kvtier_engine_*`."""

    NAMES: ClassVar[dict[str, tuple[str, str]]] = {
        "looks": ("kvtier_engine_lookups", "Questions about a prompt, by what came of them."),
        "blocks": ("kvtier_engine_blocks", "Blocks that were to be loaded or saved, by what became of them."),
        "nbytes": ("kvtier_engine_bytes", "Bytes of KV that were loaded and saved."),
        "calls": ("kvtier_engine_session_calls", "Commits of sessions, by their outcome."),
    }

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            field: self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, "outcome"])
            for field, (name, text) in self.NAMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See the base class."""
        for field, counts in transfer_stats_data.items():
            for outcome, count in counts.items():
                self._counters[field].labels(*self.per_engine_labelvalues[engine_idx], outcome).inc(count)
