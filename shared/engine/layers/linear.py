"""Linear layers of the models: how their weights are stored is known here and nowhere else.

In an fp32 engine on the CPU weights stay as the model file has them and are expanded in registers (kernels/cpu_linear.py). Elsewhere,
and without a C++ compiler, they are tensors of the engine's type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.cpu_linear import PackedWeight, StoredRows
from kernels.silu_and_mul import silu_and_mul
from shared.engine.layers.norm import Norm


class Weights(dict[str, torch.Tensor]):
    """Hugging Face's name -> tensor. A model takes out what it uses, so that memory is not held twice.

    `stored`: those of linear layers and embeddings that are not tensors here but rows of a file, for `take_linear` and `take_embedding`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, StoredRows] | None = None) -> None:
        super().__init__(tensors)
        self.stored = dict(stored or {})


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
    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None = None  # [out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self(norm(x))

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return silu_and_mul(self(norm(x)))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        if residual.is_cuda and self.bias is None:
            residual.addmm_(x, self.weight.t())  # in the product's own kernel, before its sum is rounded
        else:
            residual += self(x)


@dataclass(frozen=True)
class PackedLinear:
    weights: Sequence[PackedWeight]  # their outputs side by side: one for each format
    biases: Sequence[torch.Tensor | None]  # one for each weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), sum(weight.shape[0] for weight in self.weights))
        if len(self.weights) == 1:
            self.weights[0].linear(x, out, self.biases[0])
            return out
        columns = torch.split(out, [weight.shape[0] for weight in self.weights], dim=1)
        for weight, bias, part in zip(self.weights, self.biases, columns, strict=True):
            weight.linear(x, part, bias)
        return out

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self(norm(x))

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return silu_and_mul(self(norm(x)))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        residual += self(x)


def take_linear(weights: Weights, names: Sequence[str]) -> Linear:
    """One layer from the projections `names` that read the same input, their outputs side by side."""
    biases = [weights.pop(f"{name}.bias") for name in names if f"{name}.bias" in weights]
    assert len(biases) in (0, len(names)), f"some of {names} have a bias and some have none"
    bias = torch.cat(biases) if biases else None
    if f"{names[0]}.weight" not in weights.stored:
        parts = [weights.pop(f"{name}.weight") for name in names]
        return DenseLinear(_joined(parts), bias)
    stored = [weights.stored.pop(f"{name}.weight") for name in names]
    packed = [PackedWeight.pack(list(parts)) for _, parts in groupby(stored, key=lambda rows: rows.type_name)]
    sizes = [weight.shape[0] for weight in packed]
    return PackedLinear(packed, [None] * len(packed) if bias is None else torch.split(bias, sizes))


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
