"""Chunked-prefill attention for Hopper: wgmma and tensor copies through the block table (csrc/flash_attention_sm90.cuh).

Serves what most models ask for; kernels/flash_attention.py sends the rest to Triton.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

import torch

from kernels.build import Library, launch, load

HEAD_DIMS = (64, 128)
TILE_ROWS = 128
_SCALARS = {torch.float16: 0, torch.bfloat16: 1}


class _Params(ctypes.Structure):
    """`Params` of flash_attention_sm90.cuh, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "query", "block_tables", "query_start_loc", "seq_lens")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("num_seqs", "num_kv_heads", "group_size", "block_size", "num_blocks")),
        *((name, ctypes.c_int) for name in ("max_context", "max_tiles")),
        *((name, ctypes.c_int64) for name in ("query_stride", "query_head_stride", "out_stride", "block_table_stride")),
    )


def library(head_dim: int, dtype: torch.dtype) -> Library:
    return Library("flash_attention_sm90.cu", {"HEAD_SIZE": head_dim, "SCALAR": _SCALARS[dtype]}, only_arch="sm_90a")


def libraries(head_dims: tuple[int, ...] = HEAD_DIMS) -> Iterator[Library]:
    """What a server with these head sizes may load on a Hopper GPU."""
    for head_dim in head_dims:
        if head_dim in HEAD_DIMS:
            for dtype in _SCALARS:
                yield library(head_dim, dtype)


@functools.cache
def _library(head_dim: int, dtype: torch.dtype) -> ctypes.CDLL:
    loaded = load(library(head_dim, dtype))
    loaded.flash_attention_sm90.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *([ctypes.c_int64] * 4),
        ctypes.c_void_p,
    ]
    loaded.flash_attention_sm90.restype = ctypes.c_char_p
    assert loaded.flash_attention_params_bytes() == ctypes.sizeof(_Params), "Params differ between Python and CUDA"
    return loaded


@functools.cache
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) == (9, 0)


def can_serve(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | None,
    soft_cap: float | None,
) -> bool:
    """On this GPU, these types, shapes and options: no ALiBi, window or soft cap, a cache in the query's dtype."""
    return (
        _is_hopper(query.device.index)
        and query.dtype in _SCALARS
        and key_cache.dtype == query.dtype
        and query.shape[2] in HEAD_DIMS
        and alibi_slopes is None
        and sliding_window is None
        and soft_cap is None
        and all(tensor.data_ptr() % 16 == 0 for tensor in (out, query, key_cache, value_cache))
        and all(stride % 8 == 0 for tensor in (query, key_cache, value_cache) for stride in tensor.stride()[:2])
        and out.stride(0) % 8 == 0
        and out.stride(1) == query.shape[2]
    )


def flash_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
) -> None:
    """Arguments as kernels/flash_attention.py, where they are checked; `can_serve` must hold."""
    num_seqs = len(seq_lens)
    num_blocks, num_kv_heads, block_size, head_dim = key_cache.shape
    group_size = query.shape[1] // num_kv_heads
    max_tiles = -(-max_query_len * group_size // TILE_ROWS)
    if num_seqs * max_tiles == 0:
        return
    params = _Params(
        out=out.data_ptr(),
        query=query.data_ptr(),
        block_tables=block_tables.data_ptr(),
        query_start_loc=query_start_loc.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        scale=scale,
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        block_size=block_size,
        num_blocks=num_blocks,
        max_context=block_tables.shape[1] * block_size,
        max_tiles=max_tiles,
        query_stride=query.stride(0),
        query_head_stride=query.stride(1),
        out_stride=out.stride(0),
        block_table_stride=block_tables.stride(0),
    )
    strides = (key_cache.stride(0), key_cache.stride(1), value_cache.stride(0), value_cache.stride(1))
    launcher = _library(head_dim, query.dtype).flash_attention_sm90
    launch(launcher, query.device, ctypes.addressof(params), key_cache.data_ptr(), value_cache.data_ptr(), *strides)
