"""Everything on the router's /metrics. Labels are names of ours (model, worker, reason), never a string a client sent."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.router.workers import Worker, WorkerDirectory
from shared import telemetry
from shared.messages import WorkerTiming

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UNSAFE = re.compile(r"[^a-zA-Z0-9_]")


class RouterMetrics:
    """Counters and histograms of the requests this router served, and the last stats of every worker."""

    def __init__(self, model_name: str, directory: WorkerDirectory) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._model = model_name

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=self.registry).labels(model_name)

        self.ttft = histogram(telemetry.METRIC_TTFT, "Request received to first token handed to the socket", telemetry.TTFT_BUCKETS)
        self.itl = TokenHistogram(telemetry.METRIC_ITL, "Gap between two tokens of one choice", telemetry.TPOT_BUCKETS, model_name)
        self.registry.register(self.itl)
        self.tpot = histogram(telemetry.METRIC_TPOT, "(duration - TTFT) / (output tokens - 1)", telemetry.TPOT_BUCKETS)
        self.e2e = histogram(telemetry.METRIC_E2E, "Request received to last byte", telemetry.LATENCY_BUCKETS)
        self.queue_time = histogram(telemetry.METRIC_QUEUE_TIME, "Waiting for prefill to begin", telemetry.LATENCY_BUCKETS)
        self.prefill_time = histogram(telemetry.METRIC_PREFILL_TIME, "Prefill computation", telemetry.LATENCY_BUCKETS)
        self.decode_time = histogram(telemetry.METRIC_DECODE_TIME, "Decode computation", telemetry.LATENCY_BUCKETS)
        self.inference_time = histogram(telemetry.METRIC_INFERENCE_TIME, "First token to last token", telemetry.LATENCY_BUCKETS)
        self.prompt_length = histogram(telemetry.METRIC_REQUEST_PROMPT_TOKENS, "Prompt tokens of a request", telemetry.TOKEN_BUCKETS)
        self.output_length = histogram(telemetry.METRIC_REQUEST_GENERATION_TOKENS, "Tokens generated for it", telemetry.TOKEN_BUCKETS)
        self.prefill_computed = histogram(
            telemetry.METRIC_PREFILL_COMPUTED_TOKENS, "Prompt tokens computed, not reused", telemetry.TOKEN_BUCKETS
        )
        self.genai_ttft = histogram(telemetry.METRIC_GENAI_TTFT, "gen_ai.server.time_to_first_token", telemetry.TTFT_BUCKETS)
        self.genai_tpot = histogram(telemetry.METRIC_GENAI_TPOT, "gen_ai.server.time_per_output_token", telemetry.TPOT_BUCKETS)
        self.genai_duration = histogram(telemetry.METRIC_GENAI_DURATION, "gen_ai.server.request.duration", telemetry.GENAI_DURATION_BUCKETS)
        self.prompt_tokens = counter(telemetry.METRIC_PROMPT_TOKENS, "Prompt tokens")
        self.generation_tokens = counter(telemetry.METRIC_GENERATION_TOKENS, "Generated tokens")
        self.prefix_queries = counter(telemetry.METRIC_PREFIX_QUERIES, "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = counter(telemetry.METRIC_PREFIX_HITS, "Prompt tokens whose KV was reused")
        self.preemptions = counter(telemetry.METRIC_PREEMPTIONS, "Preemptions of requests")
        self.retries = counter(telemetry.METRIC_RETRIES, "Attempts repeated on another worker")
        self.disconnects = counter(telemetry.METRIC_DISCONNECTS, "Clients that hung up before the end")
        labelled = {
            telemetry.METRIC_REQUEST_SUCCESS: ("Choices that ended", ["model_name", "finished_reason"]),
            telemetry.METRIC_REJECTED: ("Requests answered with an error", ["model_name", "error_type"]),
            telemetry.METRIC_ROUTES: ("Routes chosen", ["model_name", "kind"]),
            telemetry.METRIC_HTTP_REQUESTS: ("HTTP answers", ["route", "status"]),
        }
        counters = [Counter(name, text, labels, registry=self.registry) for name, (text, labels) in labelled.items()]
        self.success, self.rejected, self.routes, self.http_requests = counters
        self.in_flight = Gauge(telemetry.METRIC_IN_FLIGHT, "Choices in flight", ["model_name"], registry=self.registry).labels(model_name)
        self.registry.register(WorkerCollector(model_name, directory))
        directory.on_timing = self.observe_timing

    def count_success(self, finish_reason: str) -> None:
        self.success.labels(self._model, finish_reason).inc()

    def count_rejected(self, error_type: str) -> None:
        self.rejected.labels(self._model, error_type).inc()

    def count_route(self, kind: str) -> None:
        self.routes.labels(self._model, kind).inc()

    def observe_timing(self, timing: WorkerTiming) -> None:
        if timing.phase == "prefill":
            self.queue_time.observe(timing.queue_ms / 1000)
            self.prefill_time.observe(timing.compute_ms / 1000)
            self.prefill_computed.observe(timing.num_computed_tokens)
        else:
            self.decode_time.observe(timing.compute_ms / 1000)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class TokenHistogram(Collector):
    """A histogram for what is observed at every token, in a tenth of the time: no locks, because one thread observes and renders."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], model_name: str) -> None:
        self._name = name
        self._text = text
        self._bounds = [float(bound) for bound in buckets]
        self._model = model_name
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        totals = accumulate(self._counts)
        names = map(floatToGoString, [*self._bounds, inf])
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model], list(zip(names, totals, strict=True)), self._sum)
        yield family


