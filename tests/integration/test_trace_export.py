"""Spans over OTLP/HTTP: they arrive, and an endpoint that cannot be reached costs nothing."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from shared.telemetry import record_span, setup_tracing, shutdown_tracing

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_unreachable_endpoint_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracer = setup_tracing("test")
    start_s = time.monotonic()
    for _ in range(5000):
        record_span(tracer, "a", PARENT, 1, 2)
    assert time.monotonic() - start_s < 10.0
    start_s = time.monotonic()
    shutdown_tracing(tracer, 0.2)
    assert time.monotonic() - start_s < 5.0


def test_spans_reach_an_otlp_endpoint_before_shutdown_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    tracer = setup_tracing("test")
    record_span(tracer, "a", PARENT, 1, 2)
    shutdown_tracing(tracer)
    server.shutdown()
    server.server_close()
    assert paths == ["/v1/traces"]
