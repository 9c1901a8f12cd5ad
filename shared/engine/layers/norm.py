"""RMS norms (Zhang & Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.rms_norm import rms_norm

Norm = Callable[[torch.Tensor], torch.Tensor]
"""[..., size] -> the same shape and type."""
NormFactory = Callable[[torch.Tensor, float], Norm]
"""From a checkpoint's weight and eps."""


@dataclass(frozen=True)
class RMSNorm:
    weight: torch.Tensor  # [size]
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2:
            return rms_norm(x, self.weight, self.eps)
        return rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


class UnitOffsetRMSNorm:
    """Gemma's: the checkpoint holds the weight less 1, and the product is formed in fp32 before it is rounded."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = 1.0 + weight.float(), eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self._weight.shape, self._weight, self._eps).to(x.dtype)