class WorkerCollector(Collector):
    """The last stats that each worker sent with its lease, as gauges and counters."""

    def __init__(self, model_name: str, directory: WorkerDirectory) -> None:
        self._model = model_name
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        workers = self._directory.workers
        gauges: tuple[tuple[str, str, Callable[[Worker], float]], ...] = (
            (telemetry.METRIC_WORKER_RUNNING, "Requests running", lambda worker: worker.record.stats.num_running),
            (telemetry.METRIC_WORKER_WAITING, "Requests waiting", lambda worker: worker.record.stats.num_waiting),
            (telemetry.METRIC_WORKER_KV_USAGE, "Used share of the KV blocks, 0 to 1", _kv_usage),
            (telemetry.METRIC_WORKER_BLOCKS_USED, "KV blocks that requests refer to", lambda worker: worker.record.stats.num_blocks_used),
            (telemetry.METRIC_WORKER_BLOCKS_TOTAL, "KV blocks", lambda worker: worker.record.num_blocks),
            (telemetry.METRIC_WORKER_BLOCKS_CACHED, "KV blocks with a hash", lambda worker: worker.record.stats.num_blocks_cached),
            (telemetry.METRIC_WORKER_HOST_BLOCKS_TOTAL, "Blocks of host memory for KV", lambda worker: worker.record.num_host_blocks),
            (
                telemetry.METRIC_WORKER_HOST_BLOCKS_CACHED,
                "Blocks of host memory that hold KV",
                lambda worker: worker.record.stats.num_host_blocks_cached,
            ),
        )
        for name, text, value_of in gauges:
            family = GaugeMetricFamily(name, text, labels=["model_name", "worker", "role"])
            for worker in workers:
                family.add_metric([self._model, worker.record.worker_id, worker.record.role], value_of(worker))
            yield family
        config = GaugeMetricFamily(
            telemetry.METRIC_CACHE_CONFIG, "KV cache of a worker", labels=["model_name", "worker", "role", "block_size", "num_gpu_blocks"]
        )
        for worker in workers:
            record = worker.record
            config.add_metric([self._model, record.worker_id, record.role, str(record.block_size), str(record.num_blocks)], 1)
        yield config
        yield from self._counters(workers)
        count = GaugeMetricFamily(telemetry.METRIC_WORKERS, "Workers connected", labels=["role"])
        count.add_metric(["prefill"], len(self._directory.usable("prefill")))
        count.add_metric(["decode"], len(self._directory.usable("decode")))
        yield count
        yield GaugeMetricFamily(telemetry.METRIC_REDIS_UP, "1 while Redis answers", value=float(self._directory.redis_ok))

    def _counters(self, workers: Sequence[Worker]) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for worker in workers:
            for counter_name, total in worker.record.stats.counters.items():
                name = telemetry.METRIC_WORKER_COUNTER_PREFIX + _UNSAFE.sub("_", counter_name).removesuffix("_total")
                if name not in families:
                    families[name] = CounterMetricFamily(name, "Total of a worker since its start", labels=["model_name", "worker", "role"])
                families[name].add_metric([self._model, worker.record.worker_id, worker.record.role], total)
        yield from families.values()


def _kv_usage(worker: Worker) -> float:
    return worker.record.stats.num_blocks_used / max(1, worker.record.num_blocks)
