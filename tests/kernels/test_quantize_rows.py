"""Rows as E4M3 with a factor each, on the CPU and on the GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.quantize_rows import quantize_rows

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def rows(num_rows: int, size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    spread = torch.logspace(-4, 3, num_rows)[:, None]  # fp16 has no more
    return (torch.randn(num_rows, size, generator=generator) * spread).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 576, 1000, 4096, 5120, 14336, 16384, 28672])
def test_every_item_comes_back_within_a_sixteenth_of_itself(device: str, size: int, dtype: torch.dtype) -> None:
    x = rows(9, size, dtype, device)
    values, factors = quantize_rows(x)
    assert (values.dtype, values.shape, factors.dtype, factors.shape) == (torch.float8_e4m3fn, x.shape, torch.float32, (9, 1))
    error = (values.double() * factors.double() - x.double()).abs()
    assert bool((error <= x.double().abs() / 16 + factors.double() * 2**-10 * 1.001).all())
    assert values.float().abs().amax(1).tolist() == [448.0] * 9, "the largest item of a row is the largest number of E4M3"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 576, 4096, 14336, 28672])
def test_every_device_gives_the_bits_of_the_reference(device: str, size: int, dtype: torch.dtype) -> None:
    x = rows(33, size, dtype, device)
    values, factors = quantize_rows(x)
    wanted_values, wanted_factors = reference.quantize_rows(x.cpu())
    assert torch.equal(factors.cpu(), wanted_factors)
    assert torch.equal(values.cpu().view(torch.uint8), wanted_values.view(torch.uint8))


def test_rows_of_a_wider_tensor_are_read_where_they_are(device: str) -> None:
    wide = rows(6, 208, torch.float32, device)
    for part in (wide[:, 16:144], wide[:, 3:100]):
        values, factors = quantize_rows(part)
        wanted_values, wanted_factors = quantize_rows(part.contiguous())
        assert torch.equal(values.view(torch.uint8), wanted_values.view(torch.uint8))
        assert torch.equal(factors, wanted_factors)


def test_a_row_of_zeros_or_of_the_smallest_numbers_stays_finite(device: str) -> None:
    x = torch.tensor([[0.0] * 16, [1e-40] * 16, [1e-37] * 16], device=device)
    values, factors = quantize_rows(x)
    assert bool(factors.isfinite().all()) and bool((factors > 0).all())
    assert values[0].float().tolist() == [0.0] * 16
    assert bool((values.float() * factors).isfinite().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_none_and_harms_no_other(device: str, bad: float) -> None:
    x = rows(3, 64, torch.bfloat16, device)
    expected = quantize_rows(x)
    x[1, 17] = bad
    values, factors = quantize_rows(x)
    assert not bool((values[1].float() * factors[1]).isfinite().all())
    for row in (0, 2):
        assert torch.equal(values[row].view(torch.uint8), expected[0][row].view(torch.uint8))
        assert torch.equal(factors[row], expected[1][row])


def test_no_rows_give_none(device: str) -> None:
    values, factors = quantize_rows(torch.empty(0, 64, device=device))
    assert (values.shape, factors.shape) == ((0, 64), (0, 1))


@pytest.mark.parametrize("x", [torch.zeros(4), torch.zeros(4, 4).t()[:, :3].t(), torch.zeros(2, 2, dtype=torch.float64)])
def test_what_has_no_kernel_is_refused(x: torch.Tensor) -> None:
    x = x.t() if x.dim() == 2 and x.dtype is torch.float32 and x.stride(1) == 1 else x
    with pytest.raises(ValueError, match="x "):
        quantize_rows(x)
