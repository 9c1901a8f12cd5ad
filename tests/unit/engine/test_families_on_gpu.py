"""Each family on an NVIDIA GPU against `transformers` on the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from family_models import CASES, FamilyCase, logits_of, make_model, write_model
from test_engine_core import engine_for, greedy
from test_model_families import difference, prompt_of

from shared.model_files.model_source import resolve_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
NAMES = ["mistral", "mixtral", "smollm3", "qwen2", "qwen3", "qwen3 moe", "gemma2", "gemma3", "phi3"]


def wide(case: FamilyCase) -> FamilyCase:
    """Head size 32, the smallest with GPU kernels."""
    fields = {**case.fields, "hidden_size": 128}
    if "head_dim" in fields:
        fields["head_dim"] = 32
    if case.config_class == "Phi3Config":
        fields["rope_parameters"] = PARTIAL_ROPE
    return dataclasses.replace(case, fields=fields)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_chunks_and_decode_steps_equal_those_of_transformers(tmp_path: Path, name: str, dtype: str, tolerance: float) -> None:
    """bf16 uses the decode kernel, fp32 does not."""
    model = make_model(wide(CASES[name]))
    write_model(model, tmp_path)
    engine = engine_for(resolve_model(str(tmp_path)), device="cuda", dtype=dtype, block_size=16, max_num_batched_tokens=19)
    prompts = [prompt_of(length) for length in (1, 3, 13, 30, 97)]
    answers, logits = greedy(engine, prompts, 6)
    for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
        theirs = logits_of(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        assert difference(rows.cpu(), theirs) < tolerance
