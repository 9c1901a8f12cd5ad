"""What the configuration of each family becomes, and what is refused because it would be computed wrongly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import tiny_hf_config, tiny_tokenizer_json, tiny_weights, write_tiny_gguf, write_tiny_hf

from shared.errors import ModelLoadError
from shared.model_files.model_config import ExpertsConfig, LinearRopeScaling, ModelConfig, YarnRopeScaling
from shared.model_files.model_source import resolve_model
from shared.model_files.weight_names import expected_weights

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 64},
    "MixtralForCausalLM": {"num_local_experts": 3},
    "SmolLM3ForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "Qwen3MoeForCausalLM": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Gemma2ForCausalLM": {"head_dim": 16},
    "Gemma3ForCausalLM": {"head_dim": 16},
    "Phi3ForCausalLM": {},
}


def config_of(tmp_path: Path, architecture: str, max_model_len: int | None = None, **fields: Any) -> ModelConfig:
    """Of config.json alone."""
    values = {key: value for key, value in (tiny_hf_config() | {"architectures": [architecture]} | fields).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json()))
    return resolve_model(str(tmp_path), "dummy", max_model_len).config


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("MistralForCausalLM", {"sliding_window": 64}, {"architecture": "mistral", "sliding_windows": (64, 64)}),
        ("MistralForCausalLM", {"sliding_window": None}, {"sliding_windows": ()}),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 4},
            {"architecture": "mixtral", "experts": ExpertsConfig(4, 2, 96, True), "sliding_windows": ()},
        ),
        ("MixtralForCausalLM", {"num_local_experts": 4, "rope_theta": "absent"}, {"rope_theta": 1e6}),
        ("SmolLM3ForCausalLM", {"num_hidden_layers": 8}, {"architecture": "smollm3", "nope_layers": (3, 7), "sliding_windows": ()}),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [0, 1]}, {"nope_layers": (0,)}),
        ("SmolLM3ForCausalLM", {"tie_word_embeddings": "absent"}, {"tie_word_embeddings": True}),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": False},
            {"architecture": "qwen2", "attention_bias": True, "attention_output_bias": False, "sliding_windows": ()},
        ),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            {"sliding_windows": (None, 64)},
        ),
        (
            "Qwen2ForCausalLM",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
            {"rope_scaling": YarnRopeScaling(4.0, 256, 32.0, 1.0, YarnRopeScaling.magnitude(4.0)), "max_model_len": 1024},
        ),
        (
            "Qwen2ForCausalLM",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False, "beta_fast": 16}},
            {"rope_scaling": YarnRopeScaling(4.0, 256, 16.0, 1.0, (0.07 * math.log(4) + 1) / (0.1 * math.log(4) + 1), False)},
        ),
        ("Qwen3ForCausalLM", {"head_dim": "absent"}, {"architecture": "qwen3", "head_dim": 128, "attention_bias": False}),
        (
            "Qwen3MoeForCausalLM",
            {"num_experts": 8, "moe_intermediate_size": 32, "num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True},
            {"architecture": "qwen3_moe", "experts": ExpertsConfig(8, 8, 32, True, (0, 2))},
        ),
        (
            "Gemma2ForCausalLM",
            {"head_dim": 16, "sliding_window": 64, "num_hidden_layers": 3, "query_pre_attn_scalar": 64},
            {
                "architecture": "gemma2",
                "sliding_windows": (64, None, 64),
                "attention_scale": 0.125,
                "attention_soft_cap": 50.0,
                "logit_soft_cap": 30.0,
            },
        ),
        (
            "Gemma3ForCausalLM",
            {
                "head_dim": 16,
                "sliding_window": 64,
                "num_hidden_layers": 3,
                "sliding_window_pattern": 3,
                "rope_theta": 1e6,
                "rope_local_base_freq": 5e3,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "attn_logit_softcapping": None,
            },
            {
                "architecture": "gemma3",
                "sliding_windows": (64, 64, None),
                "rope_theta": 1e6,
                "local_rope_theta": 5e3,
                "rope_scaling": LinearRopeScaling(8.0),
                "attention_soft_cap": None,
                "logit_soft_cap": None,
            },
        ),
        (
            "Phi3ForCausalLM",
            {"sliding_window": 64, "partial_rotary_factor": 0.75, "rms_norm_eps": "absent"},
            {"architecture": "phi3", "sliding_windows": (64, 64), "rotary_dim": 12, "rms_norm_eps": 1e-5},
        ),
    ],
)
def test_fields_of_config_json(tmp_path: Path, architecture: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(tmp_path, architecture, **fields)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("SmolLM3ForCausalLM", "rope_theta", ("rope_theta", 2e6)),
        ("MixtralForCausalLM", "rms_norm_eps", ("rms_norm_eps", 1e-5)),
        ("Gemma2ForCausalLM", "tie_word_embeddings", ("tie_word_embeddings", True)),
        ("Gemma2ForCausalLM", "query_pre_attn_scalar", ("attention_scale", 1 / 16)),
        ("LlamaForCausalLM", "max_position_embeddings", ("max_model_len", 2048)),
    ],
)
def test_a_field_that_is_null_is_one_that_is_not_there(tmp_path: Path, architecture: str, name: str, expected: tuple[str, Any]) -> None:
    """All but those whose null says something, such as sliding_window."""
    for value in ("absent", None):
        config = config_of(tmp_path, architecture, **FAMILIES[architecture], **{name: value})
        assert getattr(config, expected[0]) == expected[1]


@pytest.mark.parametrize(
    "name", ["hidden_size", "num_attention_heads", "vocab_size", "rope_theta", "rms_norm_eps", "sliding_window", "head_dim", "eos_token_id"]
)
def test_a_number_that_is_none_is_refused_by_name(tmp_path: Path, name: str) -> None:
    for value in ("wide", [1.5], {"a": 1}):
        with pytest.raises(ModelLoadError, match=rf"config\.json: {name} = "):
            config_of(tmp_path, "MistralForCausalLM", **{name: value})


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ("linear", "rope_scaling = 'linear' must be an object"),
        ({"type": "yarn", "factor": None}, "'yarn' lacks 'factor'"),
        ({"type": "linear", "factor": [2]}, "factor = .2. must be a number"),
    ],
)
def test_rope_scaling_of_the_wrong_kind_is_refused_by_name(tmp_path: Path, scaling: Any, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        config_of(tmp_path, "LlamaForCausalLM", rope_scaling=scaling)


def test_rope_scaling_that_was_added_to_a_file_goes_over_its_rope_parameters(tmp_path: Path) -> None:
    """Model cards say to add it for long contexts; `transformers` writes the other name today."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    written = {"rope_type": "default", "rope_theta": 5e5}
    config = config_of(tmp_path, "Qwen2ForCausalLM", rope_parameters=written, rope_scaling=yarn)
    assert config.rope_scaling == YarnRopeScaling(4.0, 64, 32.0, 1.0, YarnRopeScaling.magnitude(4.0))
    assert config.rope_theta == 5e5
    by_layer = {"full_attention": written, "sliding_attention": {"rope_type": "default", "rope_theta": 3e3}}
    fields: dict[str, Any] = {"head_dim": 16, "rope_parameters": by_layer, "rope_scaling": {"type": "linear", "factor": 8.0}}
    config = config_of(tmp_path, "Gemma3ForCausalLM", **fields)
    assert (config.rope_scaling, config.rope_theta, config.local_rope_theta) == (LinearRopeScaling(8.0), 5e5, 3e3)


