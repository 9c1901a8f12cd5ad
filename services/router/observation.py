"""What is measured of one request, from its first byte received to the last one sent: the root span and the router's histograms.

TTFT ends when the first token has been handed to the socket (streamed) or has arrived (not streamed), so it holds everything the
client waits for: queue, prefill, transfer, the first decode step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from services.router.metrics import RouterMetrics
from services.router.openai.answer_format import Usage
from services.router.openai.openai_types import GenerationRequest
from shared.errors import PagewireError
from shared.telemetry import PROVIDER_NAME, start_span, traceparent_of


@dataclass(frozen=True)
class Receipt:
    """When and with which headers a request came in."""

    wall_ns: int
    monotonic_s: float
    traceparent: str
    request_id: str

    @classmethod
    def now(cls, traceparent: str, request_id: str) -> Receipt:
        return cls(time.time_ns(), time.perf_counter(), traceparent, request_id)


class RequestObservation:
    """Ended by the first of `succeed`, `fail`, `disconnect` and `abandon`."""

    def __init__(
        self, tracer: Tracer, metrics: RouterMetrics, receipt: Receipt, operation: str, model: str, answer_id: str, body: GenerationRequest
    ) -> None:
        self._metrics = metrics
        self._start_s = receipt.monotonic_s
        self._first_token_s: float | None = None
        self._last_token_s: dict[int, float] = {}
        self._has_ended = False
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER_NAME,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": answer_id,
            "gen_ai.request.id": answer_id,
            "gen_ai.request.max_tokens": body.requested_max_tokens,
            "gen_ai.request.temperature": body.temperature,
            "gen_ai.request.top_p": body.top_p,
            "gen_ai.request.top_k": body.top_k,
            "gen_ai.request.seed": body.seed,
            "gen_ai.request.stop_sequences": body.stop,
            "gen_ai.request.frequency_penalty": body.frequency_penalty,
            "gen_ai.request.presence_penalty": body.presence_penalty,
            "gen_ai.request.choice.count": body.num_choices,
            "gen_ai.request.n": body.num_choices,
            "gen_ai.request.stream": bool(body.stream),
            "http.request.header.x-request-id": receipt.request_id,
        }
        given = {name: value for name, value in attributes.items() if value is not None}
        self.span = start_span(tracer, f"{operation} {model}", receipt.traceparent, receipt.wall_ns, given, SpanKind.SERVER)
        self.traceparent = traceparent_of(self.span)

    def token(self, choice_index: int) -> None:
        """A token of this choice has been handed on. One clock for all gaps, so none is negative."""
        now_s = time.perf_counter()
        last_s = self._last_token_s.get(choice_index)
        self._last_token_s[choice_index] = now_s
        if last_s is not None:
            self._metrics.itl.observe(now_s - last_s)
        if self._first_token_s is None:
            self._first_token_s = now_s
            ttft_s = now_s - self._start_s
            self._metrics.ttft.observe(ttft_s)
            self._metrics.genai_ttft.observe(ttft_s)
            for name in ("gen_ai.latency.time_to_first_token", "gen_ai.response.time_to_first_chunk"):
                self.span.set_attribute(name, ttft_s)

    def succeed(self, usage: Usage, finish_reasons: Sequence[str]) -> None:
        duration_s = time.perf_counter() - self._start_s
        metrics = self._metrics
        metrics.e2e.observe(duration_s)
        metrics.genai_duration.observe(duration_s)
        if self._first_token_s is not None:
            decode_s = max(0.0, max(self._last_token_s.values()) - self._first_token_s)
            metrics.inference_time.observe(decode_s)
            num_tokens_per_choice = usage.num_completion_tokens / max(1, len(finish_reasons))
            if num_tokens_per_choice > 1:
                tpot_s = decode_s / (num_tokens_per_choice - 1)
                metrics.tpot.observe(tpot_s)
                metrics.genai_tpot.observe(tpot_s)
            self.span.set_attribute("gen_ai.latency.time_in_model_decode", decode_s)
        metrics.prompt_length.observe(usage.num_prompt_tokens)
        metrics.output_length.observe(usage.num_completion_tokens)
        metrics.prefix_queries.inc(usage.num_prompt_tokens)
        metrics.prefix_hits.inc(usage.num_cached_tokens)
        for reason in finish_reasons:
            metrics.count_success(reason)
        self.span.set_attribute("gen_ai.response.finish_reasons", list(finish_reasons))
        self._end(usage, duration_s)

    def fail(self, error: PagewireError, usage: Usage) -> None:
        self._metrics.count_rejected(error.error_type)
        self.span.set_attribute("error.type", error.error_type)
        self.span.set_status(Status(StatusCode.ERROR, error.message))
        self._end(usage, time.perf_counter() - self._start_s)

    def abandon(self) -> None:
        """End the span if nothing else has: the server was stopped in the middle."""
        if not self._has_ended:
            self._has_ended = True
            self.span.set_attribute("error.type", "abandoned")
            self.span.end()

    def disconnect(self, usage: Usage) -> None:
        self._metrics.disconnects.inc()
        self.span.set_attribute("error.type", "client_disconnected")
        self._end(usage, time.perf_counter() - self._start_s)

    def _end(self, usage: Usage, duration_s: float) -> None:
        self._has_ended = True
        self._metrics.prompt_tokens.inc(usage.num_prompt_tokens)
        self._metrics.generation_tokens.inc(usage.num_completion_tokens)
        for name, value in (
            ("gen_ai.usage.input_tokens", usage.num_prompt_tokens),
            ("gen_ai.usage.prompt_tokens", usage.num_prompt_tokens),
            ("gen_ai.usage.output_tokens", usage.num_completion_tokens),
            ("gen_ai.usage.completion_tokens", usage.num_completion_tokens),
            ("gen_ai.usage.cache_read.input_tokens", usage.num_cached_tokens),
        ):
            self.span.set_attribute(name, value)
        self.span.set_attribute("gen_ai.latency.e2e", duration_s)
        self.span.end()
