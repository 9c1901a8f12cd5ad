"""A collector that takes OTLP/HTTP traces, as a deployment's would, and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class CollectedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class OtlpCollector:
    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.spans.extend(_spans_of(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[CollectedSpan]:
    for resource_spans in request.resource_spans:
        service = next(a.value.string_value for a in resource_spans.resource.attributes if a.key == "service.name")
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                attributes = {a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in span.attributes}
                yield CollectedSpan(
                    service, span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                    span.start_time_unix_nano, span.end_time_unix_nano, attributes,
                )  # fmt: skip


def render(spans: list[CollectedSpan], root_parent: str) -> str:
    """The trace as an indented tree with times relative to its first span."""
    lines: list[str] = []
    begin = min(span.start_ns for span in spans)

    def add(parent: str, depth: int) -> None:
        for span in spans:
            if span.parent_id == parent:
                at_ms = (span.start_ns - begin) / 1e6
                lines.append(f"{at_ms:8.1f} ms {span.duration_ms:8.1f} ms  {'  ' * depth}{span.name}  [{span.service}]")
                add(span.span_id, depth + 1)

    add(root_parent, 0)
    return "\n".join(lines)
