"""Chunked-prefill attention over the paged cache: one op, `torch.ops.pagewire.flash_attention`, whichever kernel serves it.

Meaning: kernels/reference.py `paged_attention`. On a GPU: the Hopper kernel where it can serve (kernels/flash_attention_sm90.py), else
Triton (kernels/flash_attention_triton.py).
"""

from __future__ import annotations

import torch

from kernels import cpu_attention, flash_attention_sm90, reference
from kernels.cpu_attention import CPUPagedAttention
from kernels.op_library import LIBRARY

HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

LIBRARY.define(
    "flash_attention(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor query_start_loc, "
    "Tensor seq_lens, int max_query_len, int max_seq_len, float scale, Tensor? alibi_slopes, int? sliding_window, float? soft_cap, "
    "float k_scale, float v_scale) -> ()"
)


def flash_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    *,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exact causal attention of a ragged batch whose keys and values, the chunk's own included, stand in the paged cache.

    query: [num_tokens, num_heads, head_dim], head_dim contiguous (a slice of a fused projection will do); request i owns rows
    query_start_loc[i] : query_start_loc[i + 1], the last ones of its seq_lens[i] positions. key_cache, value_cache: [num_blocks,
    num_kv_heads, block_size, head_dim], the last two contiguous, in the query's dtype or FP8 (stored x k_scale = key). block_tables:
    int32 [num_seqs, max_blocks], not read past a sequence's end. query_start_loc: int32 [num_seqs + 1]; seq_lens: int32 [num_seqs];
    max_query_len and max_seq_len: upper bounds, so that nothing waits for the GPU. alibi_slopes: fp32 [num_heads]; sliding_window:
    how many positions a query sees, itself included; soft_cap: scores become soft_cap x tanh(score / soft_cap).

    Returns `out`, or a new tensor like the query. A sequence of length 0 gives zeros; rows that no request owns are unspecified.
    Raises ValueError. (Dao 2023; Kwon et al. 2023.)"""
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _check(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len, scale)
    _check_options(query, alibi_slopes, sliding_window, soft_cap, k_scale, v_scale, out)
    torch.ops.pagewire.flash_attention(
        out, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len, scale,
        alibi_slopes, sliding_window, soft_cap, k_scale, v_scale,
    )  # fmt: skip
    return out


def prepare(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Compile and load all that `flash_attention` may launch for tensors with these shapes, strides and dtypes, so that no request
    waits for a compiler. Shapes as there; of the query one row will do. Reads no block and writes nothing that stays."""
    if query.device.type == "cpu":
        cpu_attention.prepare(query.dtype, query.shape[2])
        return
    # Not at the top: a machine without a GPU has no Triton.
    from kernels import flash_attention_triton

    group, block_size = query.shape[1] // key_cache.shape[1], key_cache.shape[2]
    block_tables = torch.zeros(1, 1, dtype=torch.int32, device=query.device)
    # A kernel is chosen by query rows of a KV head.
    for num_rows in (16, 32, 64, 256):
        num_queries = max(1, num_rows // group)
        shape = (num_queries, *query.shape[1:])
        rows = torch.empty_strided(shape, query.stride(), dtype=query.dtype, device=query.device).zero_()
        lens = torch.tensor([0, num_queries], dtype=torch.int32, device=query.device)
        batch = (rows, key_cache, value_cache, block_tables, lens, lens[:1], num_queries, block_size, 1.0)
        out = flash_attention(*batch, alibi_slopes=alibi_slopes, sliding_window=sliding_window, soft_cap=soft_cap)
        # Both of Triton's by name: what the Hopper kernel takes of this size it leaves to Triton in a batch of another shape.
        for num_splits in (1, 2):
            flash_attention_triton.flash_attention(out, *batch, alibi_slopes, sliding_window, soft_cap, 1.0, 1.0, num_splits=num_splits)


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
) -> None:
    if query.dim() != 3 or query.stride(2) != 1:
        raise ValueError(f"query is {tuple(query.shape)}; give [num_tokens, num_heads, head_dim] with head_dim contiguous")
    _, num_heads, head_dim = query.shape
    if query.dtype not in DTYPES:
        raise ValueError(f"query is {query.dtype}; give one of {DTYPES}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"query has head_dim {head_dim}; supported are {HEAD_DIMS}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4 or cache.shape[3] != head_dim or cache.stride(3) != 1 or cache.stride(2) != head_dim:
            raise ValueError(
                f"{name} is {tuple(cache.shape)} with strides {cache.stride()}; give [num_blocks, num_kv_heads, block_size, {head_dim}] "
                "with the last two dimensions contiguous"
            )
        if cache.dtype != query.dtype and cache.dtype not in FP8_DTYPES:
            raise ValueError(f"{name} is {cache.dtype}; give the query's {query.dtype} or one of {FP8_DTYPES} (view uint8 as one of them)")
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError("value_cache differs from key_cache in shape or dtype; give both alike")
    num_kv_heads, block_size = key_cache.shape[1:3]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"query has {num_heads} heads and key_cache {num_kv_heads}; the first must be a multiple of the second")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"key_cache has block size {block_size}; supported are {BLOCK_SIZES}")
    num_seqs = seq_lens.numel()
    for name, indices, shape in (
        ("block_tables", block_tables, (num_seqs, block_tables.shape[-1] if block_tables.dim() else 0)),
        ("query_start_loc", query_start_loc, (num_seqs + 1,)),
        ("seq_lens", seq_lens, (num_seqs,)),
    ):
        if indices.shape != shape or indices.dtype != torch.int32 or (indices.numel() and indices.stride(-1) != 1):
            raise ValueError(f"{name} is {indices.dtype} {tuple(indices.shape)}; give int32 {shape}, contiguous in the last dimension")
    if max_seq_len > block_tables.shape[1] * block_size:
        raise ValueError(f"max_seq_len {max_seq_len} does not fit block_tables of {block_tables.shape[1]} blocks of {block_size} slots")
    if max_query_len < 0:
        raise ValueError(f"max_query_len {max_query_len} must be at least 0")
    if not scale > 0:
        raise ValueError(f"scale {scale} must be greater than 0")
    for name, tensor in (
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("block_tables", block_tables),
        ("query_start_loc", query_start_loc),
        ("seq_lens", seq_lens),
    ):
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} and query on {query.device}; move it there")


