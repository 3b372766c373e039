"""kvtide's metrics in vLLM's own log and ``/metrics``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtide.engines.connector.worker import Moved

__all__ = ["KvtidePromMetrics", "KvtideStats"]

_HELP = {
    "loads": "Prefixes loaded into the pages of requests.",
    "load_bytes": "Bytes loaded into pages.",
    "load_seconds": "Seconds that loads took, from the node's answer on.",
    "failed": "Loads that failed; the prefix was computed.",
    "stores": "Stores of new blocks out of pages, several blocks each.",
    "store_bytes": "Bytes stored out of pages.",
    "store_seconds": "Seconds that stores took, from the node's answer on.",
    "missed": "Stores that were given up, because the node did not answer in time, or not in good order.",
}


class KvtideStats(KVConnectorStats):  # type: ignore[misc]
    """Sums over an interval."""

    @classmethod
    def of(cls, moved: Moved) -> KvtideStats | None:
        data = {name: value for name, value in asdict(moved).items() if value}
        return cls(data) if data else None

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> KvtideStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"kvtide {name}": round(value, 6) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class KvtidePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter for each metric, with vLLM's labels: ``vllm:kvtide_load_bytes_total`` and so on."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], values: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        counters = {
            name: self._counter_cls(name=f"vllm:kvtide_{name}", documentation=text, labelnames=labelnames)
            for name, text in _HELP.items()
        }
        self._counters = {
            engine: {name: counter.labels(*labels) for name, counter in counters.items()}
            for engine, labels in values.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(value)
