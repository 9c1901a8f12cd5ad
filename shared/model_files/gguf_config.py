"""ModelConfig from the key-values and tensors of a GGUF file.

llama.cpp knows some facts of a family by its name alone, so files do not say them; those stand here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.errors import ModelLoadError
from shared.model_files.dequantize import dequantize
from shared.model_files.gguf import GGUFModel
from shared.model_files.gguf_tokenizer import gguf_special_tokens
from shared.model_files.model_config import (
    Architecture,
    ExpertsConfig,
    LinearRopeScaling,
    LongRopeScaling,
    ModelConfig,
    RopeScaling,
    YarnRopeScaling,
)
from shared.model_files.weight_names import ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, ROPE_FREQS

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Facts:
    """The key-values of one file, by their names without the architecture in front."""

    model: GGUFModel
    architecture: str

    def get(self, key: str, default: Any = None) -> Any:
        return self.model.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        """Raises ModelLoadError naming the key: of one without a default that is not there, of one that is no number, and of an array,
        one number for each layer, whose items differ."""
        value = self.get(key, default)
        if value is None:
            raise _lacking(self.model, f"{self.architecture}.{key}")
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if not isinstance(value, (int, float)):
            shown = (
                "differs from layer to layer, which is not supported" if isinstance(value, np.ndarray) else f"= {value!r} must be a number"
            )
            raise ModelLoadError(f"{self.architecture}.{key} {shown}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    @property
    def num_layers(self) -> int:
        return self.integer("block_count")

    @property
    def head_dim(self) -> int:
        per_head = self.integer("embedding_length") // max(1, self.integer("attention.head_count"))
        return self.integer("attention.key_length", per_head)


def _lacking(model: GGUFModel, key: str) -> ModelLoadError:
    return ModelLoadError(f"{model.paths[0]} lacks {key}: the file is damaged or made by an unknown converter")


def _experts(facts: _Facts, size_key: str) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=facts.integer("expert_count"),
        num_experts_per_token=facts.integer("expert_used_count"),
        intermediate_size=facts.integer(size_key),
        is_normalized=True,
    )


def _llama(facts: _Facts) -> dict[str, Any]:
    """Also Mistral, which converters call llama, and Mixtral, a llama with experts."""
    if not facts.integer("expert_count", 0):
        return {}
    return {"architecture": "mixtral", "experts": _experts(facts, "feed_forward_length")}


def _smollm3(facts: _Facts) -> dict[str, Any]:
    return {"nope_layers": tuple(range(3, facts.num_layers, 4))}


def _plain(facts: _Facts) -> dict[str, Any]:
    return {}


def _qwen3moe(facts: _Facts) -> dict[str, Any]:
    return {"experts": _experts(facts, "expert_feed_forward_length"), "intermediate_size": facts.integer("feed_forward_length", 1)}


def _gemma(facts: _Facts, period: int, num_layers_of_27b: int, default_window: int | None) -> dict[str, Any]:
    """Of `period` layers the last sees all positions. The largest model scales queries by another size than the head's."""
    num_layers = facts.num_layers
    pattern = facts.get("attention.sliding_window_pattern", period)
    is_local = (
        [bool((layer + 1) % pattern) for layer in range(num_layers)] if isinstance(pattern, int) else [bool(item) for item in pattern]
    )
    window = facts.integer("attention.sliding_window", default_window)
    if len(is_local) != num_layers:
        raise ModelLoadError(f"attention.sliding_window_pattern has {len(is_local)} items for {num_layers} layers")
    size = facts.head_dim
    if num_layers == num_layers_of_27b:
        size = facts.integer("embedding_length") // facts.integer("attention.head_count")
    return {"sliding_windows": tuple(window if local else None for local in is_local), "attention_scale": size**-0.5}


def _gemma2(facts: _Facts) -> dict[str, Any]:
    return {
        **_gemma(facts, 2, 46, 4096),
        "attention_soft_cap": float(facts.number("attn_logit_softcapping", 50.0)),
        "logit_soft_cap": float(facts.number("final_logit_softcapping", 30.0)),
    }


def _gemma3(facts: _Facts) -> dict[str, Any]:
    cap = facts.number("final_logit_softcapping", 0.0)
    return {
        **_gemma(facts, 6, 62, None),
        "logit_soft_cap": float(cap) if cap else None,
        "local_rope_theta": float(facts.number("rope.freq_base_swa", 10000.0)),
    }


