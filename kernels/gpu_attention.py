"""Paged attention of one step on an NVIDIA GPU: the decode kernel for requests of one new token, the chunked one for the rest.

Same meaning and call as kernels/cpu_attention.py. Block tables and lengths go to the GPU once and are used by all layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kernels import flash_attention
from kernels.flash_attention import BLOCK_SIZES, HEAD_DIMS
from kernels.paged_attention import PagedAttentionPlan


def unsupported(head_dim: int, block_size: int) -> str | None:
    """Why no kernel serves these sizes, and what to do; None when one does."""
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim} has no GPU kernel (those with one: {', '.join(map(str, HEAD_DIMS))}); set PAGEWIRE_DEVICE=cpu"
    if block_size not in BLOCK_SIZES:
        return f"block_size {block_size} has no GPU kernel; set PAGEWIRE_BLOCK_SIZE to one of {', '.join(map(str, BLOCK_SIZES))}"
    return None


def prepare(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Compile and load what steps with these options will launch; `query`: [>= 1, num_heads, head_dim], strided as the model's. Writes
    nothing that stays."""
    flash_attention.prepare(query, key_cache, value_cache, sliding_window=sliding_window, soft_cap=soft_cap)
    attention = GPUPagedAttention([[0]], [0, 1], [1], key_cache.shape[2], query.device)
    attention(query[:1], key_cache, value_cache, 1.0, sliding_window=sliding_window, soft_cap=soft_cap)


class GPUDecodeAttention:
    """Requests of one new token each. `block_tables`: int32 [num_requests, max_blocks], `seq_lens`: int32 [num_requests] on the GPU, which
    may change between calls as long as none exceeds `max_seq_len`; of length 0: a row of zeros. `num_kv_tokens`, `is_even`: see
    PagedAttentionPlan."""

    def __init__(
        self,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        num_kv_tokens: int | None = None,
        is_even: bool = False,
    ) -> None:
        self._tables, self._lens, self._max_seq_len = block_tables, seq_lens, max_seq_len
        self._num_kv_tokens, self._is_even = num_kv_tokens, is_even
        self._plans: dict[tuple[int | None, float | None], PagedAttentionPlan] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As GPUPagedAttention, but for fp16 and bf16 only."""
        plan = self._plans.get((sliding_window, soft_cap))
        if plan is None:
            plan = self._plans[sliding_window, soft_cap] = PagedAttentionPlan(
                query, key_cache, value_cache, self._tables, self._lens, self._max_seq_len, scale,
                sliding_window=sliding_window, soft_cap=soft_cap, num_kv_tokens=self._num_kv_tokens, is_even=self._is_even,
            )  # fmt: skip
        return plan.run(query, key_cache, value_cache, out)


class GPUChunkAttention:
    """Requests of any number of new tokens. Tensors as `flash_attention.flash_attention` takes them, which may change between calls within
    the two bounds."""

    def __init__(
        self, block_tables: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int, max_seq_len: int
    ) -> None:
        self._batch = (block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len)

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As GPUPagedAttention."""
        return flash_attention.flash_attention(
            query, key_cache, value_cache, *self._batch, scale, sliding_window=sliding_window, soft_cap=soft_cap, out=out
        )


class GPUPagedAttention:
    """`block_tables[i]` covers seq_lens[i] tokens; request i owns rows query_start_loc[i : i + 2], the last of its positions. Requests of
    one new token that stand in front are served by the decode kernel."""

    def __init__(
        self,
        block_tables: Sequence[Sequence[int]],
        query_start_loc: Sequence[int],
        seq_lens: Sequence[int],
        block_size: int,
        device: torch.device,
    ) -> None:
        query_lens = [end - start for start, end in itertools.pairwise(query_start_loc)]
        self._num_decode = next((i for i, length in enumerate(query_lens) if length != 1), len(query_lens))
        widths = [-(-length // block_size) for length in seq_lens]
        if any(len(table) < width for table, width in zip(block_tables, widths, strict=True)):
            raise ValueError("a block table is shorter than its sequence; give ceil(seq_len / block_size) blocks")
        tables = torch.zeros(len(seq_lens), max(widths, default=1), dtype=torch.int32)
        for i, (table, width) in enumerate(zip(block_tables, widths, strict=True)):
            tables[i, :width] = torch.tensor(table[:width], dtype=torch.int32)
        # One copy for all three: each has a price of its own.
        parts = (tables.flatten(), torch.tensor(query_start_loc, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32))
        packed = torch.cat(parts).pin_memory().to(device, non_blocking=True)
        on_device = torch.split(packed, [part.numel() for part in parts])
        self._tables, self._starts, self._lens = on_device[0].view(tables.shape), on_device[1], on_device[2]
        self._seq_lens = list(seq_lens)
        self._query_lens = query_lens
        self._decode: GPUDecodeAttention | None = None
        self._chunks: GPUChunkAttention | None = None

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim], rows may be strided; caches of one layer: [num_blocks, num_kv_heads, block_size,
        head_dim] in the query's dtype. Options as in `reference.paged_attention`. Returns a contiguous tensor like the query. All layers
        of a step have the same shapes and scale."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        num_decode = 0 if query.dtype is torch.float32 else self._num_decode  # which the decode kernel does not take
        if num_decode:
            if self._decode is None:
                lens = self._seq_lens[:num_decode]
                self._decode = GPUDecodeAttention(self._tables[:num_decode], self._lens[:num_decode], max(lens), sum(lens))
            self._decode(
                query[:num_decode], key_cache, value_cache, scale, sliding_window=sliding_window, soft_cap=soft_cap, out=out[:num_decode]
            )
        if num_decode < len(self._seq_lens):
            if self._chunks is None:
                self._chunks = GPUChunkAttention(
                    self._tables[num_decode:], self._starts[num_decode:] - num_decode, self._lens[num_decode:],
                    max(self._query_lens[num_decode:]), max(self._seq_lens[num_decode:]),
                )  # fmt: skip
            self._chunks(
                query[num_decode:], key_cache, value_cache, scale, sliding_window=sliding_window, soft_cap=soft_cap, out=out[num_decode:]
            )
        return out
