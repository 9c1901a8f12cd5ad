"""Products of few rows on the GPU: against fp64 on the CPU, against the separate ops, and that a row does not depend on the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.rms_norm import rms_norm
from kernels.silu_and_mul import silu_and_mul
from kernels.skinny_linear import MAX_NORM_ROWS, MAX_ROWS, can_serve, choose, skinny_linear, skinny_linear_add

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for Hopper GPUs"
    ),
]
STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
SIZES = [
    (8, 8), (8, 64), (16, 72), (72, 56), (64, 64), (200, 576), (576, 1536), (960, 576), (1000, 1000), (136, 4104), (4096, 4096),
    (512, 14336),
    (12808, 2120), (6144, 4096),
]  # fmt: skip


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors hold NaN, so that an output nobody wrote shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))


def assert_near(out: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, steps: float = 1.0) -> None:
    """`scale`: what the terms of a sum amount to; an fp32 sum of them is wrong by less than 1e-5 of that."""
    error = (out.double().cpu() - wanted).abs()
    assert not out.isnan().any()
    assert (error <= steps * STEP[dtype] * wanted.abs() + 1e-5 * scale).all(), error.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
def test_it_equals_fp64(num_outputs: int, num_inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = randn(num_outputs, num_inputs, dtype=dtype, seed=1), randn(num_outputs, dtype=dtype, seed=2)
    rows = randn(32, num_inputs, dtype=dtype, seed=3)
    exact = rows.cpu().double() @ weight.cpu().double().T
    scale = rows.cpu().double().abs() @ weight.cpu().double().abs().T
    poison(monkeypatch)
    for num_rows in (1, 2, 7, 8, 9, 16, 17, 32):
        if choose(num_rows, num_outputs, num_inputs) is None:
            continue
        assert can_serve(rows[:num_rows], weight)
        assert_near(skinny_linear(rows[:num_rows], weight), exact[:num_rows], scale[:num_rows], dtype)
        with_bias = skinny_linear(rows[:num_rows], weight, bias)
        assert_near(with_bias, exact[:num_rows] + bias.cpu().double(), scale[:num_rows], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
def test_options_equal_the_separate_ops(num_outputs: int, num_inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, norm_weight = randn(num_outputs, num_inputs, dtype=dtype, seed=1) / num_inputs**0.5, randn(num_inputs, dtype=dtype, seed=2)
    rows, before = randn(32, num_inputs, dtype=dtype, seed=3) * 3, randn(32, num_outputs, dtype=dtype, seed=4)
    bias = randn(num_outputs, dtype=dtype, seed=5)
    for num_rows in (1, 3, 8, 13, 32):
        if choose(num_rows, num_outputs, num_inputs) is None:
            continue
        x = rows[:num_rows]
        normed = rms_norm(x, norm_weight, 1e-5)
        with monkeypatch.context() as patch:
            poison(patch)
            plain, fused = skinny_linear(x, weight), skinny_linear(x, weight, norm_weight=norm_weight, eps=1e-5)
            gated, gated_with_bias = skinny_linear(x, weight, silu=True), skinny_linear(x, weight, bias, silu=True)
            normed_and_gated = skinny_linear(x, weight, norm_weight=norm_weight, eps=1e-5, silu=True)
        # The two sums of squares differ in order, so that an item of the normalised x may be its neighbour.
        scale = normed.double().abs().cpu() @ weight.double().abs().cpu().T
        assert_near(fused, (normed.double() @ weight.double().T).cpu(), scale * (1 + STEP[dtype] / 1e-5 / num_inputs**0.5), dtype)
        assert torch.equal(gated, silu_and_mul(plain))
        assert torch.equal(gated_with_bias, silu_and_mul(skinny_linear(x, weight, bias)))
        assert torch.equal(normed_and_gated, silu_and_mul(fused))
        residual = before[:num_rows].clone()
        skinny_linear_add(residual, x, weight)
        assert torch.equal(residual, before[:num_rows] + plain)
        skinny_linear_add(residual, x, weight, bias)
        assert torch.equal(residual, before[:num_rows] + plain + skinny_linear(x, weight, bias))


def test_norm_before_equals_the_norm_of_its_own_in_nearly_every_bit() -> None:
    x, norm_weight = randn(MAX_NORM_ROWS, 4096, dtype=torch.bfloat16, seed=1) * 5, randn(4096, dtype=torch.bfloat16, seed=2)
    weight = torch.eye(4096, dtype=torch.bfloat16, device="cuda")
    assert can_serve(x, weight, norm_weight=norm_weight)
    differ = skinny_linear(x, weight, norm_weight=norm_weight, eps=1e-5) != rms_norm(x, norm_weight, 1e-5)
    assert differ.float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(4096, 4096), (576, 1536), (12808, 2120), (4096, 14336), (6144, 4096)])
def test_a_row_does_not_depend_on_the_others(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    weight, rows = randn(num_outputs, num_inputs, dtype=dtype, seed=1), randn(MAX_ROWS, num_inputs, dtype=dtype, seed=3)
    assert can_serve(rows, weight)
    wanted = torch.cat([skinny_linear(row[None], weight) for row in rows])
    for num_rows in range(1, MAX_ROWS + 1):
        assert torch.equal(skinny_linear(rows[:num_rows], weight), wanted[:num_rows]), num_rows
        assert torch.equal(skinny_linear(rows[-num_rows:], weight), wanted[-num_rows:]), num_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(6144, 4096), (28672, 4096), (960, 576), (12808, 2120)])
def test_a_normalised_row_does_not_depend_on_the_others(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    weight, norm_weight = randn(num_outputs, num_inputs, dtype=dtype, seed=1), randn(num_inputs, dtype=dtype, seed=2)
    rows, silu = randn(MAX_NORM_ROWS, num_inputs, dtype=dtype, seed=3), num_outputs == 28672
    assert can_serve(rows, weight, norm_weight=norm_weight, silu=silu)
    options = {"norm_weight": norm_weight, "eps": 1e-5, "silu": silu}
    wanted = torch.cat([skinny_linear(row[None], weight, **options) for row in rows])
    for num_rows in range(1, MAX_NORM_ROWS + 1):
        assert torch.equal(skinny_linear(rows[-num_rows:], weight, **options), wanted[-num_rows:]), num_rows


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(12808, 2120), (4096, 14336)])
def test_it_gives_the_same_bits_every_time(num_outputs: int, num_inputs: int) -> None:
    """Blocks and warpgroups run ahead of each other by chance; none may take what is not there yet."""
    weight, x = randn(num_outputs, num_inputs, dtype=torch.bfloat16, seed=1), randn(32, num_inputs, dtype=torch.bfloat16, seed=2)
    wanted = skinny_linear(x, weight)
    for _ in range(300):
        outs = [skinny_linear(x, weight, overlap=True) for _ in range(3)]
        assert all(torch.equal(out, wanted) for out in outs)


def test_a_row_of_nan_or_infinity_stays_alone() -> None:
    x, weight = randn(9, 576, dtype=torch.bfloat16, seed=1), randn(960, 576, dtype=torch.bfloat16, seed=2)
    wanted = skinny_linear(x, weight)
    x[3], x[5, 7] = float("nan"), float("inf")
    out = skinny_linear(x, weight)
    good = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(out[good], wanted[good])
    assert out[3].isnan().all()
    assert not out[5].isfinite().any()


def test_rows_of_wider_tensors_and_what_stands_beside_them() -> None:
    wide, weight = randn(5, 1200, dtype=torch.bfloat16, seed=1), randn(136, 576, dtype=torch.bfloat16, seed=2)
    x = wide[:, 32:608]
    assert can_serve(x, weight)
    assert torch.equal(skinny_linear(x, weight), skinny_linear(x.contiguous(), weight))
    residual = wide.clone()
    skinny_linear_add(residual[:, 608:744], x, weight)
    assert torch.equal(residual[:, 608:744], wide[:, 608:744] + skinny_linear(x, weight))
    assert torch.equal(residual[:, :608], wide[:, :608])
    assert torch.equal(residual[:, 744:], wide[:, 744:])


def test_what_the_kernel_does_not_take_is_done_by_the_separate_ops() -> None:
    for shape in ((33, 64, 128), (3, 60, 128), (3, 64, 100)):
        x, weight = randn(shape[0], shape[2], dtype=torch.bfloat16, seed=1), randn(shape[1], shape[2], dtype=torch.bfloat16, seed=2)
        assert not can_serve(x, weight)
        assert torch.equal(skinny_linear(x, weight), F.linear(x, weight))
    wide = randn(3, 130, dtype=torch.bfloat16, seed=1)
    assert not can_serve(wide[:, 1:129], weight := randn(64, 128, dtype=torch.bfloat16, seed=2))
    assert torch.equal(skinny_linear(wide[:, 1:129], weight), F.linear(wide[:, 1:129], weight))
    x = randn(3, 128, dtype=torch.float32, seed=1)
    assert torch.equal(skinny_linear(x, weight.float()), F.linear(x, weight.float()))


@pytest.mark.parametrize("overlap", [False, True])
def test_layers_in_a_graph_equal_the_ops_one_by_one(overlap: bool) -> None:
    """A chain in which each kernel reads what the one before wrote: overlapped, each must still wait for it."""
    weights = [randn(1024, 1024, dtype=torch.bfloat16, seed=seed) / 32 for seed in range(6)]
    norm_weight, start = randn(1024, dtype=torch.bfloat16, seed=7), randn(4, 1024, dtype=torch.bfloat16, seed=8)

    def layers(x: torch.Tensor, overlap: bool) -> None:
        for first, second in zip(weights[::2], weights[1::2], strict=True):
            hidden = skinny_linear(x, first, norm_weight=norm_weight, eps=1e-5, overlap=overlap)
            skinny_linear_add(x, hidden, second, overlap=overlap)

    wanted = start.clone()
    for first, second in zip(weights[::2], weights[1::2], strict=True):
        hidden = skinny_linear(wanted, first, norm_weight=norm_weight, eps=1e-5)
        torch.cuda.synchronize()
        skinny_linear_add(wanted, hidden, second)
        torch.cuda.synchronize()
    x = start.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(x, overlap)
    for _ in range(50):
        x.copy_(start)
        graph.replay()
        assert torch.equal(x, wanted)