def _phi3(facts: _Facts) -> dict[str, Any]:
    window = facts.integer("attention.sliding_window", 0)
    rotary_dim = facts.integer("rope.dimension_count", facts.head_dim)
    return {
        "sliding_windows": (window,) * facts.num_layers if window else (),
        "partial_rotary_dim": None if rotary_dim == facts.head_dim else rotary_dim,
    }


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: Architecture
    read: Callable[[_Facts], dict[str, Any]]
    """What is this family's own: fields of ModelConfig."""
    has_window: bool = False
    has_experts: bool = False
    default_theta: float = 10000.0
    own_keys: tuple[str, ...] = ()
    """Keys that change what is computed and that this family has and not all: others refuse them."""


_FAMILIES = {
    "llama": _Family("llama", _llama, has_experts=True),
    "smollm3": _Family("smollm3", _smollm3),
    "qwen2": _Family("qwen2", _plain),
    "qwen3": _Family("qwen3", _plain),
    "qwen3moe": _Family("qwen3_moe", _qwen3moe, has_experts=True),
    "gemma2": _Family("gemma2", _gemma2, has_window=True, own_keys=("attn_logit_softcapping", "final_logit_softcapping")),
    "gemma3": _Family("gemma3", _gemma3, has_window=True, default_theta=1e6, own_keys=("final_logit_softcapping",)),
    "phi3": _Family("phi3", _phi3, has_window=True),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)

_CHANGES_RESULT: dict[str, tuple[str, tuple[float, ...]]] = {
    "logit_scale": ("a scale of logits", (0, 1)),
    "residual_scale": ("a scale of residuals", (0, 1)),
    "embedding_scale": ("a scale of embeddings", (0, 1)),
    "attn_logit_softcapping": ("a soft cap on attention scores", (0,)),
    "final_logit_softcapping": ("a soft cap on logits", (0,)),
    "attention.causal": ("attention to later positions", (True,)),
    "attention.max_alibi_bias": ("a bias by distance", (0,)),
    "attention.clamp_kqv": ("clamping of queries, keys and values", (0,)),
    "attention.temperature_scale": ("a scale of queries by position", (0,)),
    "attention.kv_lora_rank": ("multi-head latent attention", (0,)),
    "attention.shared_kv_layers": ("layers that share keys and values", (0,)),
    "rope.dimension_sections": ("rotary embedding in sections", (0,)),
    "rope.scaling.alpha": ("a scale of the rotary base", (0,)),
    "use_parallel_residual": ("a parallel residual", (False,)),
    "expert_shared_count": ("shared experts", (0,)),
    "expert_group_count": ("groups of experts", (0, 1)),
    "expert_gating_func": ("another function of the experts' router", (0, 1)),
    "expert_weights_scale": ("a scale of the experts' weights", (0, 1)),
    "leading_dense_block_count": ("layers without experts before those with", (0,)),
    "interleave_moe_layer_step": ("layers with experts between those without", (0, 1)),
}
"""Key -> what it asks for, and the values that ask for nothing."""


def _rope_scaling(facts: _Facts, max_position: int, max_served: int) -> RopeScaling | None:
    tensors = facts.model.tensors
    original = facts.integer("rope.scaling.original_context_length", max_position)
    attention_factor = facts.number("rope.scaling.attn_factor", 0.0) or None
    if ROPE_FACTORS_LONG in tensors and ROPE_FACTORS_SHORT in tensors:
        short, long = (dequantize(tensors[name]).reshape(-1).tolist() for name in (ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG))
        return LongRopeScaling.for_context(max_served, short, long, original, max_position, attention_factor=attention_factor)
    kind = facts.get("rope.scaling.type", "linear" if facts.get("rope.scale_linear") else "none")
    factor = float(facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 1.0)))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return LinearRopeScaling(factor)
    if kind == "yarn" and not facts.get("rope.scaling.yarn_log_multiplier"):
        fast, slow = float(facts.number("rope.scaling.yarn_beta_fast", 32.0)), float(facts.number("rope.scaling.yarn_beta_slow", 1.0))
        # What the key holds is a factor beside the one that follows from the stretch.
        return YarnRopeScaling(factor, original, fast, slow, YarnRopeScaling.magnitude(factor) * (attention_factor or 1.0))
    raise ModelLoadError(f"{facts.architecture}.rope.scaling.type {kind!r} is not supported; supported are none, linear, yarn and longrope")


