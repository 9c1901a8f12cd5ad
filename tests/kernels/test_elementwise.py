"""RMS norm, rotary embedding and the gated activation, on the CPU and on the GPU, against fp64 formulas."""

from __future__ import annotations

import pytest
import torch

from kernels import cpu_rotary_embedding, reference
from kernels.cache_ops import reshape_and_cache
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rotary_embedding import rotary_embedding, rotary_embedding_and_cache
from kernels.silu_and_mul import silu_and_mul

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2, torch.float32: 3e-6}
"""About one and a half steps of the type: the results are rounded once, or twice where the reference path rounds in between."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_near(out: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(out.double().cpu(), wanted.double().cpu(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# ---- RMS norm -------------------------------------------------------------------------------------------------------------
def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 576, 1000, 2048, 4096, 5120, 8192, 11008, 16384, 32768])
def test_norm_equals_the_formula(device: str, size: int, dtype: torch.dtype) -> None:
    x, weight = randn(5, size, dtype=dtype, device=device), randn(size, dtype=dtype, device=device, seed=2)
    assert_near(rms_norm(x, weight, 1e-5), plain_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 576, 1000, 4096, 8192, 32768])
def test_norm_with_residual_equals_the_two_ops_in_a_row(device: str, size: int, dtype: torch.dtype) -> None:
    x, residual = (randn(5, size, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    weight = randn(size, dtype=dtype, device=device, seed=3)
    total = x + residual
    fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_near(x, plain_norm(total, weight, 1e-5), dtype)


def test_rows_of_a_wider_tensor_are_normalised_in_place_of_a_copy(device: str) -> None:
    wide = randn(6, 200, dtype=torch.float32, device=device)
    weight = randn(64, dtype=torch.float32, device=device, seed=2)
    for first in (64, 65):  # a start that allows vector loads, and one that does not
        x = wide[:, first : first + 64]
        assert_near(rms_norm(x, weight, 1e-6), plain_norm(x, weight, 1e-6), torch.float32)
    before = wide.clone()
    residual = randn(6, 200, dtype=torch.float32, device=device, seed=3)
    wanted = plain_norm(wide[:, 64:128] + residual[:, 8:72], weight, 1e-6)
    fused_add_rms_norm(wide[:, 64:128], residual[:, 8:72], weight, 1e-6)
    assert_near(wide[:, 64:128], wanted, torch.float32)
    assert torch.equal(wide[:, :64], before[:, :64])
    assert torch.equal(wide[:, 128:], before[:, 128:])


def test_norm_of_large_numbers_does_not_overflow(device: str) -> None:
    x = torch.full((1, 4096), 6e4, dtype=torch.float16, device=device)
    assert_near(rms_norm(x, torch.ones(4096, dtype=torch.float16, device=device), 1e-5), torch.ones(1, 4096), torch.float16)


# ---- the gated activation -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 8, 100, 1536, 14336])
def test_activation_equals_the_formula(device: str, size: int, dtype: torch.dtype) -> None:
    wide = randn(4, 2 * size + 8, dtype=dtype, device=device) * 4
    for x in (wide[:, : 2 * size], wide[:, 8:].contiguous()):
        gate, up = x.double().chunk(2, -1)
        wanted = gate * torch.sigmoid(gate) * up
        torch.testing.assert_close(
            silu_and_mul(x).double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype] * (1 if device == "cuda" else 2)
        )


def test_activation_of_extreme_gates_is_finite(device: str) -> None:
    x = torch.tensor([[-1e4, 1e4, -88.0, 0.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert silu_and_mul(x).tolist()[0] == pytest.approx([0.0, 1e4, 0.0, 0.0])


# ---- rotary embedding -----------------------------------------------------------------------------------------------------
def tables(rotary_dim: int, device: str, max_positions: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1e4 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), frequencies)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def turned(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As complex numbers, in fp64."""
    half = cos.shape[1]
    x = x.double()
    turn = torch.complex(cos.double(), sin.double())[positions][:, None]
    result = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat([result.real, result.imag, x[..., 2 * half :]], -1)


