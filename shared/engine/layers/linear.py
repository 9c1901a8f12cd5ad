"""Linear layers of the models: how their weights are stored is known here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

Weights = dict[str, torch.Tensor]
"""Hugging Face's name -> tensor. A model takes out what it uses, so that memory is not held twice."""


@dataclass(frozen=True)
class Linear:
    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None = None  # [out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]."""
        return F.linear(x, self.weight, self.bias)


def take_linear(weights: Weights, names: Sequence[str]) -> Linear:
    """One layer from the projections `names` that read the same input, their outputs side by side."""
    parts = [weights.pop(f"{name}.weight") for name in names]
    biases = [weights.pop(f"{name}.bias") for name in names if f"{name}.bias" in weights]
    assert len(biases) in (0, len(names)), f"some of {names} have a bias and some have none"
    return Linear(_joined(parts), torch.cat(biases) if biases else None)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix of the rows of all; no copy where they lie one after the other, as loading leaves them."""
    first, size = parts[0], parts[0].shape[1]
    ends = accumulate((part.numel() for part in parts), initial=first.storage_offset())
    if all(
        part.is_contiguous() and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.storage_offset() == end
        for part, end in zip(parts, ends, strict=False)
    ):
        return first.as_strided((sum(len(part) for part in parts), size), (size, 1))
    return torch.cat(list(parts))
