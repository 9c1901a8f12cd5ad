"""Readiness, keys, metrics and traces of the router."""

from __future__ import annotations

import time

import openai
import pytest
from lost_time import LostTime
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from router_answers import CNT, SERVED, check_error, decode_of, namespaces
from router_harness import RedisServer, Stack, eventually
from stub_worker import Script

from services.router import __main__ as router_main
from services.router.served_model import ServedModel
from shared.messages import DecodeRequest, PrefillRequest
from shared.telemetry import setup_tracing


def test_before_readiness_requests_get_503_and_health_is_200(bare: Stack) -> None:
    check_error(bare.complete(), 503)
    check_error(bare.complete(stream=True), 503)
    assert bare.client.get("/health").status_code == 200
    assert bare.client.get("/health").content == b""
    assert bare.client.get("/ready").status_code == 503
    bare.join("prefill", "p")
    eventually(lambda: bare.client.get("/ready").json()["prefill"] == 1)
    assert bare.client.get("/ready").status_code == 503
    bare.join("decode", "d")
    bare.wait_ready()


def test_request_id_is_echoed_or_made(stack: Stack) -> None:
    assert stack.client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = stack.client.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert made.startswith("req-")


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/version", "/metrics", "/v1/models", f"/v1/models/{SERVED}", "/nothing"])
def test_head_is_get_without_the_body(stack: Stack, path: str) -> None:
    got, head = stack.client.get(path), stack.client.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type" if got.content else "x-request-id"]


def test_without_an_accepted_key_nothing_is_answered(redis_server: RedisServer, model: ServedModel) -> None:
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}", api_keys="one,two")
    try:
        stack.join("prefill", "p")
        decode = stack.join("decode", "d")
        stack.wait_ready()
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic b25l"}):
            response = stack.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine", **headers})
            assert response.status_code == 401
            error = response.json()["error"]
            assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "invalid_request_error", None)
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"] == "mine"
        assert stack.client.get("/metrics").status_code == 200
        with pytest.raises(openai.AuthenticationError) as caught:
            openai.OpenAI(base_url=f"{stack.url}/v1", api_key="wrong", max_retries=0).models.list()
        assert caught.value.code == "invalid_api_key"
        for key in ("one", "two"):
            client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)
            assert client.completions.create(model=SERVED, prompt="a", max_tokens=2).choices[0].text
        assert len(decode.of_kind(DecodeRequest)) == 2
    finally:
        stack.close()


def test_metrics_name_workers_and_not_clients(stack: Stack) -> None:
    stack.complete()
    assert stack.client.head("/metrics").status_code == 200
    text = stack.client.get("/metrics").text
    for line in (
        f'vllm:num_requests_running{{model_name="{SERVED}",role="decode",worker="decode-0"}} 1.0',
        f'pagewire:kv_blocks_total{{model_name="{SERVED}",role="prefill",worker="prefill-0"}} 1024.0',
        f'pagewire:chunks_sent_total{{model_name="{SERVED}",role="decode",worker="decode-0"}} 7.0',
        f'pagewire:requests_in_flight{{model_name="{SERVED}"}} 0.0',
    ):
        assert line in text
    for name in ("vllm:time_to_first_token_seconds_count", "gen_ai_server_time_to_first_token_seconds_bucket", "vllm:prompt_tokens_total"):
        assert name in text
    # The first of each kind of answer may make a series of its own.
    stack.complete(model="x")
    before = stack.client.get("/metrics").text.count("\n")
    for number in range(50):
        stack.client.post(f"/nowhere/{number}", json={})
        stack.client.post(
            "/v1/completions", json={"prompt": "a", "model": f"x{number}", "user": str(number)}, headers={"x-request-id": f"id{number}"}
        )
    assert stack.client.get("/metrics").text.count("\n") <= before + 5


def test_trace_context_reaches_both_workers(stack: Stack) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    stack.client.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 1}, headers=headers)
    prefill = next(worker for worker in stack.workers if worker.role == "prefill")
    to_decode = decode_of(stack).of_kind(DecodeRequest)[-1]
    # The stand-in for decode answers without waiting for prefill, whose message may still be on its way.
    eventually(lambda: [m for m in prefill.of_kind(PrefillRequest) if m.transfer_id == to_decode.transfer_id])
    sent = [to_decode, prefill.of_kind(PrefillRequest)[-1]]
    assert all(message.traceparent.startswith(f"00-{trace_id}-") for message in sent)
    assert all("00f067aa0ba902b7" not in message.traceparent for message in sent)


def test_one_trace_holds_root_tokenize_and_route_and_the_clients_ttft(
    redis_server: RedisServer, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(router_main, "setup_tracing", lambda name: setup_tracing(name, {}, exporter))
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}")
    stack.join("prefill", "p")
    stack.join("decode", "d", Script(first_delay_s=0.2, delay_s=0.02))
    stack.wait_ready()
    body = {"prompt": "1, 2, 3,", "max_tokens": 5, "stream": True}
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    with LostTime() as lost:
        start_s = time.perf_counter()
        with stack.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            lines = response.iter_lines()
            next(lines)
            ttft_s, lost_s = time.perf_counter() - start_s, lost.so_far_s
            assert list(lines)[-2:] == ["data: [DONE]", ""]
    eventually(lambda: len(exporter.get_finished_spans()) == 3)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans[f"text_completion {SERVED}"]
    assert root.parent is not None and root.parent.span_id == 0x00F067AA0BA902B7
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {"4bf92f3577b34da6a3ce929d0e0e4736"}
    for name in ("tokenize", "route"):
        assert spans[name].parent.span_id == root.context.span_id
    assert spans["route"].attributes["pagewire.route.decode"] == "d"
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert abs(root.attributes["gen_ai.latency.time_to_first_token"] - ttft_s) <= 0.005 + 0.02 * ttft_s + lost_s
    stack.close()


def test_the_stock_openai_client_works(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    assert [card.id for card in client.models.list()] == [SERVED]
    completion = client.completions.create(model=SERVED, prompt="1, 2, 3, 4, 5,", max_tokens=24, temperature=0, extra_body={"top_k": 1})
    assert completion.choices[0].text == CNT
    stream = client.chat.completions.create(
        model=SERVED, messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == " 6,"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt="a")
    client.close()