def _check_options(
    query: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
) -> None:
    if alibi_slopes is not None and (
        alibi_slopes.shape != query.shape[1:2]
        or alibi_slopes.dtype != torch.float32
        or alibi_slopes.device != query.device
        or not alibi_slopes.is_contiguous()
    ):
        raise ValueError(f"alibi_slopes is {alibi_slopes.dtype} {tuple(alibi_slopes.shape)} on {alibi_slopes.device}; give contiguous "
                         f"float32 [{query.shape[1]}] on {query.device}")  # fmt: skip
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window {sliding_window} must be at least 1, or None for all positions")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap {soft_cap} must be greater than 0, or None for none")
    if not k_scale > 0 or not v_scale > 0:
        raise ValueError(f"k_scale {k_scale} and v_scale {v_scale} must be greater than 0")
    if out.shape != query.shape or out.dtype != query.dtype or out.device != query.device or out.stride(2) != 1:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)} on {out.device}; give one like query with head_dim contiguous")


MIN_HOPPER_ROWS = 64
"""Query rows of a KV head (tokens x heads of the group) that fill at least half of the Hopper kernel's tile."""
MIN_HOPPER_TILES = 64
MAX_HOPPER_FEW_TILES_CONTEXT = 2048
"""With fewer tiles than this and a longer context, Triton's kernel wins: it cuts the keys into parts, which then run side by side."""


def _suits_hopper(query: torch.Tensor, key_cache: torch.Tensor, max_query_len: int, max_seq_len: int) -> bool:
    num_tokens, num_heads, _ = query.shape
    group = num_heads // key_cache.shape[1]
    if max_query_len * group < MIN_HOPPER_ROWS:
        return False
    num_tiles = -(-num_tokens * group // flash_attention_sm90.TILE_ROWS) * key_cache.shape[1]
    return num_tiles >= MIN_HOPPER_TILES or max_seq_len <= MAX_HOPPER_FEW_TILES_CONTEXT


def _on_cuda(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: float,
    v_scale: float,
) -> None:
    if key_cache.dtype not in FP8_DTYPES:
        k_scale = v_scale = 1.0
    if _suits_hopper(query, key_cache, max_query_len, max_seq_len) and flash_attention_sm90.can_serve(
        out, query, key_cache, value_cache, alibi_slopes, sliding_window, soft_cap
    ):
        flash_attention_sm90.flash_attention(
            out, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, max_query_len, scale
        )  # fmt: skip
        return
    # Not at the top: a machine without a GPU has no Triton.
    from kernels import flash_attention_triton

    flash_attention_triton.flash_attention(
        out, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len, scale,
        alibi_slopes, sliding_window, soft_cap, k_scale, v_scale,
    )  # fmt: skip


def _on_cpu(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: float,
    v_scale: float,
) -> None:
    tables, starts, lens = block_tables.tolist(), query_start_loc.tolist(), seq_lens.tolist()
    if key_cache.dtype not in FP8_DTYPES:
        attention = CPUPagedAttention(tables, starts, lens, key_cache.shape[2], query.shape[1], key_cache.shape[1])
        result = attention(
            query, key_cache, value_cache, scale, alibi_slopes=alibi_slopes, sliding_window=sliding_window, soft_cap=soft_cap
        )
    else:
        result = reference.paged_attention(
            query, key_cache, value_cache, tables, starts, lens, scale, alibi_slopes=alibi_slopes, sliding_window=sliding_window,
            soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
    out.copy_(result)


LIBRARY.impl("flash_attention", _on_cuda, "CUDA")
LIBRARY.impl("flash_attention", _on_cpu, "CPU")
# It writes to `out` and returns nothing: for a compiler there is nothing to infer.
LIBRARY.impl("flash_attention", lambda *_: None, "Meta")
