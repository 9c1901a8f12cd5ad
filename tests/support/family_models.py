"""A small model of each family with random weights, made and written by `transformers`, which shares no code with this project."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import TINY_TOKENS, tiny_tokenizer_json
from transformers import AutoModelForCausalLM, PreTrainedModel

WINDOW = 6
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 9.0],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
}


@dataclass(frozen=True)
class FamilyCase:
    config_class: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Of the configuration, beside `BASE`."""
    max_model_len: int | None = None
    """Served at most; None: what the model can."""
    prompt_lengths: tuple[int, ...] = (1, 3, 8, 13, 30)
    without: tuple[str, ...] = ()
    """Fields of ModelConfig that must matter: back at their default, the logits are others."""


BASE: dict[str, Any] = {
    "vocab_size": len(TINY_TOKENS) + 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_CAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}
_GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 10}
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
CASES = {
    "llama": FamilyCase("LlamaConfig", {"rope_parameters": _LLAMA3, "attention_bias": True}, without=("rope_scaling",)),
    "mistral": FamilyCase("MistralConfig", {"sliding_window": WINDOW, "head_dim": 24}, without=("sliding_windows",)),
    "mixtral": FamilyCase(
        "MixtralConfig", {"sliding_window": WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2}, without=("sliding_windows",)
    ),
    "smollm3": FamilyCase(
        "SmolLM3Config", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": WINDOW}, without=("nope_layers",)
    ),
    "qwen2": FamilyCase(
        "Qwen2Config",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        without=("sliding_windows",),
    ),
    "qwen2 with yarn": FamilyCase("Qwen2Config", {"rope_parameters": _YARN}, without=("rope_scaling",)),
    "qwen3": FamilyCase("Qwen3Config", {"head_dim": 24}),
    "qwen3 moe": FamilyCase(
        "Qwen3MoeConfig", {**MIXTURE, "num_hidden_layers": 3, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True}
    ),
    "qwen3 moe, weights as they are": FamilyCase("Qwen3MoeConfig", {**MIXTURE, "head_dim": 16, "norm_topk_prob": False}),
    "gemma2": FamilyCase(
        "Gemma2Config",
        {**_GEMMA, **_CAPS, "num_hidden_layers": 3},
        without=("sliding_windows", "attention_scale", "attention_soft_cap", "logit_soft_cap"),
    ),
    "gemma3": FamilyCase(
        "Gemma3TextConfig",
        {**_GEMMA, "num_hidden_layers": 7, "rope_parameters": _GEMMA3_ROPE},
        without=("sliding_windows", "attention_scale", "rope_scaling", "local_rope_theta"),
    ),
    "phi3": FamilyCase("Phi3Config", {"sliding_window": WINDOW}, without=("sliding_windows",)),
    "phi4, long context": FamilyCase(
        "Phi3Config",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 12, "tie_word_embeddings": True},
        prompt_lengths=(13, 30),
        without=("rope_scaling",),
    ),
    "phi4, original context": FamilyCase(
        "Phi3Config", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64}, max_model_len=64, without=("rope_scaling",)
    ),
}


def make_model(case: FamilyCase, seed: int = 0) -> PreTrainedModel:
    """fp32, on the CPU. Weights are larger than a fresh model's: attention is sharp, soft caps bend, experts differ."""
    config = getattr(transformers, case.config_class)(**{**BASE, **case.fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2, generator=generator)
            else:  # norms and biases: about what they are in a fresh model
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def write_model(model: PreTrainedModel, directory: Path, **options: Any) -> None:
    """As the Hub has them, with a tokenizer that does nothing for the model."""
    model.save_pretrained(directory, **options)
    (directory / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json()))


@torch.inference_mode()
def logits_of(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """After every token, in one pass without a cache: [num_tokens, len(TINY_TOKENS)]."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0, :, : len(TINY_TOKENS)]
