"""Log-probabilities of prompts, computed chunk by chunk, against one plain forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_core import engine_for
from tiny_models import write_tiny_hf

from shared.engine import prompt_logprobs
from shared.engine.engine_core import EngineCore
from shared.engine.reference_model import forward
from shared.engine.weights import load_weights
from shared.messages import PromptLogprobs, TokenLogprobs
from shared.model_files.model_source import ModelSource, resolve_model
from shared.request import Request
from shared.sampling_params import SamplingParams

NUM_TOP = 3


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    write_tiny_hf(tmp_path)
    return resolve_model(str(tmp_path))


def prompt_of(length: int, source: ModelSource) -> list[int]:
    return [(11 * i * i + 5 * length) % source.config.tokenizer_vocab_size for i in range(length)]


def scored_request(name: str, token_ids: list[int], arrival_s: float = 0.0, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=8)
    return Request(name, list(token_ids), arrival_s, deadline_at_s=1e9, sampling=sampling, num_prompt_logprobs=NUM_TOP, **fields)


def run(engine: EngineCore, requests: list[Request], num_tokens: int = 1) -> list[PromptLogprobs]:
    """Until each has `num_tokens` greedy tokens."""
    for request in requests:
        engine.scheduler.add(request)
    parts: list[PromptLogprobs] = []
    while (output := engine.schedule()) is not None:
        result = engine.run(output)
        parts += result.prompt_logprobs
        for request, row in zip(result.completed(), engine.runner.compute_logits(result.hidden), strict=True):
            request.token_ids.append(int(row.argmax()))
            if request.num_output_tokens == num_tokens:
                engine.scheduler.remove(request.request_id)
    return parts


def by_position(parts: list[PromptLogprobs], name: str) -> dict[int, TokenLogprobs]:
    entries: dict[int, TokenLogprobs] = {}
    for part in parts:
        for position, entry in enumerate(part.entries, part.first_position):
            if part.request_id == name:
                assert position not in entries, "a position was computed twice"
                entries[position] = entry
    return entries


def assert_equals_plain_pass(entries: dict[int, TokenLogprobs], token_ids: list[int], source: ModelSource) -> None:
    logits = forward(load_weights(source, torch.float32, "cpu"), source.config, token_ids)[:, : source.config.tokenizer_vocab_size]
    expected = logits.log_softmax(-1)
    assert sorted(entries) == list(range(1, len(token_ids)))
    for position, entry in entries.items():
        row, token_id = expected[position - 1], token_ids[position]
        assert abs(entry.logprob - float(row[token_id])) < 1e-4
        assert entry.rank == int((row > row[token_id]).sum()) + 1
        top = row.topk(NUM_TOP)
        assert list(entry.top_token_ids) == top.indices.tolist()
        torch.testing.assert_close(torch.tensor(entry.top_logprobs), top.values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("budget", [1, 3, 7, 2048])
def test_values_are_those_of_one_pass_whatever_the_chunks(source: ModelSource, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS", 4 * source.config.tokenizer_vocab_size)  # slices of four rows
    engine = engine_for(source, max_num_batched_tokens=budget)
    prompts = {f"{length}": prompt_of(length, source) for length in (1, 2, 4, 5, 13, 40)}
    parts = run(engine, [scored_request(name, token_ids) for name, token_ids in prompts.items()])
    for name, token_ids in prompts.items():
        assert_equals_plain_pass(by_position(parts, name), token_ids, source)
    assert engine.manager.num_used() == 0


def test_a_cached_prefix_is_computed_again_and_stays_cached_for_others(source: ModelSource) -> None:
    engine = engine_for(source)
    token_ids = prompt_of(30, source)
    run(engine, [Request("plain", list(token_ids), 0.0, 1e9, sampling=SamplingParams())])
    scored = scored_request("scored", token_ids)
    assert_equals_plain_pass(by_position(run(engine, [scored]), "scored"), token_ids, source)
    assert scored.num_cached_tokens == 0
    after = Request("after", list(token_ids), 0.0, 1e9, sampling=SamplingParams())
    run(engine, [after])
    assert after.num_cached_tokens == 28


def test_preemption_neither_loses_nor_doubles_a_position(source: ModelSource) -> None:
    engine = engine_for(source, num_blocks=14)
    prompts = {f"{i}": [i + 1, *prompt_of(8, source)] for i in range(6)}
    parts = run(engine, [scored_request(name, token_ids) for name, token_ids in prompts.items()], num_tokens=12)
    assert engine.scheduler.num_preemptions > 0
    for name, token_ids in prompts.items():
        assert_equals_plain_pass(by_position(parts, name), token_ids, source)


def test_a_resumed_request_uses_the_cache_for_what_is_already_scored(source: ModelSource) -> None:
    request = scored_request("r", prompt_of(30, source))
    assert request.num_cacheable_tokens == 0
    request.num_scored_tokens = 12
    assert request.num_cacheable_tokens == 12
    request.num_scored_tokens = 29
    assert request.num_cacheable_tokens == 29
    request.token_ids.append(1)
    assert request.num_cacheable_tokens == 30
