"""The meaning of every op in plain PyTorch, one request and one step at a time; what all faster paths are compared with.

Cache layout of one layer: [num_blocks, num_kv_heads, block_size, head_dim]. Addresses are computed in int64.
"""

from __future__ import annotations

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
    block_tables: list[list[int]],
    query_start_loc: list[int],
    seq_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Causal attention of a ragged batch over the paged cache.

    query: [num_tokens, num_heads, head_dim], flattened; request i owns rows query_start_loc[i] : query_start_loc[i + 1], the last
    rows of its seq_lens[i] positions. Keys and values past seq_len are not read, whatever the slots hold. fp32 inside."""
    out = torch.zeros_like(query)
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    for i, seq_len in enumerate(seq_lens):
        start, end = query_start_loc[i], query_start_loc[i + 1]
        if seq_len == 0 or start == end:
            continue
        blocks = torch.tensor(block_tables[i][: -(-seq_len // block_size)], dtype=torch.int64, device=query.device)
        key = key_cache[blocks].transpose(1, 2).reshape(-1, num_kv_heads, head_dim)[:seq_len].float()
        value = value_cache[blocks].transpose(1, 2).reshape(-1, num_kv_heads, head_dim)[:seq_len].float()
        rows = query[start:end].float().view(end - start, num_kv_heads, group, head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", rows, key) * scale
        positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        scores.masked_fill_(torch.arange(seq_len, device=query.device)[None, :] > positions[:, None], float("-inf"))
        out[start:end] = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), value).reshape(end - start, -1, head_dim).to(out.dtype)
    return out
