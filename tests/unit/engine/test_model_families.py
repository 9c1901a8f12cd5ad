"""Each family through files, paged blocks, chunks and batches against `transformers`, on a small model with random weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
import torch
from family_gguf import write_family_gguf
from family_models import CASES, MIXTURE, WINDOW, FamilyCase, logits_of, make_model, write_model
from gguf import MODEL_ARCH
from safetensors.torch import load_file
from test_engine_core import engine_for, greedy
from tiny_models import TINY_TOKENS

from shared.engine.models.registry import BUILDERS
from shared.errors import ModelLoadError
from shared.model_files.model_config import Architecture, ModelConfig
from shared.model_files.model_source import ModelSource, resolve_model

NUM_ANSWERED = 8
TOLERANCE = 1e-4
"""Of the spread of the logits."""


def prompt_of(length: int) -> list[int]:
    return [(11 * length + 37 * i + i * i) % len(TINY_TOKENS) for i in range(length)]


def source_of(directory: Path, case: FamilyCase) -> ModelSource:
    return resolve_model(str(directory), max_model_len=case.max_model_len)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest, as a share of the spread."""
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = make_model(case)
    write_model(model, tmp_path)
    engine = engine_for(source_of(tmp_path, case), num_blocks=200, max_model_len=case.max_model_len)
    prompts = [prompt_of(length) for length in case.prompt_lengths]
    # The second time around prompts find their blocks in the cache.
    for _ in range(2):
        answers, logits = greedy(engine, prompts, NUM_ANSWERED)
        for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
            theirs = logits_of(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
            assert difference(rows, theirs) < TOLERANCE
            assert theirs.argmax(-1).tolist() == answer
    assert engine.manager.num_hit_tokens > 0


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, case in CASES.items() for field in case.without])
def test_every_fact_of_the_configuration_matters(tmp_path: Path, name: str, field: str) -> None:
    """Or the comparison above would not see it."""
    case = CASES[name]
    write_model(make_model(case), tmp_path)
    source = source_of(tmp_path, case)
    default = next(known.default for known in dataclasses.fields(ModelConfig) if known.name == field)
    changed = dataclasses.replace(source, config=dataclasses.replace(source.config, **{field: default}))
    prompt = prompt_of(max(case.prompt_lengths))
    with_it, without_it = (greedy(engine_for(each, max_model_len=case.max_model_len), [prompt], 1)[1][0] for each in (source, changed))
    assert difference(without_it, with_it) > 100 * TOLERANCE


PLAIN_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
GGUF_CASES = {
    "llama": (MODEL_ARCH.LLAMA, FamilyCase("LlamaConfig")),
    "mixtral": (MODEL_ARCH.LLAMA, FamilyCase("MixtralConfig", {"num_local_experts": 5, "sliding_window": None})),
    "smollm3": (MODEL_ARCH.SMOLLM3, FamilyCase("SmolLM3Config", {"num_hidden_layers": 4})),
    "qwen2": (MODEL_ARCH.QWEN2, FamilyCase("Qwen2Config")),
    "qwen2 with yarn": (MODEL_ARCH.QWEN2, CASES["qwen2 with yarn"]),
    "qwen3": (MODEL_ARCH.QWEN3, CASES["qwen3"]),
    "qwen3 moe": (
        MODEL_ARCH.QWEN3MOE,
        FamilyCase("Qwen3MoeConfig", {**MIXTURE, "head_dim": 16, "norm_topk_prob": True}),
    ),
    "gemma2": (MODEL_ARCH.GEMMA2, FamilyCase("Gemma2Config", {**PLAIN_GEMMA, "attn_logit_softcapping": 4.0, "num_hidden_layers": 3})),
    "gemma3": (MODEL_ARCH.GEMMA3, FamilyCase("Gemma3TextConfig", {**PLAIN_GEMMA, "num_hidden_layers": 7})),
    "phi3": (MODEL_ARCH.PHI3, CASES["phi3"]),
    "phi4, long context": (MODEL_ARCH.PHI3, CASES["phi4, long context"]),
    "phi4, original context": (MODEL_ARCH.PHI3, CASES["phi4, original context"]),
}


@pytest.mark.parametrize("name", GGUF_CASES)
def test_gguf_gives_the_same_model(tmp_path: Path, name: str) -> None:
    architecture, case = GGUF_CASES[name]
    model = make_model(case)
    write_model(model, tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    write_family_gguf(tmp_path / "m.gguf", model, checkpoint, architecture)
    source = resolve_model(str(tmp_path / "m.gguf"), max_model_len=case.max_model_len)
    prompt = prompt_of(30)
    (answer,), (rows,) = greedy(engine_for(source, max_model_len=case.max_model_len), [prompt], NUM_ANSWERED)
    theirs = logits_of(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
    assert difference(rows, theirs) < TOLERANCE
    assert theirs.argmax(-1).tolist() == answer


def test_stacked_experts_of_another_number_are_named(tmp_path: Path) -> None:
    architecture, case = GGUF_CASES["mixtral"]
    model = make_model(case)
    write_model(model, tmp_path)
    model.config.num_local_experts += 2
    write_family_gguf(tmp_path / "m.gguf", model, load_file(tmp_path / "model.safetensors"), architecture)
    with pytest.raises(ModelLoadError, match=r"tensor blk\.0\.ffn_gate_inp\.weight has shape \(5, 64\), the configuration says \(7, 64\)"):
        resolve_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", ["mistral", "qwen3 moe", "gemma2", "gemma3"])
def test_bf16_stays_near(tmp_path: Path, name: str) -> None:
    model = make_model(CASES[name])
    write_model(model, tmp_path)
    prompt = prompt_of(30)
    _, logits = greedy(engine_for(source_of(tmp_path, CASES[name]), dtype="bfloat16"), [prompt], 1)
    assert difference(logits[0], logits_of(model, prompt)[-1:]) < 0.1


def test_every_family_of_the_configuration_has_a_builder() -> None:
    assert set(BUILDERS) == set(get_args(Architecture))
