"""Rotary frequencies of a model, with the scalings of the Llama family, and their tables."""

from __future__ import annotations

import math

import torch

from shared.model_files.model_config import LinearRopeScaling, Llama3RopeScaling, ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] fp64. Linear scaling divides all by the factor; "llama3" keeps short wavelengths, divides long ones and
    blends between them (the rule published with Llama 3.1)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_freq_factors is not None:
        frequencies = frequencies / torch.tensor(config.rope_freq_factors, dtype=torch.float64)
    scaling = config.rope_scaling
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3RopeScaling):
        num_turns = scaling.original_max_position * frequencies / (2 * math.pi)
        keep = ((num_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
        return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor
    return frequencies


class RotaryTable:
    """cos and sin for every position below `max_model_len`: fp32 [max_model_len, head_dim / 2], angles formed in fp64."""

    def __init__(self, config: ModelConfig, max_model_len: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float64), inverse_frequencies(config))
        self.cos = angles.cos().to(device, torch.float32)
        self.sin = angles.sin().to(device, torch.float32)
