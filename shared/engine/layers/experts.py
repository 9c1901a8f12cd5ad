"""A mixture of experts (Shazeer et al. 2017): each token goes through the few feed-forward parts its router likes best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.engine.layers.gated_mlp import GatedMLP, take_gated_mlp
from shared.engine.layers.linear import Linear, Weights, take_linear
from shared.engine.layers.norm import Norm
from shared.model_files.model_config import ExpertsConfig


@dataclass(frozen=True)
class Experts:
    router: Linear  # [num_experts, hidden_size]
    experts: Sequence[GatedMLP]
    num_experts_per_token: int
    is_normalized: bool
    """The weights of a token's experts are scaled to a sum of 1."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size] -> the same shape. Tokens are grouped by expert, so that each weight is read once."""
        shares, chosen = self.router(x).float().softmax(-1).topk(self.num_experts_per_token, dim=-1)
        if self.is_normalized:
            shares = shares / shares.sum(-1, keepdim=True)
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert // self.num_experts_per_token
        factors = shares.to(x.dtype).flatten()[by_expert, None]
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        out = torch.zeros_like(x)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                rows = tokens[start : start + count]
                out.index_add_(0, rows, expert(x[rows]) * factors[start : start + count])
                start += count
        return out

    def add_normed(self, residual: torch.Tensor, norm: Norm) -> None:
        residual += self(norm(residual))


def take_experts(
    weights: Weights, config: ExpertsConfig, prefix: str, gate_up: Sequence[str] = ("gate_proj", "up_proj"), down: str = "down_proj"
) -> Experts:
    """`gate_up`, `down`: an expert's projections, as the checkpoint calls them."""
    return Experts(
        router=take_linear(weights, [f"{prefix}.gate"]),
        experts=[take_gated_mlp(weights, f"{prefix}.experts.{i}", gate_up, down) for i in range(config.num_experts)],
        num_experts_per_token=config.num_experts_per_token,
        is_normalized=config.is_normalized,
    )
