"""SmolLM2's logits against numbers made by an implementation that shares no code with ours (tests/data/make_golden_logits.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.reference_model import forward
from shared.engine.weights import load_weights
from shared.model_files.model_source import ModelSource, resolve_model

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "golden_logits.json").read_text())
PROMPTS = sorted(GOLDEN["prompts"])
# Logits are up to ~30; fp32 sums in another order differ in about the fifth digit.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def smollm2() -> tuple[ModelSource, dict[str, torch.Tensor]]:
    source = resolve_model("smollm2")
    return source, load_weights(source, torch.float32, "cpu")


@pytest.mark.parametrize("name", PROMPTS)
def test_reference_logits_equal_the_independent_ones(name: str, smollm2: tuple[ModelSource, dict[str, torch.Tensor]]) -> None:
    source, weights = smollm2
    golden = GOLDEN["prompts"][name]
    logits = forward(weights, source.config, golden["token_ids"])
    torch.testing.assert_close(logits.max(dim=-1).values, torch.tensor(golden["max"]), atol=TOLERANCE, rtol=0)
    assert logits.argmax(dim=-1).tolist() == golden["argmax"]
    last = logits[-1]
    torch.testing.assert_close(last[golden["last_top_ids"]], torch.tensor(golden["last_top_logits"]), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(last[GOLDEN["sampled_ids"]], torch.tensor(golden["last_sampled_logits"]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", PROMPTS)
def test_reference_greedy_continuation_is_the_golden_one(name: str, smollm2: tuple[ModelSource, dict[str, torch.Tensor]]) -> None:
    source, weights = smollm2
    golden = GOLDEN["prompts"][name]
    # Causal: the logits after each golden token are those of generating it, so one pass over prompt + answer shows all steps.
    logits = forward(weights, source.config, golden["token_ids"] + golden["greedy"][:-1])
    assert logits[len(golden["token_ids"]) - 1 :].argmax(dim=-1).tolist() == golden["greedy"]


def test_prompt_ids_are_what_our_tokenizer_makes(smollm2: tuple[ModelSource, dict[str, torch.Tensor]]) -> None:
    texts = {
        "CNT": "1, 2, 3, 4, 5,",
        "ABC": "Here is the English alphabet: ABC",
        "LLAMA": "\U0001f999" * 8,
        "HAN": "\u4e16\u754c" * 6,
        "PAR": "The capital of France is",
    }
    tokenizer = smollm2[0].load_tokenizer()
    assert {name: tokenizer.encode(text) for name, text in texts.items()} == {
        name: golden["token_ids"] for name, golden in GOLDEN["prompts"].items()
    }
