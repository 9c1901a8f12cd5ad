"""Linear layers on the CPU from weights as files store them, against fp64 products of the dequantised values."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kernels import cpu_linear
from kernels.build import find_cxx
from kernels.cpu_linear import FORMATS, PackedWeight, StoredRows
from shared.model_files.dequantize import TENSOR_TYPES, dequantize
from shared.model_files.stored_tensor import StoredTensor

pytestmark = pytest.mark.skipif(find_cxx() is None, reason="no C++ compiler")

HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}
"""Where a block has its fp16 numbers."""
GROUPS = {"Q4_0": 32, "Q4_1": 32, "Q8_0": 32, "Q4_K": 32, "Q6_K": 16}
"""Inputs that have a scale together."""
WAYS = [*FORMATS, *(f"{name} int16" for name in GROUPS)]
"""To multiply with a weight."""


@pytest.fixture(autouse=True)
def _kernel() -> None:
    assert cpu_linear.prepare()


def stored_rows(way: str, num_outputs: int, num_inputs: int, seed: int = 0) -> StoredRows:
    """Every quant and scale there can be, with block scales of either sign. `way`: one of WAYS."""
    type_name, is_int16 = way.removesuffix(" int16"), way.endswith(" int16")
    rng = np.random.default_rng(seed)
    if type_name in ("F32", "F16", "BF16"):
        values = torch.from_numpy(rng.normal(0, 1, (num_outputs, num_inputs)))
        typed = values.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type_name])
        return StoredRows(type_name, typed.view(torch.uint8).numpy().reshape(-1), (num_outputs, num_inputs))
    kind = TENSOR_TYPES[type_name]
    blocks = rng.integers(0, 256, (num_outputs * num_inputs // kind.block_size, kind.block_bytes), dtype=np.uint8)
    for place in HALVES[type_name]:
        scales = rng.normal(0, 0.05, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8)
    return StoredRows(type_name, blocks.reshape(-1), (num_outputs, num_inputs), is_int16=is_int16)


def values_of(rows: StoredRows) -> torch.Tensor:
    values = torch.from_numpy(dequantize(StoredTensor("w", rows.shape, rows.type_name, rows.data)))
    return values if rows.row_order is None else values[torch.from_numpy(rows.row_order)]


def linear(weight: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(x), weight.shape[0]), float("nan"))
    weight.linear(x, out, bias)
    return out


def inputs(num_rows: int, size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed))


def whole_inputs(num_rows: int, size: int, seed: int = 1) -> torch.Tensor:
    """Inputs that are not changed by being rounded to 16 bits: of each 16 the largest is 32767 times a power of two, and
    the others are multiples of that power."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-32767, 32768, (num_rows, size), generator=generator).float()
    steps[:, ::16] = 32767 * torch.randn(num_rows, (size + 15) // 16, generator=generator).sign()
    return steps * 2.0 ** torch.randint(-20, -10, (num_rows, 1), generator=generator)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_outputs", [1, 50, 96])
def test_each_format_gives_the_fp64_product_of_the_files_values(way: str, num_outputs: int) -> None:
    rows = stored_rows(way, num_outputs, 512)
    weight, values = PackedWeight.pack([rows]), values_of(rows).double()
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 13, 97, 200):
        x = whole_inputs(num_rows, 512) if rows.is_int16 else inputs(num_rows, 512)
        wanted, scale = x.double() @ values.T, x.double().abs() @ values.abs().T
        error = (linear(weight, x).double() - wanted).abs()
        assert not num_rows or float((error / scale).max()) < 1e-6, f"{num_rows} rows"


@pytest.mark.parametrize("type_name", GROUPS)
def test_inputs_of_16_bits_lose_at_most_half_a_32767th_of_the_largest_of_their_group(type_name: str) -> None:
    rows = stored_rows(f"{type_name} int16", 64, 512)
    values, x = values_of(rows).double(), inputs(20, 512) * torch.logspace(-6, 6, 512)
    groups = x.double().view(20, -1, GROUPS[type_name])
    lost = (groups.abs().amax(-1, keepdim=True) / 65534).expand_as(groups).reshape(x.shape)
    bound = lost @ values.abs().T + 1e-6 * (x.double().abs() @ values.abs().T)
    assert bool(((linear(PackedWeight.pack([rows]), x).double() - x.double() @ values.T).abs() <= bound).all())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_inputs_of_any_size_are_multiplied_and_what_is_no_number_stays_none(way: str, num_rows: int) -> None:
    rows = stored_rows(way, 40, 256)
    weight, values = PackedWeight.pack([rows]), values_of(rows).double()
    assert not linear(weight, torch.zeros(num_rows, 256)).any()
    for size in (2.0**-90, 2.0**90):
        x = whole_inputs(num_rows, 256) * size
        wanted, scale = x.double() @ values.T, x.double().abs() @ values.abs().T
        assert float(((linear(weight, x).double() - wanted).abs() / scale).max()) < 1e-6
    assert float(linear(weight, torch.full((num_rows, 256), 1e-40)).abs().max()) < 1e-36
    for wrong in (float("nan"), float("inf"), -float("inf")):
        x = inputs(num_rows, 256)
        x[0, 37] = wrong
        result = linear(weight, x)
        assert not result[0].isfinite().any() and bool(result[1:].isfinite().all())