SHAPES = [(9, 3, 64, 64), (32, 8, 128, 128), (4, 4, 80, 32), (2, 1, 20, 20), (8, 2, 96, 96), (3, 3, 256, 64), (71, 1, 64, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "rotary_dim"), SHAPES)
def test_heads_are_turned_in_place(
    device: str, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    fused = randn(11, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
    before = fused.clone()
    query, key, value = (
        part.view(11, -1, head_dim) for part in fused.split([n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads)], 1)
    )
    positions = torch.randint(0, 300, (11,), generator=torch.Generator().manual_seed(3)).to(device)
    cos, sin = tables(rotary_dim, device)
    wanted = turned(query, positions, cos, sin), turned(key, positions, cos, sin)
    rotary_embedding(query, key, positions, cos, sin)
    assert_near(query, wanted[0], dtype)
    assert_near(key, wanted[1], dtype)
    assert torch.equal(fused[:, -value[0].numel() :], before[:, -value[0].numel() :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "is_classic"),
    [(*shape, False) for shape in SHAPES] + [(*shape, True) for shape in SHAPES if shape[2] % 16 == 0],
)
def test_the_fused_op_equals_rotation_then_cache_write(
    device: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    kv_cache_dtype: str,
    dtype: torch.dtype,
    is_classic: bool,
) -> None:
    stored = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(kv_cache_dtype, dtype)
    fused = randn(11, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
    sizes = [n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads)]
    query, key, value = (part.view(11, -1, head_dim) for part in fused.split(sizes, 1))
    query_after, key_after = query.clone(), key.clone()
    positions = torch.randint(0, 300, (11,), generator=torch.Generator().manual_seed(3)).to(device)
    slots = torch.tensor([5, 77, -1, 0, 16, 15, -1, 32, 79], device=device)  # two rows have none
    cos, sin = tables(rotary_dim, device)
    whole = torch.zeros(5, 2, 2, num_kv_heads, 16, head_dim).to(stored).to(device)
    caches = [whole[:, 1, 0], whole[:, 1, 1]]
    if is_classic:
        caches = list(reference.to_classic_layout(*caches))
    wanted = [cache.clone() for cache in caches]
    rotary_embedding(query_after, key_after, positions, cos, sin)
    reshape_and_cache(key_after, value, *wanted, slots, kv_cache_dtype, 0.5, 0.25) if kv_cache_dtype != "auto" else (
        reshape_and_cache(key_after, value, *wanted, slots)
    )
    scales = (0.5, 0.25) if kv_cache_dtype != "auto" else (1.0, 1.0)
    rotary_embedding_and_cache(query, key, value, positions, cos, sin, *caches, slots, kv_cache_dtype, *scales)
    assert torch.equal(query, query_after)
    assert torch.equal(key, key_after)
    for cache, expected in zip(caches, wanted, strict=True):
        assert torch.equal(cache.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_no_tokens_are_no_work_for_any_op(device: str) -> None:
    empty = torch.zeros(0, 4, 64, device=device)
    positions = torch.zeros(0, dtype=torch.int64, device=device)
    cos, sin = tables(64, device)
    cache = torch.zeros(1, 4, 16, 64, device=device)
    rotary_embedding(empty, empty, positions, cos, sin)
    rotary_embedding_and_cache(empty, empty, empty, positions, cos, sin, cache, cache.clone(), positions)
    weight = torch.ones(64, device=device)
    assert rms_norm(empty[:, 0], weight, 1e-5).shape == (0, 64)
    fused_add_rms_norm(empty[:, 0], empty[:, 1].clone(), weight, 1e-5)
    assert silu_and_mul(empty[:, 0]).shape == (0, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.zeros(2, 3, 4), torch.ones(4), 1e-5), "x must be"),
        (lambda: rms_norm(torch.zeros(2, 4), torch.ones(5), 1e-5), "weight must be"),
        (lambda: rms_norm(torch.zeros(2, 4).double(), torch.ones(4).double(), 1e-5), "x is torch.float64"),
        (lambda: fused_add_rms_norm(torch.zeros(2, 4), torch.zeros(3, 4), torch.ones(4), 1e-5), "residual must be"),
        (lambda: silu_and_mul(torch.zeros(2, 5)), "x must be"),
        (lambda: rotary_embedding(torch.zeros(2, 1, 8), torch.zeros(2, 1, 6), torch.zeros(2).long(), *tables(8, "cpu")), "key must be"),
        (lambda: rotary_embedding(torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), torch.zeros(2), *tables(8, "cpu")), "positions must be"),
        (
            lambda: rotary_embedding(torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), torch.zeros(2).long(), *tables(10, "cpu")),
            "rotary_dim must",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


