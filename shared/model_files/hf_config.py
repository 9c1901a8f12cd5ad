"""ModelConfig from a Hugging Face config.json (and generation_config.json).

What `transformers` takes for a field that is not there holds here too, since its files leave out what equals its own defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared.errors import ModelLoadError
from shared.model_files.hf_fields import Fields, given_fields, rope_parameters, token_ids
from shared.model_files.hf_rope import hf_rope
from shared.model_files.hf_tokenizer import HFTokenizerFacts
from shared.model_files.model_config import Architecture, ExpertsConfig, ModelConfig, ending_ids


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: Architecture
    read: Callable[[Fields], dict[str, Any]]
    """What is this family's own: fields of ModelConfig, without those that all have."""
    defaults: dict[str, Any] = field(default_factory=dict)
    own_fields: tuple[str, ...] = ()
    """Fields that change what is computed and that this family has and not all: others refuse them."""
    activation_field: str = "hidden_act"
    activations: tuple[str, ...] = ("silu", "swish")


def _windows(config: Fields, default_types: list[str] | None = None) -> tuple[int | None, ...]:
    """Per layer. `default_types`: where `layer_types` is not given; None: the family has a window in all layers or in none."""
    num_layers, window = int(config["num_hidden_layers"]), config.get("sliding_window")
    uniform = ["full_attention" if window is None else "sliding_attention"] * num_layers
    types = config.get("layer_types") or default_types or uniform
    if default_types is None and types != uniform:
        raise ModelLoadError(f"config.json: layer_types {sorted(set(types))} are not supported for {config['architectures'][0]}")
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != num_layers:
        raise ModelLoadError(f"config.json: layer_types has {', '.join(sorted(unknown)) or len(types)}, which is not supported; give "
                             f"full_attention or sliding_attention for each of {num_layers} layers")  # fmt: skip
    if window is None and "sliding_attention" in types:
        raise ModelLoadError("config.json: layer_types has sliding_attention, and there is no sliding_window")
    if window is None or "sliding_attention" not in types:
        return ()
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)


def _biases(config: Fields) -> dict[str, Any]:
    has_bias = bool(config.get("attention_bias"))
    return {"attention_bias": has_bias, "attention_output_bias": has_bias, "mlp_bias": bool(config.get("mlp_bias"))}


def _llama(config: Fields) -> dict[str, Any]:
    return {**_biases(config), "sliding_windows": _windows(config)}


def _mistral(config: Fields) -> dict[str, Any]:
    return {"sliding_windows": _windows(config)}


def _mixtral(config: Fields) -> dict[str, Any]:
    experts = ExpertsConfig(
        int(config["num_local_experts"]), int(config["num_experts_per_tok"]), int(config["intermediate_size"]), is_normalized=True
    )
    return {"sliding_windows": _windows(config), "experts": experts}


def _smollm3(config: Fields) -> dict[str, Any]:
    num_layers, interval = int(config["num_hidden_layers"]), int(config["no_rope_layer_interval"])
    # Trap: for all its name, a 1 in no_rope_layers is a layer with rotary embedding.
    has_rope = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(has_rope) < num_layers:
        raise ModelLoadError(f"config.json: no_rope_layers has {len(has_rope)} items for {num_layers} layers")
    nope_layers = tuple(layer for layer in range(num_layers) if not has_rope[layer])
    is_local = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    types = ["sliding_attention" if is_local and layer in nope_layers else "full_attention" for layer in range(num_layers)]
    given = config if is_local else {**config, "layer_types": None}
    return {**_biases(config), "nope_layers": nope_layers, "sliding_windows": _windows(given, types)}


def _qwen_windows(config: Fields) -> tuple[int | None, ...]:
    """Where they are used at all, the first `max_window_layers` do without."""
    num_layers = int(config["num_hidden_layers"])
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return _windows({**config, "sliding_window": None}, ["full_attention"] * num_layers)
    first = int(config["max_window_layers"])
    return _windows(config, ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)])


def _qwen2(config: Fields) -> dict[str, Any]:
    return {"attention_bias": True, "sliding_windows": _qwen_windows(config)}


def _qwen3(config: Fields) -> dict[str, Any]:
    return {**_biases(config), "sliding_windows": _qwen_windows(config)}


