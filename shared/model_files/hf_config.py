"""ModelConfig from a Hugging Face config.json (and generation_config.json)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import ModelLoadError
from shared.model_files.model_config import LinearRopeScaling, Llama3RopeScaling, ModelConfig, RopeScaling

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def token_id_list(value: Any) -> tuple[int, ...]:
    """`eos_token_id` is a number, a list of numbers, or null."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; `rope_parameters` is the newer spelling of `rope_scaling` and carries the base too."""
    scaling: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelLoadError("rotary embedding over a part of the head is not supported; it must cover the whole head")
    if kind == "default":
        return theta, None
    try:
        if kind == "linear":
            return theta, LinearRopeScaling(float(scaling["factor"]))
        if kind == "llama3":
            return theta, Llama3RopeScaling(
                float(scaling["factor"]),
                float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]),
                int(scaling["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ModelLoadError(f"config.json: rope scaling {kind!r} lacks {error.args[0]!r}") from error
    raise ModelLoadError(f"rope scaling {kind!r} is not supported; supported are linear and llama3")


def config_from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer_vocab_size: int, add_bos: bool, bos_token_id: int | None
) -> ModelConfig:
    """Raises ModelLoadError naming the architecture or field that is not supported or missing."""
    architectures = config.get("architectures") or [
        {"llama": "LlamaForCausalLM"}.get(config.get("model_type", ""), config.get("model_type"))
    ]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        raise ModelLoadError(f"architecture {architectures[0]!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
    if architectures[0] == "MistralForCausalLM" and config.get("sliding_window"):
        raise ModelLoadError(f"sliding-window attention ({config['sliding_window']} tokens) is not supported; use a model without it")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"activation {config['hidden_act']!r} is not supported; supported: silu")
    if config.get("quantization_config"):
        raise ModelLoadError("quantised safetensors are not supported; use the unquantised model or a GGUF file")
    rope_theta, rope_scaling = _rope(config)
    try:
        num_heads, hidden_size, vocab_size = int(config["num_attention_heads"]), int(config["hidden_size"]), int(config["vocab_size"])
        has_bias = bool(config.get("attention_bias", False))
        return ModelConfig(
            architecture="llama",
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            vocab_size=vocab_size,
            tokenizer_vocab_size=min(tokenizer_vocab_size, vocab_size),
            max_model_len=int(config.get("max_position_embeddings", 2048)),
            rope_theta=rope_theta,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_scaling=rope_scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=has_bias,
            attention_output_bias=has_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            eos_token_ids=token_id_list(generation_config.get("eos_token_id", config.get("eos_token_id"))),
            bos_token_id=bos_token_id if bos_token_id is not None else next(iter(token_id_list(config.get("bos_token_id"))), None),
            add_bos=add_bos,
        )
    except KeyError as error:
        raise ModelLoadError(f"config.json lacks {error.args[0]!r}") from error
