"""The gated feed-forward part (Shazeer 2020): down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.silu_and_mul import silu_and_mul
from shared.engine.layers.linear import Linear, Weights, take_linear
from shared.engine.layers.norm import Norm

GatedActivation = Callable[[torch.Tensor], torch.Tensor]
"""[num_tokens, 2 * size] = [gate | up] -> [num_tokens, size]."""


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, by the approximation with tanh."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@dataclass(frozen=True)
class GatedMLP:
    gate_up: Linear
    down: Linear
    activation: GatedActivation = silu_and_mul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size] -> the same shape."""
        return self.down(self.activation(self.gate_up(x)))

    def add_normed(self, residual: torch.Tensor, norm: Norm) -> None:
        is_silu = self.activation is silu_and_mul
        self.down.add_to(residual, self.gate_up.gated(residual, norm) if is_silu else self.activation(self.gate_up.normed(residual, norm)))


def take_gated_mlp(
    weights: Weights,
    prefix: str,
    gate_up: Sequence[str] = ("gate_proj", "up_proj"),
    down: str = "down_proj",
    activation: GatedActivation = silu_and_mul,
) -> GatedMLP:
    """`gate_up`, `down`: as the checkpoint calls them, after `prefix`."""
    projections = take_linear(weights, [f"{prefix}.{name}" for name in gate_up])
    return GatedMLP(projections, take_linear(weights, [f"{prefix}.{down}"]), activation)