def _qwen3_moe(config: Fields) -> dict[str, Any]:
    num_layers, step = int(config["num_hidden_layers"]), int(config["decoder_sparse_step"])
    num_experts = int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])
    dense = set(config.get("mlp_only_layers") or []) | {layer for layer in range(num_layers) if (layer + 1) % step}
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        is_normalized=bool(config["norm_topk_prob"]),
        dense_layers=tuple(sorted(dense)),
    )
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return {**_biases(config), "sliding_windows": _windows({**config, "sliding_window": window}), "experts": experts}


def _gemma(config: Fields, period: int) -> dict[str, Any]:
    """Of `period` layers the last sees all positions, the others a window."""
    types = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(int(config["num_hidden_layers"]))]
    soft_caps = (config.get("attn_logit_softcapping"), config.get("final_logit_softcapping"))
    return {
        **_biases(config),
        "sliding_windows": _windows(config, types),
        "attention_scale": float(config["query_pre_attn_scalar"]) ** -0.5,
        "attention_soft_cap": None if soft_caps[0] is None else float(soft_caps[0]),
        "logit_soft_cap": None if soft_caps[1] is None else float(soft_caps[1]),
    }


def _gemma2(config: Fields) -> dict[str, Any]:
    return _gemma(config, 2)


def _gemma3(config: Fields) -> dict[str, Any]:
    period = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    local = given_fields(rope_parameters(config).get("sliding_attention") or {})
    if local.get("rope_type", "default") != "default":
        raise ModelLoadError(f"config.json: rope_type {local['rope_type']!r} for sliding_attention is not supported; supported is default")
    theta = local.get("rope_theta") or config.get("rope_local_base_freq") or 10000.0
    return {**_gemma(config, period), "local_rope_theta": float(theta)}


def _phi3(config: Fields) -> dict[str, Any]:
    return {"sliding_windows": _windows(config)}


_EXPERTS = ("num_experts", "num_local_experts")
_GEMMA_FIELDS = ("final_logit_softcapping", "query_pre_attn_scalar", "sliding_window", "attention_bias")
_GELU: dict[str, Any] = {"activation_field": "hidden_activation", "activations": ("gelu_pytorch_tanh",)}
_GEMMA = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "query_pre_attn_scalar": 256,
          "sliding_window": 4096}  # fmt: skip
_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", _llama, own_fields=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": _Family("mistral", _mistral, {"sliding_window": 4096}, ("sliding_window",)),
    "MixtralForCausalLM": _Family(
        "mixtral",
        _mixtral,
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
        ("sliding_window", *_EXPERTS),
    ),
    "SmolLM3ForCausalLM": _Family(
        "smollm3",
        _smollm3,
        {"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
        ("attention_bias", "mlp_bias", "no_rope_layers", "sliding_window"),
    ),
    "Qwen2ForCausalLM": _Family("qwen2", _qwen2, {"sliding_window": 4096, "max_window_layers": 28}, ("attention_bias", "sliding_window")),
    "Qwen3ForCausalLM": _Family(
        "qwen3", _qwen3, {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}, ("attention_bias", "sliding_window")
    ),
    "Qwen3MoeForCausalLM": _Family(
        "qwen3_moe",
        _qwen3_moe,
        {"decoder_sparse_step": 1, "num_experts_per_tok": 8, "norm_topk_prob": False, "sliding_window": 4096},
        ("attention_bias", "sliding_window", *_EXPERTS),
    ),
    "Gemma2ForCausalLM": _Family(
        "gemma2",
        _gemma2,
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ("attn_logit_softcapping", *_GEMMA_FIELDS),
        **_GELU,
    ),
    # No Gemma 3 caps attention scores, and `transformers` would not do it.
    "Gemma3ForCausalLM": _Family("gemma3", _gemma3, {**_GEMMA, "rope_theta": 1e6}, _GEMMA_FIELDS, **_GELU),
    "Phi3ForCausalLM": _Family("phi3", _phi3, {"rms_norm_eps": 1e-5}, ("sliding_window", "partial_rotary_factor")),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)
_MODEL_TYPES = {family.architecture: name for name, family in _FAMILIES.items()} | {"gemma3_text": "Gemma3ForCausalLM"}