def test_a_window_as_long_as_the_context_hides_nothing_but_its_layers_stay_local(tmp_path: Path) -> None:
    config = config_of(tmp_path, "Gemma3ForCausalLM", head_dim=16, sliding_window=256)
    assert config.sliding_windows == (256, 256) and config.is_local(0)
    assert config.sliding_window(0) is None
    assert config_of(tmp_path, "Gemma3ForCausalLM", head_dim=16, sliding_window=255).sliding_window(0) == 255


def test_long_rope_takes_the_factors_of_the_served_context_and_the_fingerprint_says_which(tmp_path: Path) -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    fields: dict[str, Any] = {"rope_scaling": scaling, "original_max_position_embeddings": 64}
    fingerprints = set()
    for served, factor, is_long in ((None, 2.0, True), (65, 2.0, True), (64, 1.0, False)):
        config = config_of(tmp_path, "Phi3ForCausalLM", served, **fields)
        assert config.rope_scaling is not None and config.rope_scaling.kind == "longrope"
        assert (config.rope_scaling.factors, config.rope_scaling.is_long) == ((factor,) * 8, is_long)
        assert config.rope_scaling.attention_factor == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)
        fingerprints.add((resolve_model(str(tmp_path), "dummy", served).fingerprint, is_long))
    assert len(fingerprints) == 2


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 8}}, "'longrope' lacks 'short_factor'"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}, "has 1 factors, expected 8"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.55, "head_dim": 20}, "11 of 20 items"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, r"activation 'gelu' \(hidden_act\)"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, r"activation 'gelu' \(hidden_activation\)"),
        ("Qwen3ForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("LlamaForCausalLM", {"sliding_window": 64}, "sliding_window = 64"),
        ("LlamaForCausalLM", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "no sliding_window"),
        ("Gemma2ForCausalLM", {"sliding_window": 0}, "sliding window is 0"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1.0}, "attention_soft_cap is -1.0"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "'linear' for sliding_attention",
        ),
        ("Qwen3ForCausalLM", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ("Gemma3ForConditionalGeneration", {"text_config": {}}, "Gemma3ForConditionalGeneration.*Gemma3ForCausalLM"),
        ("MistralForCausalLM", {"vision_config": {"depth": 1}}, "multimodal input .vision_config"),
        ("LlamaForCausalLM", {"kv_lora_rank": 512}, "latent attention .kv_lora_rank"),
        ("DeepseekV3ForCausalLM", {}, "DeepseekV3ForCausalLM"),
        ("LlamaForCausalLM", {"num_local_experts": 4}, "num_local_experts = 4"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "moe_intermediate_size": 32}, "8 of 4 experts"),
        ("Qwen3MoeForCausalLM", {"num_experts": 8}, "moe_intermediate_size"),
        ("MistralForCausalLM", {"attention_bias": True}, "attention_bias = True"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval = 0 must be at least 1"),
        ("LlamaForCausalLM", {"rope_theta": -1.0}, "rope_theta is -1.0"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ("Phi3ForCausalLM", {"lm_head_bias": True}, "lm_head_bias = True"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("Qwen2ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(tmp_path: Path, architecture: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as caught:
        config_of(tmp_path, architecture, **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.attention.sliding_window": 64}, "sliding_window 64"),
        ({"llama.expert_count": 4}, "llama.expert_used_count"),
        ({"llama.expert_shared_count": 1}, "expert_shared_count"),
        ({"llama.attention.value_length": 8}, "value_length 8"),
        ({"llama.rope.scaling.type": "longrope"}, "scaling.type 'longrope'"),
        ({"llama.logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"llama.embedding_scale": 12.0}, "embedding_scale = 12.0"),
        ({"llama.attention.scale": 0.5}, "attention.scale = 0.5"),
        ({"llama.attention.causal": False}, "attention.causal = False"),
        ({"llama.attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"llama.rope.dimension_sections": [2, 3, 3, 0]}, "rope.dimension_sections"),
        ({"llama.attention.head_count_kv": [2, 1]}, "attention.head_count_kv differs from layer to layer"),
        ({"llama.block_count": "two"}, "block_count = 'two' must be a number"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, "eos_token_id = '</s>' must be a token id"),
        ({"tokenizer.ggml.bos_token_id": 99999, "tokenizer.ggml.add_bos_token": True}, "bos_token_id 99999"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 items in tokenizer.ggml.token_type"),
    ],
)
def test_the_same_of_gguf(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ModelLoadError, match=words):
        resolve_model(str(tmp_path / "m.gguf"))


def test_keys_of_gguf_that_ask_for_nothing_are_taken(tmp_path: Path) -> None:
    neutral = {
        "logit_scale": 1.0,
        "attention.scale": 0.25,
        "attention.causal": True,
        "attention.head_count_kv": [2, 2],
        "expert_group_count": 0,
    }
    write_tiny_gguf(tmp_path / "m.gguf", metadata={f"llama.{key}": value for key, value in neutral.items()})
    assert resolve_model(str(tmp_path / "m.gguf")).config.num_kv_heads == 2


@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_superfluous_and_misshapen_tensors_of_a_layer_are_named(tmp_path: Path, architecture: str) -> None:
    config = config_of(tmp_path, architecture, **FAMILIES[architecture])
    weights = tiny_weights(config)
    fields = FAMILIES[architecture] | {"architectures": [architecture]}
    write_tiny_hf(tmp_path, config, weights=weights, **fields)
    assert resolve_model(str(tmp_path)).num_parameters == sum(weight.size for weight in weights.values())
    of_layer = [expected.name for expected in expected_weights(config) if expected.name.startswith("model.layers.1.")]
    for name in of_layer:
        changed = {**weights, name: np.zeros((*weights[name].shape, 2), np.float32)}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=rf"tensor {name} has shape"):
            resolve_model(str(tmp_path))
        del changed[name]
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=rf"tensor {name} is missing"):
            resolve_model(str(tmp_path))
    save_file({**weights, "model.layers.1.self_attn.sinks": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.1\.self_attn\.sinks is none of"):
        resolve_model(str(tmp_path))
