"""Linear layers of the models: how their weights are stored is known here and nowhere else.

In an fp32 engine on the CPU weights stay as the model file has them and are expanded in registers (kernels/cpu_linear.py). Elsewhere,
and without a C++ compiler, they are tensors of the engine's type, or where it is asked for FP8 (layers/fp8_linear.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.cpu_linear import PackedWeight, StoredRows
from kernels.silu_and_mul import silu_and_mul
from kernels.skinny_linear import can_serve, skinny_linear, skinny_linear_add
from shared.engine.layers.adjacent_rows import joined_rows
from shared.engine.layers.fp8_linear import FP8Linear, FP8Weight
from shared.engine.layers.norm import Norm, RMSNorm


class Weights(dict[str, torch.Tensor]):
    """Hugging Face's name -> tensor. A model takes out what it uses, so that memory is not held twice.

    `stored`: those of linear layers and embeddings that are not tensors here but rows of a file, for `take_linear` and `take_embedding`.
    `fp8`: those of linear layers that are quantised."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        stored: Mapping[str, StoredRows] | None = None,
        fp8: Mapping[str, FP8Weight] | None = None,
    ) -> None:
        super().__init__(tensors)
        self.stored = dict(stored or {})
        self.fp8 = dict(fp8 or {})

    @property
    def names(self) -> list[str]:
        return [*self, *self.stored, *self.fp8]


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]."""

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """self(norm(x))."""

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """silu_and_mul(self(norm(x))): [num_tokens, out_features / 2]."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual += self(x), in place."""


@dataclass(frozen=True)
class DenseLinear:
    """Few rows go to a kernel of ours where it is faster, with norm, activation and residual addition inside (kernels/skinny_linear.py)."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None = None  # [out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and can_serve(x, self.weight):
            return skinny_linear(x, self.weight, self.bias, overlap=True)
        return F.linear(x, self.weight, self.bias)

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if x.is_cuda and isinstance(norm, RMSNorm) and can_serve(x, self.weight, norm_weight=norm.weight):
            return skinny_linear(x, self.weight, self.bias, norm_weight=norm.weight, eps=norm.eps, overlap=True)
        return self(norm(x))

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if x.is_cuda and isinstance(norm, RMSNorm) and can_serve(x, self.weight, norm_weight=norm.weight, silu=True):
            return skinny_linear(x, self.weight, self.bias, norm_weight=norm.weight, eps=norm.eps, silu=True, overlap=True)
        normed = norm(x)
        if x.is_cuda and can_serve(normed, self.weight, silu=True):
            return skinny_linear(normed, self.weight, self.bias, silu=True, overlap=True)
        return silu_and_mul(F.linear(normed, self.weight, self.bias))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        if residual.is_cuda and can_serve(x, self.weight, residual=residual):
            skinny_linear_add(residual, x, self.weight, self.bias, overlap=True)
        elif residual.is_cuda and self.bias is None:
            residual.addmm_(x, self.weight.t())  # in the product's own kernel, before its sum is rounded
        else:
            residual += self(x)


@dataclass(frozen=True)
class PackedLinear:
    weights: Sequence[PackedWeight]  # their outputs side by side: one for each format
    biases: Sequence[torch.Tensor | None]  # one for each weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), sum(weight.shape[0] for weight in self.weights))
        self._compute(x, out, is_added=False)
        return out

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self(norm(x))

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return silu_and_mul(self(norm(x)))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        self._compute(x, residual, is_added=True)

    def _compute(self, x: torch.Tensor, out: torch.Tensor, is_added: bool) -> None:
        columns = [out] if len(self.weights) == 1 else torch.split(out, [weight.shape[0] for weight in self.weights], dim=1)
        for weight, bias, part in zip(self.weights, self.biases, columns, strict=True):
            weight.linear(x, part, bias, is_added=is_added)


def take_linear(weights: Weights, names: Sequence[str]) -> Linear:
    """One layer from the projections `names` that read the same input, their outputs side by side."""
    biases = [weights.pop(f"{name}.bias") for name in names if f"{name}.bias" in weights]
    assert len(biases) in (0, len(names)), f"some of {names} have a bias and some have none"
    bias = torch.cat(biases) if biases else None
    if f"{names[0]}.weight" in weights.fp8:
        return FP8Linear(FP8Weight.joined([weights.fp8.pop(f"{name}.weight") for name in names]), bias)
    if f"{names[0]}.weight" not in weights.stored:
        parts = [weights.pop(f"{name}.weight") for name in names]
        return DenseLinear(joined_rows(parts), bias)
    stored = [weights.stored.pop(f"{name}.weight") for name in names]
    packed = [PackedWeight.pack(list(parts)) for _, parts in groupby(stored, key=lambda rows: rows.type_name)]
    sizes = [weight.shape[0] for weight in packed]
    return PackedLinear(packed, [None] * len(packed) if bias is None else torch.split(bias, sizes))


class Embedding(Protocol):
    """A table of one row for each token."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]."""

    def head(self, num_rows: int) -> Linear:
        """The layer whose weight are the first rows of this table, in the same memory."""


@dataclass(frozen=True)
class DenseEmbedding:
    weight: torch.Tensor  # [vocab_size, hidden_size]

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)

    def head(self, num_rows: int) -> Linear:
        return DenseLinear(self.weight[:num_rows])


@dataclass(frozen=True)
class PackedEmbedding:
    weight: PackedWeight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.weight.rows(token_ids)

    def head(self, num_rows: int) -> Linear:
        return PackedLinear([self.weight.leading(num_rows)], [None])


def take_embedding(weights: Weights, name: str) -> Embedding:
    """The table `name`, be it that of the tokens or, in a model that does not tie them, of the head."""
    if f"{name}.weight" in weights.stored:
        return PackedEmbedding(PackedWeight.pack([weights.stored.pop(f"{name}.weight")]))
    return DenseEmbedding(weights.pop(f"{name}.weight"))