@pytest.mark.parametrize("type_name", FORMATS)
def test_unpacked_rows_are_the_files_values_bit_for_bit(type_name: str) -> None:
    rows = stored_rows(type_name, 70, 256)
    order = torch.tensor([3, 69, 0, 3, 31, 32, 33])
    assert torch.equal(PackedWeight.pack([rows]).rows(order), values_of(rows)[order])


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_how_a_weight_is_stored_changes_no_bit_of_the_result(type_name: str) -> None:
    rows = stored_rows(type_name, 64, 768)
    plain = StoredRows("F32", values_of(rows).numpy().reshape(-1).view(np.uint8), rows.shape)
    for num_rows in (1, 3, 40):
        x = inputs(num_rows, 768)
        assert torch.equal(linear(PackedWeight.pack([rows]), x), linear(PackedWeight.pack([plain]), x))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("way", ["F16", "Q4_1", "Q8_0", "Q4_1 int16", "Q8_0 int16"])
def test_a_row_does_not_depend_on_its_batch_or_the_threads(way: str, num_threads: int) -> None:
    weight, x = PackedWeight.pack([stored_rows(way, 200, 576)]), inputs(250, 576)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([linear(weight, x[i : i + 1]) for i in range(len(x))])
        torch.set_num_threads(num_threads)
        for num_rows in (1, 2, 3, 4, 5, 6, 7, 12, 16, 96, 133, 250):
            assert torch.equal(linear(weight, x[:num_rows]), alone[:num_rows]), f"{num_rows} rows"
    finally:
        torch.set_num_threads(before)


def test_parts_lie_side_by_side_in_the_order_asked_for() -> None:
    reversed_rows = StoredRows(*_fields(stored_rows("Q8_0", 40, 64, seed=3)), row_order=np.arange(40)[::-1].copy())
    parts = [stored_rows("Q8_0", 33, 64), reversed_rows]
    x, bias = whole_inputs(3, 64), inputs(1, 73, seed=5)[0]
    wanted = x.double() @ torch.cat([values_of(part) for part in parts]).double().T + bias
    torch.testing.assert_close(linear(PackedWeight.pack(parts), x, bias).double(), wanted, atol=1e-4, rtol=1e-5)


def _fields(rows: StoredRows) -> tuple[str, np.ndarray, tuple[int, int]]:
    return rows.type_name, rows.data, rows.shape


def test_the_leading_outputs_share_the_memory_and_nothing_is_written_past_them() -> None:
    weight, x = PackedWeight.pack([stored_rows("Q4_0", 64, 64)]), inputs(7, 64)
    wide = torch.full((7, 60), 5.0)
    weight.leading(50).linear(x, wide[:, :50])
    assert torch.equal(wide[:, :50], linear(weight, x)[:, :50]) and bool((wide[:, 50:] == 5.0).all())
    assert weight.leading(50)._panels.data_ptr() == weight._panels.data_ptr()


def test_strided_rows_are_read_and_written_in_place() -> None:
    weight, x, out = PackedWeight.pack([stored_rows("F16", 32, 64)]), inputs(9, 160), torch.zeros(9, 100)
    weight.linear(x[:, 32:96], out[:, 10:42])
    assert torch.equal(out[:, 10:42], linear(weight, x[:, 32:96].contiguous()))
    assert not out[:, :10].any() and not out[:, 42:].any()


@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_a_result_can_be_added_to_what_is_there(num_rows: int) -> None:
    weight = PackedWeight.pack([stored_rows("Q8_0", 37, 64)])
    x, bias, before = inputs(num_rows, 64), inputs(1, 37)[0], inputs(num_rows, 37, seed=2)
    added = before.clone()
    weight.linear(x, added, bias, is_added=True)
    assert torch.equal(added, before + linear(weight, x, bias))


def test_a_packed_weight_takes_no_more_memory_than_the_file() -> None:
    for type_name in ("Q4_0", "Q4_1", "Q8_0", "F16"):
        rows = stored_rows(type_name, 192, 512)
        assert PackedWeight.pack([rows]).nbytes == len(rows.data)


def test_threads_that_compute_at_once_do_not_disturb_each_other() -> None:
    weight, x = PackedWeight.pack([stored_rows("Q4_1", 1536, 576)]), inputs(8, 576)
    wanted, wrong = linear(weight, x), []

    def compute() -> None:
        wrong.extend(i for i in range(100) if not torch.equal(linear(weight, x), wanted))

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_what_does_not_fit_is_refused() -> None:
    weight = PackedWeight.pack([stored_rows("Q8_0", 32, 64)])
    x, out = torch.zeros(2, 64), torch.zeros(2, 32)
    for wrong in (x.double(), x[:, :32], x.t().contiguous().t()):
        with pytest.raises(ValueError, match="x must be float32"):
            weight.linear(wrong, out)
    with pytest.raises(ValueError, match="out must be float32"):
        weight.linear(x, out[:1])
    with pytest.raises(ValueError, match="bias must be contiguous float32"):
        weight.linear(x, out, torch.zeros(31))
    with pytest.raises(ValueError, match="whole Q8_0 blocks"):
        PackedWeight("Q8_0", (4, 40))
    with pytest.raises(ValueError, match="one format"):
        PackedWeight.pack([stored_rows("Q8_0", 4, 64), stored_rows("F16", 4, 64)])
    for index in (-1, 32):
        with pytest.raises(IndexError, match="0 to 31"):
            weight.rows(torch.tensor([index]))
