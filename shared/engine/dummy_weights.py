"""Weights that mean nothing, for speed measurements: the same numbers on every device, from an integer hash of their place."""

from __future__ import annotations

import math

import torch

from shared.model_files.weight_names import ExpectedWeight

STANDARD_DEVIATION = 0.02
_SLICES = {"cuda": 1 << 22, "cpu": 1 << 18}
"""Items at a time: a dozen passes over what stays in the cache."""
_MULTIPLIER = 0x9E3779B1
_SEED_STEP = 0x85EBCA6B


def dummy_weight(expected: ExpectedWeight, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Ones for a norm, else uniform with mean 0. `seed`: the weight's number in the model."""
    if expected.name.endswith("norm.weight"):
        return torch.ones(expected.shape, dtype=dtype, device=device)
    result = torch.empty(math.prod(expected.shape), dtype=dtype, device=device)
    bound = math.sqrt(3) * STANDARD_DEVIATION
    size = min(len(result), _SLICES[device.type])
    # 32 bits that wrap around, in numbers that have a sign; to shift one to the right is to fill it with zeros.
    places = torch.arange(size, dtype=torch.int32, device=device)
    bits, shifted, floats = torch.empty_like(places), torch.empty_like(places), torch.empty(size, device=device)
    for start in range(0, len(result), size):
        torch.add(places, _signed(start + (seed + 1) * _SEED_STEP), out=bits)
        for shift in (16, 15, 16):
            torch.bitwise_right_shift(bits, shift, out=shifted)
            bits.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(_MULTIPLIER))
        torch.bitwise_right_shift(bits, 8, out=shifted)
        floats.copy_(shifted.bitwise_and_((1 << 24) - 1)).mul_(2 * bound / (1 << 24)).sub_(bound)
        part = result[start : start + size]
        part.copy_(floats[: len(part)])
    return result.view(expected.shape)


def _signed(number: int) -> int:
    """The int32 with the same low 32 bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
