"""The plain meaning of a Llama forward pass: one sequence, fp32, no paging, no chunks, no cache, no batch.

Written from the formulas and sharing nothing with the serving path (not even its rotary table or norms), so that agreement of the
two means something. Quadratic and slow on purpose; for tests only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from shared.model_files.model_config import LinearRopeScaling, Llama3RopeScaling, ModelConfig


def _llama3_frequency(frequency: float, scaling: Llama3RopeScaling) -> float:
    """Long wavelengths divided by the factor, short ones kept, a linear ramp in the number of turns between them."""
    turns = scaling.original_max_position * frequency / (2.0 * math.pi)
    kept = min(1.0, max(0.0, (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)))
    return (1.0 - kept) * frequency / scaling.factor + kept * frequency


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] radians per position of each rotated pair (i, i + head_dim / 2)."""
    frequencies = [config.rope_theta ** (-2.0 * i / config.head_dim) for i in range(config.head_dim // 2)]
    if config.rope_freq_factors is not None:
        frequencies = [frequency / divisor for frequency, divisor in zip(frequencies, config.rope_freq_factors, strict=True)]
    scaling = config.rope_scaling
    if isinstance(scaling, LinearRopeScaling):
        frequencies = [frequency / scaling.factor for frequency in frequencies]
    elif isinstance(scaling, Llama3RopeScaling):
        frequencies = [_llama3_frequency(frequency, scaling) for frequency in frequencies]
    return torch.tensor(frequencies, dtype=torch.float32)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x: [num_tokens, num_heads, head_dim], angles: [num_tokens, head_dim / 2]; halves are the two coordinates of each pair."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _linear(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _attention(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str, config: ModelConfig, angles: torch.Tensor) -> torch.Tensor:
    num_tokens, group = len(x), config.num_heads // config.num_kv_heads
    query = rotate(_linear(x, weights, f"{name}.q_proj").view(num_tokens, config.num_heads, config.head_dim), angles)
    key = rotate(_linear(x, weights, f"{name}.k_proj").view(num_tokens, config.num_kv_heads, config.head_dim), angles)
    value = _linear(x, weights, f"{name}.v_proj").view(num_tokens, config.num_kv_heads, config.head_dim)
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(config.head_dim)
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    mixed = torch.einsum("hqk,khd->qhd", probabilities, value).reshape(num_tokens, -1)
    return _linear(mixed, weights, f"{name}.o_proj")


@torch.inference_mode()
def forward(weights: Mapping[str, torch.Tensor], config: ModelConfig, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits after every token: [num_tokens, vocab_size] fp32, padding rows included. `weights`: fp32 on the CPU, as load_weights gives."""
    angles = torch.outer(torch.arange(len(token_ids), dtype=torch.float32), rotary_frequencies(config))
    x = weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        normed = _norm(x, weights[f"{layer}.input_layernorm.weight"], config.rms_norm_eps)
        x = x + _attention(normed, weights, f"{layer}.self_attn", config, angles)
        normed = _norm(x, weights[f"{layer}.post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = _linear(normed, weights, f"{layer}.mlp.gate_proj"), _linear(normed, weights, f"{layer}.mlp.up_proj")
        x = x + _linear(gate * torch.sigmoid(gate) * up, weights, f"{layer}.mlp.down_proj")
    x = _norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    return x @ weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"].T
