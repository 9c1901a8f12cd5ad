"""Traces: set-up, W3C context as plain strings, spans stamped after the fact; and every span and metric name, listed once.

Spans leave over OTLP/HTTP only when OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set. An endpoint that
cannot be reached costs a bounded queue and one log line a minute, never latency.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

Attributes = Mapping[str, AttributeValue]

# Spans. The root of a request is named "{operation} {model}" as the GenAI conventions ask.
SPAN_TOKENIZE = "tokenize"
SPAN_ROUTE = "route"
SPAN_PREFILL = "prefill"
SPAN_PREFILL_QUEUE = "prefill.queue"
SPAN_PREFILL_CHUNK = "prefill.chunk"
SPAN_KV_TRANSFER = "kv.transfer"
SPAN_DECODE = "decode"
SPAN_DECODE_QUEUE = "decode.queue"
SPAN_DECODE_FIRST_STEP = "decode.first_step"
OPERATION_COMPLETION = "text_completion"
OPERATION_CHAT = "chat"
PROVIDER_NAME = "pagewire"

# Prometheus names at the router (without the _total suffix, which the client library adds to counters).
METRIC_TTFT = "vllm:time_to_first_token_seconds"
METRIC_ITL = "vllm:inter_token_latency_seconds"
METRIC_TPOT = "vllm:request_time_per_output_token_seconds"
METRIC_E2E = "vllm:e2e_request_latency_seconds"
METRIC_QUEUE_TIME = "vllm:request_queue_time_seconds"
METRIC_PREFILL_TIME = "vllm:request_prefill_time_seconds"
METRIC_DECODE_TIME = "vllm:request_decode_time_seconds"
METRIC_INFERENCE_TIME = "vllm:request_inference_time_seconds"
METRIC_REQUEST_PROMPT_TOKENS = "vllm:request_prompt_tokens"
METRIC_REQUEST_GENERATION_TOKENS = "vllm:request_generation_tokens"
METRIC_PREFILL_COMPUTED_TOKENS = "vllm:request_prefill_kv_computed_tokens"
METRIC_PROMPT_TOKENS = "vllm:prompt_tokens"
METRIC_GENERATION_TOKENS = "vllm:generation_tokens"
METRIC_PREFIX_QUERIES = "vllm:prefix_cache_queries"
METRIC_PREFIX_HITS = "vllm:prefix_cache_hits"
METRIC_PREEMPTIONS = "vllm:num_preemptions"
METRIC_REQUEST_SUCCESS = "vllm:request_success"
METRIC_CACHE_CONFIG = "vllm:cache_config_info"
METRIC_WORKER_RUNNING = "vllm:num_requests_running"
METRIC_WORKER_WAITING = "vllm:num_requests_waiting"
METRIC_WORKER_KV_USAGE = "vllm:kv_cache_usage_perc"
METRIC_WORKER_BLOCKS_USED = "pagewire:kv_blocks_used"
METRIC_WORKER_BLOCKS_TOTAL = "pagewire:kv_blocks_total"
METRIC_WORKER_BLOCKS_CACHED = "pagewire:kv_blocks_cached"
METRIC_WORKER_HOST_BLOCKS_TOTAL = "pagewire:kv_host_blocks_total"
METRIC_WORKER_HOST_BLOCKS_CACHED = "pagewire:kv_host_blocks_cached"
METRIC_WORKER_COUNTER_PREFIX = "pagewire:"
METRIC_WORKERS = "pagewire:workers"
METRIC_HTTP_REQUESTS = "pagewire:http_requests"
METRIC_IN_FLIGHT = "pagewire:requests_in_flight"
METRIC_REJECTED = "pagewire:requests_rejected"
METRIC_DISCONNECTS = "pagewire:client_disconnects"
METRIC_RETRIES = "pagewire:request_retries"
METRIC_ROUTES = "pagewire:routes"
METRIC_REDIS_UP = "pagewire:redis_up"
METRIC_GENAI_TTFT = "gen_ai_server_time_to_first_token_seconds"
METRIC_GENAI_TPOT = "gen_ai_server_time_per_output_token_seconds"
METRIC_GENAI_DURATION = "gen_ai_server_request_duration_seconds"

# Bucket bounds in seconds: the GenAI conventions' bounds, then those of vLLM, merged, so that either dashboard's bounds exist.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TPOT_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
    *(5, 7.5, 10, 20, 40, 80),
)
GENAI_DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTER_LOGGERS = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
_EXPORT_TIMEOUT_S = 5.0
_MAX_QUEUED_SPANS = 4096

_propagator = TraceContextTextMapPropagator()
_providers: dict[int, TracerProvider] = {}


class _OncePerMinute(logging.Filter):
    """Lets one line a minute of a logger through: an endpoint that is down says so, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + 60.0
        return True


def setup_tracing(service_name: str, environ: Mapping[str, str] = os.environ, exporter: SpanExporter | None = None) -> Tracer:
    """A tracer whose spans carry `service_name`; `exporter` replaces OTLP and sees each span at once (tests).

    Without an endpoint spans are still made, so that the trace context of a client reaches every service, and go nowhere.
    """
    resource = Resource.create({"service.name": environ.get("OTEL_SERVICE_NAME") or service_name, "service.namespace": "pagewire"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    elif any(environ.get(name) for name in _ENDPOINT_VARIABLES):
        for name in _EXPORTER_LOGGERS:
            logging.getLogger(name).addFilter(_OncePerMinute())
        otlp = OTLPSpanExporter(timeout=_EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(otlp, max_queue_size=_MAX_QUEUED_SPANS, schedule_delay_millis=1000))
    tracer = provider.get_tracer("pagewire")
    _providers[id(tracer)] = provider
    return tracer


def shutdown_tracing(tracer: Tracer, deadline_s: float = 1.0) -> None:
    """Flush what is queued, for at most `deadline_s`; spans that an unreachable endpoint did not take by then are lost."""
    provider = _providers.pop(id(tracer), None)
    if provider is None:
        return
    flush = threading.Thread(target=provider.shutdown, name="trace-flush", daemon=True)
    flush.start()
    flush.join(deadline_s)


def extract_context(traceparent: str) -> Context:
    """The context a W3C traceparent names; an empty or malformed one gives a context without a parent."""
    return _propagator.extract({"traceparent": traceparent}, context=Context())


def traceparent_of(span: Span) -> str:
    """`span` as a W3C traceparent, to be sent along in messages; "" for a span without a valid context."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def start_span(
    tracer: Tracer,
    name: str,
    parent_traceparent: str,
    start_ns: int | None = None,
    attributes: Attributes | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Span:
    """A span the caller ends itself with `span.end(end_ns)`. Times are `time.time_ns()`; None means now."""
    return tracer.start_span(name, context=extract_context(parent_traceparent), kind=kind, attributes=attributes, start_time=start_ns)


def record_span(
    tracer: Tracer, name: str, parent_traceparent: str, start_ns: int, end_ns: int, attributes: Attributes | None = None
) -> str:
    """A finished span with given times (`time.time_ns()`), from any thread. Returns its traceparent, for children."""
    span = start_span(tracer, name, parent_traceparent, start_ns, attributes)
    span.end(max(start_ns, end_ns))
    return traceparent_of(span)
