"""A worker's own /metrics."""

from __future__ import annotations

from prometheus_client import generate_latest

from shared.membership import WorkerRecord, WorkerStats
from shared.worker.metrics import WorkerMetrics


def test_stats_and_counters_are_shown_with_worker_and_role() -> None:
    record = WorkerRecord(
        worker_id="decode-7", role="decode", incarnation=1, rpc_endpoint="", model_name="m", model_fingerprint="f", dtype="float32",
        block_size=16, num_blocks=200, max_model_len=100, vocab_size=10,
        stats=WorkerStats(num_running=3, num_blocks_used=50, counters={"generation_tokens": 12}),
    )  # fmt: skip
    text = generate_latest(WorkerMetrics.registry_of(lambda: record)).decode()
    assert 'vllm:num_requests_running{role="decode",worker="decode-7"} 3.0' in text
    assert 'vllm:kv_cache_usage_perc{role="decode",worker="decode-7"} 0.25' in text
    assert 'pagewire:generation_tokens_total{role="decode",worker="decode-7"} 12.0' in text
