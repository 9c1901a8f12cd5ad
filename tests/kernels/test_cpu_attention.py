"""The CPU attention path and the ops in kernels/reference.py against plain formulas in fp64."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.cpu_attention import CPUPagedAttention

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


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
                 dtype: torch.dtype = torch.float32) -> None:  # fmt: skip
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
        self.key_cache = torch.full(shape, 50.0, dtype=dtype)
        self.value_cache = torch.full(shape, 50.0, dtype=dtype)
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
    monkeypatch.setattr("kernels.cpu_attention.MAX_QUERY_TOKENS", 17)
    torch.testing.assert_close(case.run(), whole, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(case.run().double(), case.expected, atol=2e-6, rtol=2e-6)
