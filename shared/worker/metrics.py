"""A worker's own /metrics, for deployments that scrape workers directly. The router shows the same figures for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared import telemetry
from shared.membership import WorkerRecord


class WorkerMetrics(Collector):
    def __init__(self, record: Callable[[], WorkerRecord]) -> None:
        self._record = record

    @classmethod
    def registry_of(cls, record: Callable[[], WorkerRecord]) -> CollectorRegistry:
        registry = CollectorRegistry()
        registry.register(cls(record))
        return registry

    def collect(self) -> Iterator[Metric]:
        record = self._record()
        stats = record.stats
        gauges = {
            telemetry.METRIC_WORKER_RUNNING: stats.num_running,
            telemetry.METRIC_WORKER_WAITING: stats.num_waiting,
            telemetry.METRIC_WORKER_KV_USAGE: stats.num_blocks_used / record.num_blocks,
            telemetry.METRIC_WORKER_BLOCKS_USED: stats.num_blocks_used,
            telemetry.METRIC_WORKER_BLOCKS_TOTAL: record.num_blocks,
            telemetry.METRIC_WORKER_BLOCKS_CACHED: stats.num_blocks_cached,
            telemetry.METRIC_WORKER_HOST_BLOCKS_TOTAL: record.num_host_blocks,
            telemetry.METRIC_WORKER_HOST_BLOCKS_CACHED: stats.num_host_blocks_cached,
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(name, "see the README", labels=["worker", "role"])
            gauge.add_metric([record.worker_id, record.role], value)
            yield gauge
        for name, value in sorted(stats.counters.items()):
            counter = CounterMetricFamily(telemetry.METRIC_WORKER_COUNTER_PREFIX + name, "total since start", labels=["worker", "role"])
            counter.add_metric([record.worker_id, record.role], value)
            yield counter
