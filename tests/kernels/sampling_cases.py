"""Rows of logits and parameters that sampling must get right: awkward sizes, ties, flat rows, values that are not numbers."""

from __future__ import annotations

import random

import torch

from kernels.row_parameters import row_parameters

AWKWARD_SIZES = [1, 2, 5, 17, 128, 511, 512, 513, 1000, 4099, 49152]
KINDS = ["normal", "flat", "ties", "sorted", "with -inf and nan", "with inf", "nothing finite", "signed zeros", "peaked", "nearly flat"]


def make_logits(kind: str, num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """fp32 [num_rows, vocab_size]."""
    x = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    if kind == "flat":
        x.fill_(1.25)
    elif kind == "ties":
        x.round_()
    elif kind == "sorted":
        x = x.sort(dim=-1, descending=True).values
    elif kind == "with -inf and nan":
        x[:, ::3] = float("-inf")
        x[:, 1::7] = float("nan")
    elif kind == "with inf":
        x[:, vocab_size // 2] = float("inf")
    elif kind == "nothing finite":
        x.fill_(float("-inf"))
        x[:, ::2] = float("nan")
    elif kind == "signed zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "peaked":
        x *= 5
    elif kind == "nearly flat":
        x *= 1e-6
    return x


def make_parameters(num_rows: int, seed: int) -> torch.Tensor:
    """int64 [num_rows, 7]: every combination of filters turns up."""
    draw = random.Random(seed)
    return torch.tensor(
        [
            row_parameters(
                temperature=draw.choice([0.0, 1e-5, 0.3, 1.0, 1.0, 2.0, 8.0, 1e9]),
                top_k=draw.choice([0, 0, 1, 5, 50, 50, 300, 1000, 1025, 3000, 10**6]),
                top_p=draw.choice([1.0, 1.0, 0.9, 0.5, 1e-9, 0.999]),
                min_p=draw.choice([0.0, 0.0, 0.0, 0.1, 0.001, 1.0]),
                seed=draw.getrandbits(64),
                sequence_index=draw.randrange(4),
                position=draw.randrange(2**34),
            )
            for _ in range(num_rows)
        ]
    )
