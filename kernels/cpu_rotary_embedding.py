"""Rotary embedding with the cache write on the CPU: kernels/csrc/cpu_rotary_embedding.cpp, one call instead of a dozen torch ops."""

from __future__ import annotations

import ctypes
import functools
import logging

import torch

from kernels.build import KernelBuildError, Library, load

ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}


_log = logging.getLogger(__name__)


class _Arguments(ctypes.Structure):
    """Mirrors `Arguments` of kernels/csrc/cpu_rotary_embedding.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "positions", "slots", "cos", "sin", "key_cache", "value_cache")),
        *((name, ctypes.c_int64) for name in ("query_stride", "query_head_stride", "key_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_stride", "value_head_stride")),
        *((name, ctypes.c_int64) for name in ("k_block_stride", "k_head_stride", "v_block_stride", "v_head_stride")),
        *((name, ctypes.c_int64) for name in ("max_positions", "num_slots", "num_tokens", "num_slot_entries")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size")),
    )


def libraries() -> list[Library]:
    """What images build ahead of time."""
    return [_library(dtype) for dtype in ELEMENTS]


def _library(dtype: torch.dtype) -> Library:
    return Library("cpu_rotary_embedding.cpp", {"ELEMENT": ELEMENTS[dtype]})


@functools.cache
def _kernel(dtype: torch.dtype) -> ctypes._NamedFuncPointer | None:
    try:
        kernel = load(_library(dtype)).cpu_rotary_embedding_and_cache
    except (KernelBuildError, OSError) as error:
        _log.warning("rotary embedding on the CPU runs on torch, which is slower for chunks: %s", error)
        return None
    kernel.argtypes, kernel.restype = [ctypes.c_void_p], ctypes.c_int64
    return kernel


def prepare(dtype: torch.dtype) -> None:
    """Build and load the kernel, once; not while a request waits."""
    _kernel(dtype)


def rotate(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """`rotary_embedding`. False: nothing was done, torch has to. Raises IndexError for a position that does not exist."""
    return _run(_arguments(query, key, positions, cos, sin), query, positions, None)


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
    """`rotary_embedding_and_cache` for caches in the engine's layout and the query's type. False: nothing was done, torch has to. Raises
    IndexError for a position or slot that does not exist."""
    if key_cache.dim() != 4 or key_cache.dtype != query.dtype:
        return False
    arguments = _arguments(query, key, positions, cos, sin)
    arguments.value, arguments.value_stride, arguments.value_head_stride = value.data_ptr(), value.stride(0), value.stride(1)
    arguments.key_cache, arguments.value_cache = key_cache.data_ptr(), value_cache.data_ptr()
    arguments.k_block_stride, arguments.k_head_stride = key_cache.stride(0), key_cache.stride(1)
    arguments.v_block_stride, arguments.v_head_stride = value_cache.stride(0), value_cache.stride(1)
    arguments.block_size, arguments.num_slots = key_cache.shape[2], len(key_cache) * key_cache.shape[2]
    arguments.slots, arguments.num_slot_entries = slot_mapping.data_ptr(), len(slot_mapping)
    return _run(arguments, query, positions, slot_mapping)


def _arguments(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> _Arguments:
    return _Arguments(
        query=query.data_ptr(), key=key.data_ptr(), positions=positions.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(),
        query_stride=query.stride(0), query_head_stride=query.stride(1), key_stride=key.stride(0), key_head_stride=key.stride(1),
        max_positions=len(cos), num_tokens=len(query), num_heads=query.shape[1], num_kv_heads=key.shape[1], head_dim=query.shape[2],
        rotary_dim=2 * cos.shape[1], block_size=1,
    )  # fmt: skip


def _run(arguments: _Arguments, query: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor | None) -> bool:
    kernel = _kernel(query.dtype)
    if kernel is None:
        return False
    wrong = kernel(ctypes.byref(arguments))
    if wrong >= 0:
        raise outside(wrong, positions, arguments.max_positions, slot_mapping, arguments.num_slots)
    return True


def outside(token: int, positions: torch.Tensor, max_positions: int, slot_mapping: torch.Tensor | None, num_slots: int) -> IndexError:
    """What is said of a token whose position or slot does not exist."""
    slot = -1 if slot_mapping is None or token >= len(slot_mapping) else int(slot_mapping[token])
    return IndexError(
        f"token {token}: position {int(positions[token])} is not in a table of {max_positions}, or slot {slot} not in the cache of "
        f"{num_slots} slots"
    )
