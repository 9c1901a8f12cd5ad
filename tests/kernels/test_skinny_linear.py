"""Linear layers of few rows mean the separate ops, and which sizes the kernel takes. tests/kernels/test_skinny_linear_on_gpu.py runs it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.rms_norm import rms_norm
from kernels.silu_and_mul import silu_and_mul
from kernels.skinny_linear import MAX_NORM_ROWS, MAX_ROWS, can_serve, choose, skinny_linear, skinny_linear_add

LAYERS = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (128256, 4096),
    (960, 576),
    (576, 576),
    (3072, 576),
    (576, 1536),
    (49152, 576),
]
"""[N, K] of Llama-3.1-8B, then of SmolLM2-135M."""


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_it_is_norm_linear_and_activation_in_a_row(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = randn(num_rows, 48, seed=1, dtype=dtype), randn(20, 48, seed=2, dtype=dtype)
    bias, norm_weight = randn(20, seed=3, dtype=dtype), randn(48, seed=4, dtype=dtype)
    assert torch.equal(skinny_linear(x, weight), F.linear(x, weight))
    normed = F.linear(rms_norm(x, norm_weight, 1e-5), weight, bias)
    assert torch.equal(skinny_linear(x, weight, bias, norm_weight=norm_weight, eps=1e-5), normed)
    assert torch.equal(skinny_linear(x, weight, bias, norm_weight=norm_weight, eps=1e-5, silu=True), silu_and_mul(normed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_is_rounded_first(dtype: torch.dtype) -> None:
    x, weight, wide = (randn(*shape, seed=1, dtype=dtype) for shape in ((3, 48), (20, 48), (3, 40)))
    wanted = wide[:, 8:28] + F.linear(x, weight)
    skinny_linear_add(wide[:, 8:28], x, weight)
    assert torch.equal(wide[:, 8:28], wanted)
    assert torch.equal(wide[:, 28:], randn(3, 40, seed=1, dtype=dtype)[:, 28:])


def test_ops_have_shapes_without_data() -> None:
    x, weight = torch.empty(3, 48, device="meta"), torch.empty(20, 48, device="meta")
    assert skinny_linear(x, weight).shape == (3, 20)
    assert skinny_linear(x, weight, silu=True).shape == (3, 10)
    skinny_linear_add(torch.empty(3, 20, device="meta"), x, weight)


def test_what_does_not_fit_together_is_refused_with_a_reason() -> None:
    x, weight = torch.zeros(3, 48), torch.zeros(20, 48)
    with pytest.raises(ValueError, match=r"weight \[N, K\], not \[3, 48\] and \[20, 40\]"):
        skinny_linear(x, weight[:, :40])
    with pytest.raises(ValueError, match=r"bias must be contiguous \[20\]"):
        skinny_linear(x, weight, torch.zeros(48))
    with pytest.raises(ValueError, match=r"norm_weight must be contiguous \[48\]"):
        skinny_linear(x, weight, norm_weight=torch.zeros(20))
    with pytest.raises(ValueError, match=r"norm_weight must be contiguous \[48\], not \[48\] with strides \(2,\)"):
        skinny_linear(x, weight, norm_weight=torch.zeros(96)[::2])
    with pytest.raises(ValueError, match=r"give torch\.float32 on cpu like x"):
        skinny_linear(x, weight.half())
    with pytest.raises(ValueError, match="even number of rows, not 19"):
        skinny_linear(x, weight[:19], silu=True)
    with pytest.raises(ValueError, match=r"residual must be \[3, 20\]"):
        skinny_linear_add(torch.zeros(3, 48), x, weight)


@pytest.mark.parametrize("options", [{}, {"has_norm": True}, {"silu": True}, {"has_norm": True, "silu": True}], ids=str)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), LAYERS)
def test_the_number_of_rows_changes_no_split_of_the_sum(num_outputs: int, num_inputs: int, options: dict[str, bool]) -> None:
    plans = [choose(num_rows, num_outputs, num_inputs, **options) for num_rows in range(1, MAX_ROWS + 2)]
    assert len(set(plans) - {None}) <= 1
    assert plans[MAX_ROWS] is None
    if options.get("has_norm"):
        assert plans[MAX_NORM_ROWS:] == [None] * (MAX_ROWS + 1 - MAX_NORM_ROWS)
    elif (num_outputs, num_inputs) != LAYERS[-1]:
        assert None not in plans[:MAX_ROWS]


def test_tiles_are_as_high_as_keeps_all_blocks_busy() -> None:
    assert choose(8, 6144, 4096) == (3, 2)
    assert choose(8, 6144, 4096, silu=True) == (2, 2), "a box of gates and one of up"
    assert choose(8, 4096, 4096) == (2, 2)
    assert choose(8, 576, 576) == (2, 4), "few outputs: more blocks to each"


def test_sizes_the_kernel_does_not_take() -> None:
    for size in ((0, 4096, 4096), (MAX_ROWS + 1, 4096, 4096), (1, 4100, 4096), (1, 4096, 4100), (0, 0, 0), (1, 49152, 576)):
        assert choose(*size) is None, size
    assert choose(1, 4096, 16384, has_norm=True) is None
    assert not can_serve(torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16))