_CHANGES_RESULT = {
    "sliding_window": "sliding-window attention",
    "attention_bias": "biases of the attention projections",
    "mlp_bias": "biases of the feed-forward part",
    "lm_head_bias": "a bias of the head",
    "attn_logit_softcapping": "soft caps on attention scores",
    "final_logit_softcapping": "soft caps on logits",
    "query_pre_attn_scalar": "another scale of queries",
    "no_rope_layers": "layers without rotary embedding",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "kv_lora_rank": "multi-head latent attention",
    "q_lora_rank": "multi-head latent attention",
    "vision_config": "multimodal input",
    "audio_config": "multimodal input",
    "text_config": "multimodal input",
    "use_bidirectional_attention": "attention to later positions",
    "attention_chunk_size": "attention in chunks",
    "use_qk_norm": "norms of queries and keys",
    "qk_layernorm": "norms of queries and keys",
    "embedding_multiplier": "scaled embeddings",
    "residual_multiplier": "scaled residuals",
    "attention_multiplier": "another scale of queries",
    "logits_scaling": "scaled logits",
    "logit_scale": "scaled logits",
}


def _refuse_what_is_not_computed(config: Fields, name: str, family: _Family) -> None:
    if config.get("quantization_config"):
        raise ModelLoadError("quantised safetensors (quantization_config) are not supported; use the unquantised model or a GGUF file")
    activation = config.get(family.activation_field) or family.activations[0]
    if activation not in family.activations:
        supported = family.activations[0]
        raise ModelLoadError(f"activation {activation!r} ({family.activation_field}) is not supported; supported for {name}: {supported}")
    for field_name, what in _CHANGES_RESULT.items():
        value = config.get(field_name)
        has_effect = value is not None and value is not False and value not in ([], {}) and (value is True or value not in (0, 1))
        if has_effect and field_name not in family.own_fields:
            shown = "" if isinstance(value, (dict, list)) else f" = {value!r}"
            raise ModelLoadError(f"config.json: {what} ({field_name}{shown}) is not supported for {name}; use a model without it")


def config_from_hf(config: Fields, generation_config: Fields, tokenizer: HFTokenizerFacts, max_model_len: int | None = None) -> ModelConfig:
    """`max_model_len`: what is served at most, where somebody said so. Raises ModelLoadError naming the architecture or field that is not
    supported or missing."""
    model_type = config.get("model_type", "")
    name = (config.get("architectures") or [_MODEL_TYPES.get(model_type, model_type)])[0]
    family = _FAMILIES.get(name)
    if family is None:
        raise ModelLoadError(f"architecture {name!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
    _refuse_what_is_not_computed(config, name, family)
    config = {**family.defaults, **given_fields(config), "architectures": [name]}
    parameters = rope_parameters(config)
    if family.architecture == "gemma3":  # which has one for each kind of layer
        parameters = parameters.get("full_attention") or ({} if "sliding_attention" in parameters else parameters)
    elif family.architecture == "phi3" and parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):
        parameters = {**parameters, "rope_type": "longrope"}  # as it was called before
    if nested := sorted(key for key, value in parameters.items() if isinstance(value, dict)):
        raise ModelLoadError(f"config.json: rope_parameters for each of {', '.join(nested)} are not supported for {name}")
    rope = hf_rope(config, given_fields(parameters), max_model_len)
    if rope.rotary_share != 1.0 and "partial_rotary_factor" not in family.own_fields:
        raise ModelLoadError(f"config.json: partial_rotary_factor {rope.rotary_share} is not supported for {name}; it must be 1")
    # The tokenizer's own first: chat templates name it. Files that were edited by hand often have the chat's end there alone.
    of_tokenizer = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    eos = of_tokenizer + (token_ids(generation_config, "eos_token_id") or token_ids(config, "eos_token_id"))
    bos = token_ids(config, "bos_token_id")
    try:
        num_heads, hidden_size, vocab_size = int(config["num_attention_heads"]), int(config["hidden_size"]), int(config["vocab_size"])
        head_dim = int(config.get("head_dim") or hidden_size // num_heads)
        return ModelConfig(
            architecture=family.architecture,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=head_dim,
            vocab_size=vocab_size,
            tokenizer_vocab_size=min(tokenizer.vocab_size, vocab_size),
            max_model_len=rope.max_position,
            rope_theta=rope.theta,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_scaling=rope.scaling,
            partial_rotary_dim=None if rope.rotary_share == 1.0 else int(head_dim * rope.rotary_share),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=ending_ids(eos, min(tokenizer.vocab_size, vocab_size)),
            bos_token_id=tokenizer.bos_token_id if tokenizer.bos_token_id is not None else next(iter(bos), None),
            add_bos=tokenizer.add_bos,
            **family.read(config),
        )
    except KeyError as error:
        raise ModelLoadError(f"config.json lacks {error.args[0]!r}") from error