class TestOnGPU:
    """What there is only on a GPU."""

    pytestmark = GPU

    def test_a_position_outside_the_table_leaves_its_row_as_it_was(self) -> None:
        cos, sin = tables(64, "cuda")
        query, key = (randn(3, 2, 64, dtype=torch.float16, device="cuda", seed=seed) for seed in (1, 2))
        before = query.clone()
        rotary_embedding(query, key, torch.tensor([300, -1, 299], device="cuda"), cos, sin)
        assert torch.equal(query[:2], before[:2])
        assert not torch.equal(query[2], before[2])

    def test_a_slot_outside_the_cache_is_not_written(self) -> None:
        memory = torch.zeros(4, 2, 16, 64, device="cuda")
        cos, sin = tables(64, "cuda")
        rows = randn(3, 2, 64, dtype=torch.float32, device="cuda")
        slots = torch.tensor([16, 1 << 31, -5], device="cuda")
        rotary_embedding_and_cache(rows, rows.clone(), rows.clone(), slots * 0, cos, sin, memory[1:2], memory[2:3], slots)
        assert not memory.any()

    def test_nothing_waits_for_the_gpu_and_all_can_be_captured_in_a_graph(self) -> None:
        cos, sin = tables(64, "cuda")
        x, residual, weight = (randn(4, 512, dtype=torch.bfloat16, device="cuda", seed=seed)[: 4 if seed < 2 else 1] for seed in range(3))
        query, key, value = (randn(4, 2, 64, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in range(3))
        caches = [torch.zeros(2, 2, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
        slots = torch.tensor([0, 20, -1, 7], device="cuda")

        def step() -> list[torch.Tensor]:
            normed = rms_norm(x, weight[0], 1e-5)
            added = [x.clone(), residual.clone()]
            fused_add_rms_norm(*added, weight[0], 1e-5)
            turned_rows = [query.clone(), key.clone()]
            rotary_embedding_and_cache(*turned_rows, value, slots.clamp(min=0), cos, sin, *caches, slots)
            return [normed, *added, *turned_rows, silu_and_mul(x)]

        wanted = [result.clone() for result in step()]
        written = [cache.clone() for cache in caches]
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        for tensor in (*results, *caches):
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for result, expected in zip(results, wanted, strict=True):
            assert torch.equal(result, expected)
        for cache, expected in zip(caches, written, strict=True):
            assert torch.equal(cache[0, :, 0], expected[0, :, 0])
            assert torch.equal(cache[1, :, 4], expected[1, :, 4])
            assert bool(cache[1, :, 5].isnan().all())


def test_without_a_compiler_the_ops_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cos, sin = tables(32, "cpu")
    positions, slots = torch.tensor([5, 0, 299]), torch.tensor([1, -1, 17])
    results = []
    for kernel in (cpu_rotary_embedding.kernel, lambda dtype: None):
        monkeypatch.setattr(cpu_rotary_embedding, "kernel", kernel)
        rows = [randn(3, 2, 64, dtype=torch.float32, device="cpu", seed=seed) for seed in range(3)]
        caches = [torch.zeros(2, 2, 16, 64) for _ in "kv"]
        rotary_embedding_and_cache(*rows, positions, cos, sin, *caches, slots)
        results.append([*rows, *caches])
    for compiled, plain in zip(*results, strict=True):
        assert_near(compiled, plain, torch.float32)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(("position", "slot"), [(300, 0), (-1, 0), (0, 16), (0, -2)])
def test_a_position_or_slot_that_does_not_exist_is_refused_before_anything_is_written(
    position: int, slot: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(cpu_rotary_embedding, "kernel", lambda dtype: None)
    cos, sin = tables(64, "cpu")
    rows = [randn(2, 2, 64, dtype=torch.float32, device="cpu", seed=seed) for seed in range(3)]
    before = [part.clone() for part in rows]
    caches = [torch.zeros(1, 2, 16, 64) for _ in "kv"]
    with pytest.raises(IndexError, match="token 1"):
        rotary_embedding_and_cache(*rows, torch.tensor([0, position]), cos, sin, *caches, torch.tensor([3, slot]))
    assert not caches[0].any() and all(torch.equal(part, was) for part, was in zip(rows, before, strict=True))
