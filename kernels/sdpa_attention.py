"""Paged attention on the CPU without a C++ compiler: torch's fused scaled_dot_product_attention over each request's blocks, gathered.

Same meaning as kernels/reference.py, without its options. What depends only on the step (block tables, masks) is prepared once and used
by all layers. Grouped queries are folded into query rows, so that K and V are neither repeated nor read more than once per KV head.
Rows with one query token are batched in buckets of similar length, since a call per row costs more than its arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

NEG_INF = float("-inf")
MAX_QUERY_TOKENS = 512
MAX_MASK_ELEMENTS = 16 << 20
"""Long chunks are cut into slices of queries: masks stay small, and a slice does not read the keys behind its last query."""


@dataclass(frozen=True)
class _DecodeBucket:
    rows: torch.Tensor  # [n] rows of the flattened batch
    blocks: torch.Tensor  # [n * max_blocks]
    mask: torch.Tensor | None  # [n, 1, 1, max_blocks * block_size]
    unused: torch.Tensor | None  # places in the gathered [n * max_blocks * block_size] keys that belong to no sequence


@dataclass(frozen=True)
class _PrefillRow:
    start: int
    end: int
    blocks: torch.Tensor  # [num_blocks]
    seq_len: int
    mask: torch.Tensor | None  # [group * num_query_tokens, seq_len]


class SDPAPagedAttention:
    """Attention of one step. `block_tables[i]` covers seq_lens[i] >= 1 tokens; request i owns rows query_start_loc[i : i + 2]."""

    def __init__(
        self,
        block_tables: list[list[int]],
        query_start_loc: list[int],
        seq_lens: list[int],
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._block_size = block_size
        buckets: dict[int, list[int]] = defaultdict(list)
        self._prefill_rows: list[_PrefillRow] = []
        for i, seq_len in enumerate(seq_lens):
            start, end = query_start_loc[i], query_start_loc[i + 1]
            num_blocks = -(-seq_len // block_size)
            if end - start == 1:
                buckets[(num_blocks - 1).bit_length()].append(i)
            else:
                self._prefill_rows += self._slices(start, end, seq_len, torch.tensor(block_tables[i][:num_blocks]))
        self._decode_buckets = [self._bucket(members, block_tables, query_start_loc, seq_lens) for members in buckets.values()]

    def _slices(self, start: int, end: int, seq_len: int, blocks: torch.Tensor) -> Iterator[_PrefillRow]:
        size = max(1, min(MAX_QUERY_TOKENS, MAX_MASK_ELEMENTS // (self._group * seq_len)))
        for first in range(start, end, size):
            last = min(first + size, end)
            num_keys = seq_len - (end - last)
            yield _PrefillRow(first, last, blocks[: -(-num_keys // self._block_size)], num_keys, self._causal_mask(last - first, num_keys))

    def _causal_mask(self, num_query_tokens: int, seq_len: int) -> torch.Tensor:
        first = seq_len - num_query_tokens
        mask = torch.zeros(num_query_tokens, seq_len)
        mask[:, first:].masked_fill_(torch.ones(num_query_tokens, num_query_tokens, dtype=torch.bool).triu(1), NEG_INF)
        return mask.repeat(self._group, 1)

    def _bucket(self, members: list[int], block_tables: list[list[int]], query_start_loc: list[int], seq_lens: list[int]) -> _DecodeBucket:
        max_blocks = max(-(-seq_lens[i] // self._block_size) for i in members)
        # Padding repeats the row's first block, which exists.
        tables = [(block_tables[i] + block_tables[i][:1] * max_blocks)[:max_blocks] for i in members]
        for i, table in zip(members, tables, strict=True):
            used = -(-seq_lens[i] // self._block_size)
            table[used:] = block_tables[i][:1] * (max_blocks - used)
        lengths = torch.tensor([seq_lens[i] for i in members])
        num_keys = max_blocks * self._block_size
        mask = unused = None
        if bool((lengths < num_keys).any()):
            is_unused = torch.arange(num_keys)[None] >= lengths[:, None]
            mask = torch.zeros(len(members), num_keys).masked_fill_(is_unused, NEG_INF)[:, None, None]
            unused = is_unused.flatten().nonzero().flatten()
        return _DecodeBucket(torch.tensor([query_start_loc[i] for i in members]), torch.tensor(tables).flatten(), mask, unused)

    def __call__(self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim]; caches of one layer: [num_blocks, num_kv_heads, block_size, head_dim]."""
        out = torch.empty_like(query)
        head_dim = query.shape[-1]
        keys, values = key_cache.transpose(0, 1), value_cache.transpose(0, 1)  # [num_kv_heads, num_blocks, block_size, head_dim]
        for bucket in self._decode_buckets:
            n = len(bucket.rows)
            rows = query[bucket.rows].view(n, self._num_kv_heads, self._group, head_dim)
            key, value = (part[:, bucket.blocks].view(self._num_kv_heads, -1, head_dim) for part in (keys, values))
            if bucket.unused is not None:
                # Such slots may hold anything, and a mask does not silence a NaN.
                key.index_fill_(1, bucket.unused, 0.0)
                value.index_fill_(1, bucket.unused, 0.0)
            key, value = (part.view(self._num_kv_heads, n, -1, head_dim).transpose(0, 1) for part in (key, value))
            result = F.scaled_dot_product_attention(rows, key, value, attn_mask=_as(bucket.mask, query), scale=scale)
            out[bucket.rows] = result.reshape(n, -1, head_dim)
        for row in self._prefill_rows:
            num_tokens = row.end - row.start
            # [num_tokens, num_kv_heads, group, head_dim] -> [num_kv_heads, group * num_tokens, head_dim]
            rows = query[row.start : row.end].view(num_tokens, self._num_kv_heads, self._group, head_dim).permute(1, 2, 0, 3)
            rows = rows.reshape(1, self._num_kv_heads, self._group * num_tokens, head_dim)
            key = keys[:, row.blocks].view(1, self._num_kv_heads, -1, head_dim)[:, :, : row.seq_len]
            value = values[:, row.blocks].view(1, self._num_kv_heads, -1, head_dim)[:, :, : row.seq_len]
            result = F.scaled_dot_product_attention(rows, key, value, attn_mask=_as(row.mask, query), scale=scale)
            result = result.view(self._num_kv_heads, self._group, num_tokens, head_dim).permute(2, 0, 1, 3)
            out[row.start : row.end] = result.reshape(num_tokens, -1, head_dim)
        return out


def _as(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if mask is None else mask.to(like.dtype)
