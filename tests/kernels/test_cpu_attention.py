"""The CPU attention path and the ops in kernels/reference.py against plain formulas in fp64."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels import cpu_attention, reference
from kernels.build import KernelBuildError, find_cxx
from kernels.cpu_attention import CPUPagedAttention

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every claim holds on both paths: the C++ kernel and the one without a compiler."""
    name: str = request.param
    if name == "torch":
        monkeypatch.setattr(cpu_attention, "kernel", lambda dtype, head_dim: None)
    else:
        need_the_kernel()
    return name


def need_the_kernel() -> None:
    """Without a compiler there is none; with one it must have been built."""
    if find_cxx() is None:
        pytest.skip("no C++ compiler")
    assert cpu_attention.prepare(torch.float32, 64)


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """fp64, one sequence: query [q, Hq, d], key and value [k, Hkv, d]; query rows are the last positions."""
    group = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    positions = torch.arange(len(key) - len(query), len(key))
    scores.masked_fill_(torch.arange(len(key))[None] > positions[:, None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


class Case:
    """A ragged batch over a cache whose blocks are shuffled; unused slots hold large values."""

    def __init__(self, shapes: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int, block_size: int = 16,
                 dtype: torch.dtype = torch.float32, unused: float = 50.0) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(7)
        self.block_size, self.num_heads, self.num_kv_heads = block_size, num_heads, num_kv_heads
        self.scale = head_dim**-0.5
        self.seq_lens = [seq_len for _, seq_len in shapes]
        self.query_start_loc = [0]
        for num_query, _ in shapes:
            self.query_start_loc.append(self.query_start_loc[-1] + num_query)
        counts = [-(-seq_len // block_size) for seq_len in self.seq_lens]
        order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 3, num_kv_heads, block_size, head_dim)
        self.key_cache = torch.full(shape, unused, dtype=dtype)
        self.value_cache = torch.full(shape, unused, dtype=dtype)
        self.query = torch.randn(self.query_start_loc[-1], num_heads, head_dim, generator=generator).to(dtype)
        expected = []
        for i, seq_len in enumerate(self.seq_lens):
            key = torch.randn(seq_len, num_kv_heads, head_dim, generator=generator).to(dtype)
            value = torch.randn(seq_len, num_kv_heads, head_dim, generator=generator).to(dtype)
            slots = torch.tensor([self.tables[i][t // block_size] * block_size + t % block_size for t in range(seq_len)])
            reference.reshape_and_cache(key, value, self.key_cache, self.value_cache, slots)
            rows = self.query[self.query_start_loc[i] : self.query_start_loc[i + 1]]
            expected.append(plain_attention(rows, key, value, self.scale))
        self.expected = torch.cat(expected)

    def run(self) -> torch.Tensor:
        attention = CPUPagedAttention(self.tables, self.query_start_loc, self.seq_lens, self.block_size, self.num_heads, self.num_kv_heads)
        return attention(self.query, self.key_cache, self.value_cache, self.scale)


AWKWARD = [1, 15, 16, 17, 31, 33, 511, 513]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (8, 1), (14, 2)])
def test_decode_rows_of_many_lengths_equal_the_formula(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    case = Case([(1, n) for n in AWKWARD], num_heads, num_kv_heads, 64, dtype=dtype)
    torch.testing.assert_close(case.run().double(), case.expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 63, 64, 65])
@pytest.mark.parametrize("num_query", [1, 7, 16, 65])
def test_a_chunk_attends_to_all_that_came_before(context: int, num_query: int) -> None:
    case = Case([(num_query, context + num_query)], 9, 3, 64)
    torch.testing.assert_close(case.run().double(), case.expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("head_dim", [32, 80, 128])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_mixed_batch_of_decode_rows_and_chunks(head_dim: int, block_size: int) -> None:
    case = Case([(1, 50), (1, 7), (5, 37), (7, 7), (33, 70), (1, 1)], 6, 2, head_dim, block_size)
    torch.testing.assert_close(case.run().double(), case.expected, atol=2e-6, rtol=2e-6)


def test_reference_paged_attention_equals_the_formula_and_ignores_unused_slots() -> None:
    case = Case([(1, 17), (5, 37), (0, 0)], 9, 3, 64)
    unused = torch.ones((*case.key_cache.shape[:1], case.block_size), dtype=torch.bool)
    for table, seq_len in zip(case.tables, case.seq_lens, strict=True):
        for t in range(seq_len):
            unused[table[t // 16], t % 16] = False
    case.key_cache.transpose(1, 2)[unused] = float("nan")
    case.value_cache.transpose(1, 2)[unused] = float("inf")
    out = reference.paged_attention(
        case.query, case.key_cache, case.value_cache, case.tables, case.query_start_loc, case.seq_lens, case.scale
    )
    torch.testing.assert_close(out.double(), case.expected, atol=2e-6, rtol=2e-6)


def test_requests_that_share_blocks_read_the_same_prefix() -> None:
    case = Case([(1, 33), (1, 33)], 9, 3, 64)
    case.tables[1] = case.tables[0]
    case.query[1] = case.query[0]
    out = case.run()
    assert torch.equal(out[0], out[1])


def test_reshape_and_cache_writes_mapped_slots_only() -> None:
    key_cache = torch.zeros(4, 2, 16, 8)
    value_cache = torch.zeros(4, 2, 16, 8)
    rows = torch.ones(12, 2, 8)
    slots = torch.tensor([0, -1, 17, 63, -1, 5, 6, 7, -1])  # fewer entries than rows
    reference.reshape_and_cache(rows, rows * 2, key_cache, value_cache, slots)
    written = key_cache.transpose(1, 2).reshape(64, 16).sum(-1).nonzero().flatten().tolist()
    assert written == [0, 5, 6, 7, 17, 63]
    assert value_cache.sum() == 2 * key_cache.sum()


def test_reshape_and_cache_refuses_a_slot_outside_the_cache() -> None:
    cache = torch.zeros(2, 1, 16, 8)
    with pytest.raises(IndexError, match="slot 32"):
        reference.reshape_and_cache(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache, cache.clone(), torch.tensor([32]))


def test_norm_rotary_and_activation_follow_their_formulas() -> None:
    x = torch.randn(5, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    angles = torch.outer(torch.arange(5.0), torch.rand(8)).double()
    rotated = reference.rotary_embedding(x, angles.cos(), angles.sin())
    complex_x = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(rotated, torch.cat([complex_x.real, complex_x.imag], -1))
    flat = x.flatten(1)
    weight = torch.rand(64, dtype=torch.float64)
    normed = reference.rms_norm(flat, weight, 1e-5)
    torch.testing.assert_close(normed, flat / (flat.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight, atol=1e-6, rtol=1e-6)
    gate, up = flat[:, :32], flat[:, 32:]
    torch.testing.assert_close(reference.silu_and_mul(flat), gate * torch.sigmoid(gate) * up)


def test_a_chunk_cut_into_slices_of_queries_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(100, 150), (1, 20), (33, 33)], 9, 3, 64)
    whole = case.run()
    monkeypatch.setattr("kernels.sdpa_attention.MAX_QUERY_TOKENS", 17)
    torch.testing.assert_close(case.run(), whole, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(case.run().double(), case.expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {"alibi_slopes": torch.tensor([2.0 ** -(1 + i) for i in range(6)])},
        {"sliding_window": 1},
        {"sliding_window": 40},
        {"sliding_window": 300},
        {"soft_cap": 2.0},
        {"alibi_slopes": torch.full((6,), 0.01), "sliding_window": 70, "soft_cap": 5.0},
    ],
    ids=["alibi", "window 1", "window 40", "window 300", "soft cap", "all"],
)
def test_options_equal_the_reference(options: dict[str, Any], dtype: torch.dtype) -> None:
    case = Case([(1, 1), (1, 600), (65, 400), (1, 257), (130, 130)], 6, 2, 64, dtype=dtype)
    wanted = reference.paged_attention(
        case.query, case.key_cache, case.value_cache, case.tables, case.query_start_loc, case.seq_lens, case.scale,
        accumulate=torch.float64, **options,
    )  # fmt: skip
    attention = CPUPagedAttention(case.tables, case.query_start_loc, case.seq_lens, 16, 6, 2)
    out = attention(case.query, case.key_cache, case.value_cache, case.scale, **options)
    torch.testing.assert_close(out.double(), wanted.double(), atol=TOLERANCE[dtype] * 2, rtol=TOLERANCE[dtype] * 2)


@pytest.mark.parametrize("head_dim", [6, 20, 40, 80, 96, 112, 120, 128, 192, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(14, 2), (3, 3), (71, 1)])
def test_every_head_size_and_ratio_equals_the_formula(head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    case = Case([(1, 33), (7, 129), (1, 300)], num_heads, num_kv_heads, head_dim)
    torch.testing.assert_close(case.run().double(), case.expected, atol=4e-6, rtol=4e-6)


def test_a_row_without_keys_is_zero() -> None:
    case = Case([(1, 20), (1, 0), (3, 19)], 6, 2, 32)
    out = case.run()
    assert not out[1].any()
    torch.testing.assert_close(out[[0, 2, 3, 4]].double(), case.expected[[0, 2, 3, 4]], atol=2e-6, rtol=2e-6)


def test_a_table_shorter_than_its_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="block table"):
        CPUPagedAttention([[0, 1]], [0, 1], [33], 16, 4, 4)


def test_the_layer_view_of_a_whole_cache_and_rows_of_a_fused_projection_are_read_in_place() -> None:
    case = Case([(1, 50), (9, 37)], 6, 2, 32)
    cache = torch.full((len(case.key_cache), 3, 2, 2, 16, 32), float("nan"))
    cache[:, 1, 0], cache[:, 1, 1] = case.key_cache, case.value_cache
    fused = torch.full((10, 10 * 32), float("nan"))
    fused[:, : 6 * 32] = case.query.flatten(1)
    case.query, case.key_cache, case.value_cache = fused[:, : 6 * 32].view(10, 6, 32), cache[:, 1, 0], cache[:, 1, 1]
    torch.testing.assert_close(case.run().double(), case.expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_unused_slots_hold_does_not_matter(poison: float, dtype: torch.dtype) -> None:
    case = Case([(1, 17), (5, 37), (1, 1), (1, 33), (70, 75)], 9, 3, 64, dtype=dtype, unused=poison)
    torch.testing.assert_close(case.run().double(), case.expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


class TestCompiled:
    """What only the C++ kernel promises."""

    @pytest.fixture(autouse=True)
    def path(self) -> None:
        need_the_kernel()

    def test_chunks_of_bf16_are_the_same_with_and_without_a_matrix_unit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = Case([(1, 70), (64, 300), (9, 20), (130, 130)], 9, 3, 64, dtype=torch.bfloat16, unused=float("nan"))
        for has_one in (False, True):
            monkeypatch.setattr(cpu_attention, "_has_matrix_unit", lambda has_one=has_one: has_one)
            torch.testing.assert_close(case.run().double(), case.expected, atol=2e-2, rtol=2e-2)

    def test_a_row_does_not_depend_on_its_batch_or_the_number_of_threads(self) -> None:
        case = Case([(1, 700), (40, 300), (1, 20), (1, 5000)], 9, 3, 64)
        together = case.run()
        num_threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1 if num_threads > 1 else 3)
            assert torch.equal(case.run(), together)
        finally:
            torch.set_num_threads(num_threads)
        for i in range(4):
            start, end = case.query_start_loc[i : i + 2]
            alone = CPUPagedAttention([case.tables[i]], [0, end - start], [case.seq_lens[i]], 16, 9, 3)
            assert torch.equal(alone(case.query[start:end], case.key_cache, case.value_cache, case.scale), together[start:end])

    def test_blocks_past_2_31_elements_are_read(self) -> None:
        num_blocks = (1 << 31) // (2 * 16 * 64) + 8  # of which only the blocks used here cost memory
        caches = [torch.from_numpy(np.zeros(num_blocks * 2 * 16 * 64, np.int16)).view(torch.bfloat16).view(-1, 2, 16, 64) for _ in "kv"]
        case = Case([(1, 40), (20, 40)], 4, 2, 64, dtype=torch.bfloat16)
        low = case.run()
        for cache, small in zip(caches, (case.key_cache, case.value_cache), strict=True):
            cache[-len(small) :] = small
        case.tables = [[block + num_blocks - len(case.key_cache) for block in table] for table in case.tables]
        case.key_cache, case.value_cache = caches
        assert torch.equal(case.run(), low)

    def test_threads_that_call_at_once_do_not_disturb_each_other(self) -> None:
        case = Case([(1, 700), (40, 300), (1, 1500)], 9, 3, 64)
        wanted = case.run()
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: case.run(), range(16)))
        assert all(torch.equal(result, wanted) for result in results)

    def test_without_a_compiler_torch_serves_and_the_log_says_so_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(library: object) -> None:
            raise KernelBuildError("no compiler here")

        monkeypatch.setattr(cpu_attention, "_launchers", {})
        monkeypatch.setattr(cpu_attention, "load", fail)
        case = Case([(1, 50), (9, 37)], 6, 2, 32)
        for _ in range(2):
            torch.testing.assert_close(case.run().double(), case.expected, atol=2e-6, rtol=2e-6)
        assert [record.message for record in caplog.records if "no compiler here" in record.message] == [caplog.records[0].message]
        assert not cpu_attention.prepare(torch.float32, 32)


@pytest.mark.parametrize("num_tokens", [40, 700])
@pytest.mark.parametrize("num_query", [1, 9])
def test_nan_in_a_query_comes_out_as_nan_in_its_row_alone(num_query: int, num_tokens: int) -> None:
    case = Case([(num_query, num_tokens), (num_query, num_tokens)], 9, 3, 64)
    case.query[0, 4] = float("nan")
    out = case.run()
    assert out[0, 4].isnan().all()
    out[0, 4] = case.expected[0, 4].float()
    torch.testing.assert_close(out, case.expected.float(), atol=2e-6, rtol=2e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_step_of_few_tasks_leaves_torch_its_threads(path: str) -> None:
    """libgomp ends the threads that a smaller team does not need; then torch's next region would start them anew, in every layer."""
    if path == "torch":
        pytest.skip("torch's own affair")
    case = Case([(1, 250)], 9, 3, 64)
    other = torch.randn(1 << 20)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        seen = []
        for _ in range(12):
            other.sin()
            seen.append({task.name for task in Path("/proc/self/task").iterdir()})
            case.run()
    finally:
        torch.set_num_threads(num_threads)
    assert seen[-1] == seen[1]
