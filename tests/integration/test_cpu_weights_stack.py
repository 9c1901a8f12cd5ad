"""Weights rounded to fp16 through the whole system: all services take it for the same model, and the answers stay."""

from __future__ import annotations

from local_stack import CNT, LocalStack


def test_fp16_weights_serve_from_prefill_and_decode_with_the_golden_answer() -> None:
    with LocalStack("--cpu-weights", "fp16", kv_cache_gib=0.25) as stack:
        assert stack.tokens(CNT, 24)[:12] == [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28]