def _rope_freq_factors(model: GGUFModel) -> tuple[float, ...] | None:
    tensor = model.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    _log.info("%s found: used as divisors of the rotary frequencies", ROPE_FREQS)
    return tuple(dequantize(tensor).reshape(-1).tolist())


def _refuse_what_is_not_computed(facts: _Facts, family: _Family, max_position: int) -> None:
    name = facts.architecture
    if facts.integer("expert_count", 0) and not family.has_experts:
        raise ModelLoadError(f"{name}.expert_count: a mixture of experts is not supported for {name}")
    for key, (what, neutral) in _CHANGES_RESULT.items():
        value = facts.get(key)
        values = value.tolist() if isinstance(value, np.ndarray) else [value]
        if any(item is not None and item not in neutral for item in values) and key not in family.own_keys:
            raise ModelLoadError(f"{name}.{key} = {value}: {what} is not supported for {name}; use a model without it")
    window = facts.integer("attention.sliding_window", 0)
    if window and window < max_position and not family.has_window:
        raise ModelLoadError(f"{name}.attention.sliding_window {window}: sliding-window attention is not supported for {name} in GGUF; "
                             "use the model's safetensors")  # fmt: skip
    rope_dim = facts.integer("rope.dimension_count", facts.head_dim)
    if rope_dim != facts.head_dim and family.architecture != "phi3":
        raise ModelLoadError(f"rotary embedding over {rope_dim} of {facts.head_dim} dimensions is not supported for {name}; it must cover "
                             "the whole head")  # fmt: skip
    if (value_dim := facts.integer("attention.value_length", facts.head_dim)) != facts.head_dim:
        raise ModelLoadError(f"{name}.attention.value_length {value_dim} is not supported; it must be the keys' {facts.head_dim}")


def config_from_gguf(model: GGUFModel, max_model_len: int | None = None) -> ModelConfig:
    """`max_model_len`: what is served at most, where somebody said so. Raises ModelLoadError when the architecture is not one of ours, or
    a fact is missing, contradicts the tensors or asks for what we do not compute."""
    name = model.get("general.architecture")
    if name is None:
        raise _lacking(model, "general.architecture")
    family = _FAMILIES.get(name)
    if family is None:
        raise ModelLoadError(f"architecture {name!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
    facts = _Facts(model, name)
    num_heads, head_dim = facts.integer("attention.head_count"), facts.head_dim
    max_position = facts.integer("context_length")
    _refuse_what_is_not_computed(facts, family, max_position)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{model.paths[0]} lacks the tensor token_embd.weight: the file is incomplete")
    special = gguf_special_tokens(model)
    scaling = _rope_scaling(facts, max_position, min(max_position, max_model_len or max_position))
    own = {"architecture": family.architecture, **family.read(facts)}
    scale = facts.number("attention.scale", 0.0)
    if scale and not math.isclose(scale, own.get("attention_scale", head_dim**-0.5), rel_tol=1e-4):
        raise ModelLoadError(
            f"{name}.attention.scale = {scale}: another scale of queries is not supported for {name}; use a model without it"
        )
    if "intermediate_size" not in own:
        own["intermediate_size"] = facts.integer("feed_forward_length")
    return ModelConfig(
        num_layers=facts.num_layers,
        hidden_size=facts.integer("embedding_length"),
        num_heads=num_heads,
        num_kv_heads=facts.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        tokenizer_vocab_size=min(special.vocab_size, embedding.shape[0]),
        max_model_len=max_position,
        rope_theta=float(facts.number("rope.freq_base", family.default_theta)),
        rms_norm_eps=float(facts.number("attention.layer_norm_rms_epsilon")),
        rope_scaling=scaling,
        rope_freq_factors=_rope_freq_factors(model),
        tie_word_embeddings="output.weight" not in model.tensors,
        attention_bias="blk.0.attn_q.bias" in model.tensors or "blk.0.attn_qkv.bias" in model.tensors,
        attention_output_bias="blk.0.attn_output.bias" in model.tensors,
        mlp_bias="blk.0.ffn_up.bias" in model.tensors,
        eos_token_ids=special.eos_token_ids,
        bos_token_id=special.bos_token_id,
        add_bos=special.add_bos,
        **own,
    )
