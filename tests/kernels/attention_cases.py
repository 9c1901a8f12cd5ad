"""Batches that attention kernels get wrong, and what the plain formula says about them.

Everything that must not be read is poison: slots past a sequence's end and before the first query's window (NaN keys, infinite values),
other layers of the cache, the key and value part of a fused projection, block table entries past a sequence's end and wholly before the
window (-1 and the largest int32).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from kernels import reference

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Largest difference of an element, and norm of the difference over the norm of the result. The second is what catches a wrong
# tile: rounding alone stays under half of it.
TOLERANCE = {torch.float32: (2e-5, 1e-5), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 6e-3)}


@dataclass(frozen=True)
class AttentionCase:
    """A ragged batch: (query tokens, sequence length) of each request, and how the cache and the model look."""

    shapes: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    alibi: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    num_shared_blocks: int = 0

    def __str__(self) -> str:
        """What differs from the defaults: the name of a test."""
        shapes = "+".join(f"{q}@{s}" for q, s in self.shapes[:6]) + ("+" if len(self.shapes) > 6 else "")
        rest = (f"{f.name}={getattr(self, f.name)}" for f in fields(self)[1:] if getattr(self, f.name) != f.default)
        return " ".join([shapes, *rest]).replace("torch.", "").replace("num_", "")


class AttentionBatch:
    """The tensors of a case on a device. Equal cases give equal tensors."""

    def __init__(self, case: AttentionCase, device: str) -> None:
        self.case = case
        generator = torch.Generator(device).manual_seed(11)
        on_host = torch.Generator().manual_seed(12)
        self.cache_dtype = case.cache_dtype or case.dtype
        self.scale = case.head_dim**-0.5
        self.seq_lens = [seq_len for _, seq_len in case.shapes]
        self.query_start_loc = [0]
        for num_queries, _ in case.shapes:
            self.query_start_loc.append(self.query_start_loc[-1] + num_queries)
        counts = [-(-seq_len // case.block_size) for seq_len in self.seq_lens]
        num_blocks = sum(counts) + 2
        order = torch.randperm(num_blocks, generator=on_host).tolist()
        shared = [order.pop() for _ in range(case.num_shared_blocks)]
        self.tables = [shared + [order.pop() for _ in range(count - len(shared))] for count in counts]
        table = torch.full((len(counts), max(counts) + 3), -1, dtype=torch.int32)
        table[:, 1::2] = 2**31 - 1
        firsts = [max(0, seq_len - q + 1 - (case.sliding_window or seq_len)) for q, seq_len in case.shapes]
        for row, blocks, first in zip(table, self.tables, firsts, strict=True):
            unseen = first // case.block_size
            row[unseen : len(blocks)] = torch.tensor(blocks[unseen:], dtype=torch.int32)
        # Wider in memory than it is: the row stride is not the number of blocks.
        self.block_tables = torch.cat([table, torch.full_like(table, -1)], dim=1).to(device)[:, : table.shape[1]]

        whole = torch.empty(num_blocks, 2, 2, case.num_kv_heads, case.block_size, case.head_dim, dtype=self.cache_dtype, device=device)
        for part, poison in ((0, float("nan")), (1, float("inf"))):
            _fill(whole[:, :, part], poison)
        self.key_cache, self.value_cache = whole[:, 1, 0], whole[:, 1, 1]
        used = {
            blocks[t // case.block_size] * case.block_size + t % case.block_size
            for blocks, seq_len, first in zip(self.tables, self.seq_lens, firsts, strict=True)
            for t in range(first, seq_len)
        }
        slots = torch.tensor(sorted(used), dtype=torch.int64, device=device)
        for cache in (self.key_cache, self.value_cache):
            rows = torch.randn(len(slots), case.num_kv_heads, case.head_dim, generator=generator, device=device).to(self.cache_dtype)
            bits = torch.uint8 if cache.itemsize == 1 else self.cache_dtype
            cache.view(bits).transpose(1, 2)[slots // case.block_size, slots % case.block_size] = rows.view(bits)

        num_tokens = self.query_start_loc[-1]
        fused = torch.full((num_tokens, case.num_heads + 2 * case.num_kv_heads, case.head_dim), float("nan"), device=device).to(case.dtype)
        self.query = fused[:, : case.num_heads]
        self.query.copy_(torch.randn(self.query.shape, generator=generator, device=device))
        self.out = torch.full(self.query.shape, float("nan"), dtype=case.dtype, device=device)
        self.alibi_slopes = torch.rand(case.num_heads, generator=generator, device=device) if case.alibi else None

    def tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.query.device)

    def expected(self) -> torch.Tensor:
        """In fp64, whatever the dtype of the batch."""
        case = self.case
        return reference.paged_attention(
            self.query.double(), self.key_cache, self.value_cache, self.tables, self.query_start_loc, self.seq_lens, self.scale,
            alibi_slopes=self.alibi_slopes, sliding_window=case.sliding_window, soft_cap=case.soft_cap, k_scale=case.k_scale,
            v_scale=case.v_scale, accumulate=torch.float64,
        )  # fmt: skip


def _fill(cache: torch.Tensor, value: float) -> None:
    """E4M3 has no infinity: there it becomes NaN."""
    if cache.itemsize == 1:
        filling = torch.tensor([value]).to(cache.dtype) if cache.dtype == torch.float8_e5m2 else torch.tensor([0x7F], dtype=torch.uint8)
        cache.view(torch.uint8).fill_(int(filling.view(torch.uint8)))
    else:
        cache.fill_(value)


def errors(out: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Largest difference of an element, and norm of the difference over the norm of the expected; NaN where `out` has any."""
    difference = out.double() - expected
    return float(difference.abs().max()) if out.numel() else 0.0, float(difference.norm() / expected.norm().clamp_min(1e-30))


def assert_close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within TOLERANCE; the limit of an element grows with what is to be rounded."""
    assert bool(out.isfinite().all()), "the result is not finite: something that is poisoned was read, or an element not written"
    largest, relative = errors(out, expected)
    max_difference, max_relative = TOLERANCE[dtype]
    limit = max_difference * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
    assert largest <= limit, f"an element is off by {largest:.2e}, limit {limit:.2e}"
    assert relative <= max_relative, f"relative error {relative:.2e}, limit {max_relative:.2e}"
