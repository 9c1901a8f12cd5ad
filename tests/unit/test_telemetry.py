from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.telemetry import extract_context, record_span, setup_tracing, start_span, traceparent_of

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_span_stamped_after_the_fact_has_its_times_and_parent() -> None:
    exporter = InMemorySpanExporter()
    tracer = setup_tracing("test", {}, exporter)
    traceparent = record_span(tracer, "prefill.chunk", PARENT, 1_000, 5_000, {"n": 3})
    record_span(tracer, "child", traceparent, 2_000, 1_000)
    first, second = exporter.get_finished_spans()
    assert (first.start_time, first.end_time) == (1_000, 5_000)
    assert first.parent is not None
    assert first.parent.span_id == 0x00F067AA0BA902B7
    assert second.parent is not None
    assert second.parent.span_id == first.context.span_id
    assert second.end_time == second.start_time
    assert first.resource.attributes["service.name"] == "test"


def test_context_is_kept_without_an_exporter() -> None:
    tracer = setup_tracing("test", {})
    span = start_span(tracer, "a", PARENT)
    assert traceparent_of(span).startswith("00-4bf92f3577b34da6a3ce929d0e0e4736-")


@pytest.mark.parametrize("traceparent", ["", "garbage", "00-0-0-00", "ff" * 30])
def test_malformed_context_starts_a_new_trace(traceparent: str) -> None:
    assert not extract_context(traceparent)
    tracer = setup_tracing("test", {})
    assert len(traceparent_of(start_span(tracer, "a", traceparent))) == 55
