"""The engine over paged blocks, in chunks and batches, against the plain forward pass, for every variant of the architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny_models import with_changes, write_tiny_hf

from shared.config import Settings
from shared.engine.engine_core import EngineCore
from shared.engine.layers.decoder_layer import DecoderLayer
from shared.engine.reference_model import forward
from shared.engine.weights import load_weights
from shared.errors import ConfigurationError
from shared.model_files.model_config import LinearRopeScaling, Llama3RopeScaling
from shared.model_files.model_source import ModelSource, resolve_model
from shared.request import Request
from shared.sampling_params import SamplingParams

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "untied": ({"tie_word_embeddings": False}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "attention biases": ({"attention_bias": True, "attention_output_bias": True}, {"attention_bias": True}),
    "mlp biases": ({"mlp_bias": True}, {"mlp_bias": True}),
    "linear scaling": ({"rope_scaling": LinearRopeScaling(4.0)}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama3 scaling": (
        {"rope_scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 32)},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
}


def engine_for(source: ModelSource, **settings: Any) -> EngineCore:
    defaults = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 7, "debug": True, "num_threads": 2, "max_step_ms": 1e6}
    return EngineCore(source, Settings(**{**defaults, **settings}), lambda *_: None, lambda *_: None)


def greedy(engine: EngineCore, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Answers and the logits each token came from, with continuous batching."""
    requests = [
        Request(f"{i}", list(p), arrival_s=float(i), deadline_at_s=1e9, sampling=SamplingParams(max_tokens=num_tokens))
        for i, p in enumerate(prompts)
    ]
    logits: dict[str, list[torch.Tensor]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.scheduler.add(request)
    while (output := engine.schedule()) is not None:
        result = engine.run(output)
        for request, row in zip(result.completed(), engine.runner.compute_logits(result.hidden), strict=True):
            logits[request.request_id].append(row)
            request.token_ids.append(int(row.argmax()))
            if request.num_output_tokens == num_tokens:
                engine.scheduler.remove(request.request_id)
    return [r.token_ids[r.num_prompt_tokens :] for r in requests], [torch.stack(logits[r.request_id]) for r in requests]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_equals_the_plain_forward_pass(tmp_path: Path, name: str) -> None:
    config_changes, file_changes = VARIANTS[name]
    write_tiny_hf(tmp_path, with_changes(**config_changes), **file_changes)
    source = resolve_model(str(tmp_path))
    for field, value in config_changes.items():
        assert getattr(source.config, field) == value, f"the file does not say {field}"
    weights = load_weights(source, torch.float32, "cpu")
    vocab = source.config.tokenizer_vocab_size
    prompts = [[(7 * i + 3 * j) % vocab for j in range(length)] for i, length in enumerate((1, 3, 4, 5, 8, 13, 30))]
    answers, logits = greedy(engine_for(source), prompts, 5)
    for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
        expected = forward(weights, source.config, [*prompt, *answer[:-1]])[len(prompt) - 1 :, :vocab]
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
        assert expected.argmax(-1).tolist() == answer


def test_the_last_layer_computes_only_the_rows_that_are_wanted(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    engine = engine_for(resolve_model(str(tmp_path)))
    num_rows: list[int] = []
    model = engine.runner.model

    def counted(layer: DecoderLayer) -> DecoderLayer:
        def call(*args: Any) -> torch.Tensor:
            num_rows.append(len(out := layer(*args)))
            return out

        return cast(DecoderLayer, call)

    model.layers = [counted(layer) for layer in model.layers]
    greedy(engine, [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], 2)
    others = len(model.layers) - 1
    assert num_rows == [*[4] * others, 0, *[6] * others, 1, *[1] * others, 1], "chunks are of 4 and 6 tokens"


def test_small_pools_preempt_and_answer_the_same(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    source = resolve_model(str(tmp_path))
    prompts = [[i + 1] * 9 for i in range(6)]
    roomy, _ = greedy(engine_for(source), prompts, 12)
    engine = engine_for(source, num_blocks=14)
    tight, _ = greedy(engine, prompts, 12)
    assert engine.scheduler.num_preemptions > 0
    assert tight == roomy
    assert engine.manager.num_used() == 0


def test_padded_rows_of_the_head_are_never_computed(tmp_path: Path) -> None:
    config = with_changes(tie_word_embeddings=False)
    write_tiny_hf(tmp_path, config)
    source = resolve_model(str(tmp_path))
    engine = engine_for(source)
    hidden = torch.randn(3, source.config.hidden_size)
    assert engine.runner.compute_logits(hidden).shape == (3, source.config.tokenizer_vocab_size)


def test_bf16_runs_and_stays_near(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    source = resolve_model(str(tmp_path))
    _, exact = greedy(engine_for(source), [[1, 2, 3, 4, 5]], 1)
    _, half = greedy(engine_for(source, dtype="bfloat16"), [[1, 2, 3, 4, 5]], 1)
    torch.testing.assert_close(half[0], exact[0], atol=0.15, rtol=0.15)


@pytest.mark.parametrize(("settings", "words"), [({"num_blocks": 10**9}, "NUM_BLOCKS"), ({"device": "cuda"}, "PAGEWIRE_DEVICE")])
def test_what_cannot_start_says_which_setting(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    write_tiny_hf(tmp_path)
    with pytest.raises(ConfigurationError, match=words):
        engine_for(resolve_model(str(tmp_path)), **settings)
