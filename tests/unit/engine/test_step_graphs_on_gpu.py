"""Decode steps as CUDA graphs, and queued ahead, against kernels launched one by one, a step at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_harness import DecodeHarness
from test_engine_core import engine_for, greedy
from tiny_models import with_changes, write_tiny_hf

from shared.model_files.model_source import ModelSource, resolve_model
from shared.request import Request
from shared.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    config = with_changes(head_dim=64, num_heads=8, num_kv_heads=2, max_model_len=4096)
    write_tiny_hf(tmp_path, config, head_dim=64)
    return resolve_model(str(tmp_path))


def settings(**changes: Any) -> dict[str, Any]:
    return {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "max_num_batched_tokens": 4096, "num_blocks": 2048, **changes}


def forced_logits(engine: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[torch.Tensor]:
    """Of every token, where each answer is given and not drawn."""
    requests = [
        Request(f"{i}", list(prompt), arrival_s=float(i), deadline_at_s=1e9, sampling=SamplingParams(max_tokens=99))
        for i, prompt in enumerate(prompts)
    ]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for request in requests:
        engine.scheduler.add(request)
    while (output := engine.schedule()) is not None:
        result = engine.run(output)
        for request, row in zip(result.completed(), engine.runner.compute_logits(result.hidden), strict=True):
            number = int(request.request_id)
            logits[number].append(row.clone())
            request.token_ids.append(answers[number][request.num_output_tokens])
            if request.num_output_tokens == len(answers[number]):
                engine.scheduler.remove(request.request_id)
    return [torch.stack(rows) for rows in logits]


def test_every_logit_of_graphs_is_that_of_kernels_one_by_one(source: ModelSource) -> None:
    prompts = [[(7 * i + 3 * j) % 200 for j in range(length)] for i, length in enumerate((1, 3, 15, 16, 17, 97, 500, 511, 512, 1030, 2100))]
    answers = [[(5 * i + j) % 200 for j in range(4 + i)] for i in range(len(prompts))]
    graphs = engine_for(source, **settings())
    eager = engine_for(source, **settings(enforce_eager=True))
    assert graphs.runner.graphs is not None and eager.runner.graphs is None
    replayed = forced_logits(graphs, prompts, answers)
    expected = forced_logits(eager, prompts, answers)
    assert any(key.max_context > 2048 for key in graphs.runner.graphs._graphs if not key.is_chunk), "long contexts had no graph"
    for rows, expected_rows in zip(replayed, expected, strict=True):
        torch.testing.assert_close(rows, expected_rows, atol=0.06, rtol=0.02)


@pytest.mark.parametrize("max_num_batched_tokens", [17, 100, 512])
def test_chunks_in_graphs_give_what_kernels_one_by_one_give(source: ModelSource, max_num_batched_tokens: int) -> None:
    prompts = [[(7 * i + 3 * j) % 200 for j in range(length)] for i, length in enumerate((1, 15, 16, 97, 130, 511, 700, 2100))]
    answers = [[i] for i in range(len(prompts))]
    chunks = settings(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=1)
    graphs = engine_for(source, **chunks)
    replayed = forced_logits(graphs, prompts, answers)
    assert any(key.max_context > 2048 for key in graphs.runner.graphs._graphs if key.is_chunk), "no chunk of a long prompt had a graph"
    expected = forced_logits(engine_for(source, **{**chunks, "enforce_eager": True}), prompts, answers)
    for rows, expected_rows in zip(replayed, expected, strict=True):
        torch.testing.assert_close(rows, expected_rows, atol=0.06, rtol=0.02)


def test_greedy_answers_in_graphs_are_near_those_of_fp32(source: ModelSource) -> None:
    prompts = [[(11 * i + 3 * j) % 200 for j in range(40 + i)] for i in range(12)]
    answers, exact = greedy(engine_for(source, **settings(dtype="float32")), prompts, 8)
    for rows, expected in zip(forced_logits(engine_for(source, **settings()), prompts, answers), exact, strict=True):
        torch.testing.assert_close(rows.cpu(), expected.cpu(), atol=0.25, rtol=0.1)


def drawn(source: ModelSource, **changes: Any) -> tuple[list[Any], float]:
    rng = random.Random(3)
    with DecodeHarness(source, **settings(max_num_seqs=32, **changes)) as decode:
        for i in range(24):
            kind: dict[str, Any] = [
                {"temperature": 0.0},
                {"temperature": 1.0, "seed": i, "top_k": 20},
                {"temperature": 0.8, "seed": i, "top_p": 0.9, "num_logprobs": 3},
                {"temperature": 0.0, "ignore_eos": True},
            ][i % 4]
            decode.submit(f"r{i}", [rng.randrange(200) for _ in range(rng.randint(1, 90))], max_tokens=rng.randint(1, 60), **kind)
        decode.run()
        assert decode.failures() == []
        assert decode.num_used == 0
        outputs = [[(o.token_id, o.finish_reason, o.logprobs) for o in decode.outputs(f"r{i}")] for i in range(24)]
        return outputs, decode.worker.engine.num_steps


def test_answers_are_the_same_whether_steps_are_queued_ahead_or_not(source: ModelSource) -> None:
    one_by_one, _ = drawn(source, async_scheduling=False)
    ahead, _ = drawn(source)
    assert ahead == one_by_one
