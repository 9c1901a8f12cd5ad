"""The meaning of every op in plain PyTorch, one request and one step at a time; what all faster paths are compared with.

Cache layout of one layer: [num_blocks, num_kv_heads, block_size, head_dim]. Addresses are computed in int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (Zhang & Sennrich 2019)."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + d/2) of each head (the half-split convention). x: [num_tokens, num_heads, head_dim]; cos, sin:
    [num_tokens, head_dim / 2] (Su et al. 2021)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x = [gate | up] along the last dimension (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write token i to slot `slot_mapping[i]` = block * block_size + offset; -1 writes nothing.

    key, value: [num_tokens, num_kv_heads, head_dim], possibly with more rows than slot_mapping has entries."""
    num_blocks, _, block_size, _ = key_cache.shape
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        if slot >= num_blocks * block_size:
            raise IndexError(f"slot {slot} is outside the cache of {num_blocks * block_size} slots")
        block, offset = divmod(slot, block_size)
        key_cache[block, :, offset] = key[row]
        value_cache[block, :, offset] = value[row]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
    *,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    accumulate: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Causal attention of a ragged batch over the paged cache.

    query: [num_tokens, num_heads, head_dim], flattened; request i owns rows query_start_loc[i] : query_start_loc[i + 1], the last
    rows of its seq_lens[i] positions. Keys and values past seq_len are not read, whatever the slots hold. A row without keys
    (seq_len 0, or owned by no request) is zero. Sums are kept in `accumulate`.

    A score is query . key x scale, where an FP8 cache holds key / k_scale and value / v_scale, then soft_cap x tanh(score / soft_cap)
    (Gemma 2), then + alibi_slopes[head] x (key position - query position) (Press et al. 2022); a query at position p sees keys
    p - sliding_window + 1 .. p (Beltagy et al. 2020)."""
    out = torch.zeros_like(query)
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    num_heads = query.shape[1]
    group = num_heads // num_kv_heads
    for i, seq_len in enumerate(seq_lens):
        start, end = query_start_loc[i], query_start_loc[i + 1]
        if seq_len == 0 or start == end:
            continue
        blocks = torch.tensor(block_tables[i][: -(-seq_len // block_size)], dtype=torch.int64, device=query.device)
        key = _sequence(key_cache, blocks, seq_len).to(accumulate) * k_scale
        value = _sequence(value_cache, blocks, seq_len).to(accumulate) * v_scale
        rows = query[start:end].to(accumulate).view(end - start, num_kv_heads, group, head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", rows, key) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = (
            torch.arange(seq_len, device=query.device)[None, :]
            - torch.arange(seq_len - (end - start), seq_len, device=query.device)[:, None]
        )
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(accumulate).view(num_kv_heads, group, 1, 1) * distance
        hidden = distance > 0
        if sliding_window is not None:
            hidden |= distance <= -sliding_window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
        out[start:end] = torch.einsum("hgqk,khd->qhgd", weights, value).reshape(end - start, num_heads, head_dim).to(out.dtype)
    return out


def _sequence(cache: torch.Tensor, blocks: torch.Tensor, seq_len: int) -> torch.Tensor:
    """One sequence of a cache as [seq_len, num_kv_heads, head_dim]. FP8 goes through its bytes: torch does not index it everywhere."""
    gathered = cache.view(torch.uint8)[blocks].view(cache.dtype) if cache.itemsize == 1 else cache[blocks]
    return gathered.transpose(1, 2).flatten(0, 1)[:seq_len]


def to_classic_layout(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies in vLLM's layouts: keys [num_blocks, num_kv_heads, head_dim / x, block_size, x] with x = 16 bytes / item size, so that
    threads of a warp read 16 bytes each of neighbouring tokens; values [num_blocks, num_kv_heads, head_dim, block_size]
    (Kwon et al. 2023)."""
    x = 16 // key_cache.itemsize
    key = key_cache.reshape(*key_cache.shape[:3], -1, x).transpose(2, 3).contiguous()
    return key, value_cache.transpose(2, 3).contiguous()


def to_engine_layout(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of classic caches as [num_blocks, num_kv_heads, block_size, head_dim]: undoes `to_classic_layout`."""
    return key_cache.transpose(2, 3).flatten(3).contiguous(), value_cache.transpose(2, 3).contiguous()
