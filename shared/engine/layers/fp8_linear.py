"""Linear layers with weights in E4M3 and a factor for each output: half the memory of 16-bit weights, and half the time to read them.

On a Hopper GPU or a later one a bf16 engine multiplies in FP8, with activations quantised row by row as they come. Elsewhere weights are
expanded for each product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.quantize_rows import quantize_rows
from kernels.silu_and_mul import silu_and_mul
from shared.engine.layers.adjacent_rows import joined_rows
from shared.engine.layers.norm import Norm

_ALIGNMENT = 16
"""Both sides of a matrix must be multiples of it for the FP8 product."""


@dataclass(frozen=True)
class FP8Weight:
    values: torch.Tensor  # [out_features, in_features] E4M3
    factors: torch.Tensor  # [out_features, 1] fp32

    @classmethod
    def joined(cls, parts: Sequence[FP8Weight]) -> FP8Weight:
        """The outputs of all, one after the other."""
        return cls(joined_rows([part.values for part in parts]), torch.cat([part.factors for part in parts]))

    def expanded(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.values.float() * self.factors).to(dtype)

    @property
    def is_multiplied_in_fp8(self) -> bool:
        """Where torch has a product with a factor for each row and column."""
        is_aligned = all(size % _ALIGNMENT == 0 for size in self.values.shape)
        return self.values.is_cuda and is_aligned and torch.cuda.get_device_capability(self.values.device) >= (9, 0)


class FP8Linear:
    def __init__(self, weight: FP8Weight, bias: torch.Tensor | None = None) -> None:
        """bias: [out_features]"""
        self._weight, self._bias = weight, bias
        self._is_fast = weight.is_multiplied_in_fp8
        self._column_factors = weight.factors.view(1, -1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]"""
        if not (self._is_fast and x.dtype is torch.bfloat16):
            return F.linear(x, self._weight.expanded(x.dtype), self._bias)
        values, row_factors = quantize_rows(x)
        out = torch._scaled_mm(
            values, self._weight.values.t(), row_factors, self._column_factors, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return out if self._bias is None else out + self._bias

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self(norm(x))

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return silu_and_mul(self(norm(x)))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        residual += self(x)
