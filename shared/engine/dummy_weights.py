"""Weights that mean nothing, for speed measurements: the same numbers on every device, from an integer hash of their place."""

from __future__ import annotations

import math

import torch

from shared.model_files.weight_names import ExpectedWeight

STANDARD_DEVIATION = 0.02
_SLICE = 1 << 24
_MULTIPLIER = 0x9E3779B1
_MASK = 0xFFFFFFFF


def dummy_weight(expected: ExpectedWeight, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Ones for a norm, else uniform with mean 0. `seed`: the weight's number in the model."""
    if expected.name.endswith("norm.weight"):
        return torch.ones(expected.shape, dtype=dtype, device=device)
    result = torch.empty(math.prod(expected.shape), dtype=dtype, device=device)
    bound = math.sqrt(3) * STANDARD_DEVIATION
    for start in range(0, len(result), _SLICE):
        places = torch.arange(start, min(start + _SLICE, len(result)), dtype=torch.int64, device=device)
        # Products of numbers below 2^32 stay below 2^64, whose low half a signed product has right.
        bits = ((places ^ (places >> 32)) + (seed + 1) * 0x85EBCA6B) & _MASK
        for shift in (16, 15, 16):
            bits = ((bits ^ (bits >> shift)) * _MULTIPLIER) & _MASK
        result[start : start + len(places)] = ((bits >> 8).to(torch.float32) * (2 * bound / (1 << 24)) - bound).to(dtype)
    return result.view(expected.shape)
