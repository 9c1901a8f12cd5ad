"""Rotary embedding with the cache write on the CPU: kernels/csrc/cpu_rotary_embedding.cpp, one call instead of a dozen torch ops."""

from __future__ import annotations

import ctypes
import functools
import logging

import torch

from kernels.build import KernelBuildError, Library, load
from kernels.cpu_thread_pool import run_on_threads

ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}


_log = logging.getLogger(__name__)


class _Arguments(ctypes.Structure):
    """Mirrors `RotaryArguments` of kernels/csrc/cpu_rotary_embedding.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "positions", "slots", "cos", "sin", "key_cache", "value_cache")),
        ("run_on_threads", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("query_stride", "query_head_stride", "key_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_stride", "value_head_stride")),
        *((name, ctypes.c_int64) for name in ("k_block_stride", "k_head_stride", "v_block_stride", "v_head_stride")),
        *((name, ctypes.c_int64) for name in ("max_positions", "num_slots", "num_tokens", "num_slot_entries")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size", "num_threads")),
    )


def libraries() -> list[Library]:
    """What images build ahead of time."""
    return [_library(dtype) for dtype in ELEMENTS]


def _library(dtype: torch.dtype) -> Library:
    return Library("cpu_rotary_embedding.cpp", {"ELEMENT": ELEMENTS[dtype]})


@functools.cache
def kernel(dtype: torch.dtype) -> ctypes._NamedFuncPointer | None:
    """None: it cannot be built here."""
    try:
        loaded = load(_library(dtype)).cpu_rotary_embedding_and_cache
        run_on_threads()
    except (KernelBuildError, OSError) as error:
        _log.warning("rotary embedding on the CPU runs on torch, which is slower for chunks: %s", error)
        return None
    loaded.argtypes, loaded.restype = [ctypes.c_void_p], ctypes.c_int64
    return loaded


def prepare(dtype: torch.dtype) -> None:
    """Build and load the kernel, once; not while a request waits."""
    kernel(dtype)


def rotate(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """`rotary_embedding`. False: nothing was done, torch has to. Raises IndexError for a position that does not exist."""
    launcher = kernel(query.dtype)
    if launcher is None:
        return False
    arguments = _Arguments(
        query.data_ptr(), key.data_ptr(), None, positions.data_ptr(), None, cos.data_ptr(), sin.data_ptr(), None, None, run_on_threads(),
        *query.stride()[:2], *key.stride()[:2], 0, 0, 0, 0, 0, 0,
        len(cos), 0, len(query), 0, query.shape[1], key.shape[1], query.shape[2], 2 * cos.shape[1], 1, torch.get_num_threads(),
    )  # fmt: skip
    wrong = launcher(ctypes.byref(arguments))
    if wrong >= 0:
        raise outside(wrong, positions, len(cos), None, 0)
    return True


def rotate_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> bool:
    """`rotary_embedding_and_cache` for caches in the engine's layout and the query's type. False: nothing was done, since there is no
    kernel or the tensors are not laid out so. Raises IndexError for a position or slot that does not exist."""
    dtype = query.dtype
    if not (query.dim() == key.dim() == value.dim() == 3 and key_cache.dim() == value_cache.dim() == 4):
        return False
    if not (dtype == key.dtype == value.dtype == key_cache.dtype == value_cache.dtype and dtype in ELEMENTS):
        return False
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, num_kv_heads, block_size, _ = cache_shape = key_cache.shape
    strides = query.stride(), key.stride(), value.stride()
    k_strides, v_strides = key_cache.stride(), value_cache.stride()
    if not (
        key.shape == value.shape == (num_tokens, num_kv_heads, head_dim)
        and value_cache.shape == cache_shape
        and cache_shape[3] == head_dim
        and strides[0][2] == strides[1][2] == strides[2][2] == 1
        and k_strides[2:] == v_strides[2:] == (head_dim, 1)
        and positions.shape == (num_tokens,)
        and cos.shape == sin.shape
        and 2 * cos.shape[1] <= head_dim
        and len(slot_mapping) <= num_tokens
        and positions.dtype == slot_mapping.dtype == torch.int64
        and cos.dtype == sin.dtype == torch.float32
        and positions.is_contiguous() and slot_mapping.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    ):  # fmt: skip
        return False
    launcher = kernel(dtype)
    if launcher is None:
        return False
    arguments = _Arguments(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        key_cache.data_ptr(), value_cache.data_ptr(), run_on_threads(),
        *strides[0][:2], *strides[1][:2], *strides[2][:2], *k_strides[:2], *v_strides[:2],
        len(cos), num_blocks * block_size, num_tokens, len(slot_mapping), num_heads, num_kv_heads, head_dim, 2 * cos.shape[1], block_size,
        torch.get_num_threads(),
    )  # fmt: skip
    wrong = launcher(ctypes.byref(arguments))
    if wrong >= 0:
        raise outside(wrong, positions, len(cos), slot_mapping, num_blocks * block_size)
    return True


def outside(token: int, positions: torch.Tensor, max_positions: int, slot_mapping: torch.Tensor | None, num_slots: int) -> IndexError:
    """What is said of a token whose position or slot does not exist."""
    slot = -1 if slot_mapping is None or token >= len(slot_mapping) else int(slot_mapping[token])
    return IndexError(
        f"token {token}: position {int(positions[token])} is not in a table of {max_positions}, or slot {slot} not in the cache of "
        f"{num_slots} slots"
    )
