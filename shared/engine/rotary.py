"""Rotary frequencies of a model, with the scalings that families ask for, and their tables."""

from __future__ import annotations

import math

import torch

from shared.model_files.model_config import LinearRopeScaling, Llama3RopeScaling, LongRopeScaling, ModelConfig, YarnRopeScaling


def base_frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    """[rotary_dim / 2] fp64 radians per position of each rotated pair (i, i + rotary_dim / 2) (Su et al. 2021)."""
    return theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[rotary_dim / 2] fp64, scaled. Linear scaling divides all by the factor; "llama3" keeps short wavelengths, divides long ones and
    blends between them (the rule published with Llama 3.1); YaRN does the same with a ramp over the pairs; LongRoPE has a divisor for
    each pair."""
    frequencies = base_frequencies(config.rope_theta, config.rotary_dim)
    if config.rope_freq_factors is not None:
        frequencies = frequencies / torch.tensor(config.rope_freq_factors, dtype=torch.float64)
    scaling = config.rope_scaling
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3RopeScaling):
        num_turns = scaling.original_max_position * frequencies / (2 * math.pi)
        keep = ((num_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
        return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor
    if isinstance(scaling, YarnRopeScaling):
        keep = 1.0 - _yarn_ramp(config.rope_theta, config.rotary_dim, scaling)
        return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor
    if isinstance(scaling, LongRopeScaling):
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float64)
    return frequencies


def _yarn_ramp(theta: float, rotary_dim: int, scaling: YarnRopeScaling) -> torch.Tensor:
    """[rotary_dim / 2]: 0 where a pair is kept, 1 where it is stretched."""

    def pair_of(num_turns: float) -> float:
        return rotary_dim * math.log(scaling.original_max_position / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first if last != first else 0.001
    return ((torch.arange(rotary_dim // 2, dtype=torch.float64) - first) / width).clamp(0.0, 1.0)


class RotaryTable:
    """cos and sin for every position below `max_model_len`: fp32 [max_model_len, rotary_dim / 2], angles formed in fp64."""

    def __init__(self, frequencies: torch.Tensor, max_model_len: int, device: torch.device, attention_factor: float = 1.0) -> None:
        """`attention_factor`: both are multiplied by it, which scales what is rotated of queries and keys."""
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float64), frequencies)
        self.cos = (angles.cos() * attention_factor).to(device, torch.float32)
        self.sin = (angles.sin() * attention_factor).to(device, torch.float32)


class RotaryTables:
    """Those of all layers: one, or one for layers with a sliding window and one for the others."""

    def __init__(self, config: ModelConfig, max_model_len: int, device: torch.device) -> None:
        scaling = config.rope_scaling
        attention_factor = scaling.attention_factor if isinstance(scaling, (YarnRopeScaling, LongRopeScaling)) else 1.0
        table = RotaryTable(inverse_frequencies(config), max_model_len, device, attention_factor)
        local = table
        if config.local_rope_theta is not None:
            local = RotaryTable(base_frequencies(config.local_rope_theta, config.rotary_dim), max_model_len, device)
        self._tables = [
            None if layer in config.nope_layers else local if config.is_local(layer) else table for layer in range(config.num_layers)
        ]

    def of_layer(self, layer: int) -> RotaryTable | None:
        """None: the layer has no rotary embedding."""
        return self._tables[layer]
