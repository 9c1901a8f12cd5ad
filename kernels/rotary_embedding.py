"""Rotary position embedding (Su et al. 2021) of queries and keys in place, alone or together with the write of K and V into the cache.

The half-split convention: item i of a head is rotated with item i + rotary_dim / 2; items past rotary_dim stay as they are.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels import cpu_rotary_embedding, reference
from kernels.build import Library, launch, load
from kernels.cache_ops import check_new_tokens, check_same_device, check_slots, is_debugging
from kernels.kv_cache_format import FP8_KINDS, SCALARS, CacheArguments, block_size_of, check_caches, scale_tensor, typed_caches
from kernels.op_library import LIBRARY

LIBRARY.define("rotary_embedding(Tensor(a!) query, Tensor(b!) key, Tensor positions, Tensor cos, Tensor sin) -> ()")
LIBRARY.define(
    "rotary_embedding_and_cache(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor positions, Tensor cos, Tensor sin, "
    "Tensor(c!) key_cache, Tensor(d!) value_cache, Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale) -> ()"
)


def rotary_embedding(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate in place. query: [num_tokens, num_heads, head_dim], key: [num_tokens, num_kv_heads, head_dim], fp16, bf16 or fp32, strided
    but for head_dim, such as slices of a fused projection; positions: int64 [num_tokens]; cos, sin: fp32 [max_positions,
    rotary_dim / 2], contiguous. On the GPU a row whose position is outside the table stays as it is. Raises ValueError."""
    _check(query, key, positions, cos, sin)
    torch.ops.pagewire.rotary_embedding(query, key, positions, cos, sin)


def rotary_embedding_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    *,
    debug: bool | None = None,
) -> None:
    """`rotary_embedding`, then `reshape_and_cache` of the rotated keys, in one pass over them; see both for what is expected. All rows
    are rotated, those that slot_mapping gives a slot are also cached."""
    if not query.is_cuda and kv_cache_dtype == "auto" and k_scale == v_scale == 1.0:
        # Past the checks below and the dispatcher, which cost a decode step on the CPU more than the kernel does.
        tokens = query, key, value, positions, cos, sin
        if cpu_rotary_embedding.rotate_and_cache(*tokens, key_cache, value_cache, slot_mapping):
            return
    _check(query, key, positions, cos, sin)
    check_new_tokens(key, value, slot_mapping)
    key_cache, value_cache = typed_caches(key_cache, value_cache, kv_cache_dtype, key.dtype)
    check_caches(key_cache, value_cache, key.shape[1], key.shape[2])
    check_same_device(key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    if is_debugging(debug):
        check_slots(slot_mapping, len(key_cache) * block_size_of(key_cache, value_cache))
    scales = (scale_tensor(k_scale, key.device), scale_tensor(v_scale, key.device))
    torch.ops.pagewire.rotary_embedding_and_cache(query, key, value, positions, cos, sin, key_cache, value_cache, slot_mapping, *scales)


def _check(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dim() != 3 or tensor.shape[::2] != query.shape[::2] or (tensor.stride(2) != 1 and tensor.numel()):
            raise ValueError(
                f"{name} must be [num_tokens, heads, head_dim] with head_dim contiguous, as many tokens and items as query; it is "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )
        if tensor.dtype not in SCALARS or tensor.dtype != query.dtype:
            raise ValueError(f"{name} is {tensor.dtype}; give float16, bfloat16 or float32, the same for query and key")
    if positions.shape != query.shape[:1] or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ValueError(f"positions must be contiguous int64 [{len(query)}], not {list(positions.shape)} {positions.dtype}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 2 or table.shape != cos.shape or table.dtype != torch.float32 or not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous float32 [max_positions, rotary_dim / 2], not {list(table.shape)} {table.dtype}")
    if 2 * cos.shape[1] > query.shape[2]:
        raise ValueError(f"cos has {cos.shape[1]} columns and head_dim is {query.shape[2]}; rotary_dim must not exceed it")
    check_same_device(query, key=key, positions=positions, cos=cos, sin=sin)


class _Tokens(ctypes.Structure):
    """Mirrors `Tokens` of kernels/csrc/rotary_embedding.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "positions", "slots", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("query_stride", "query_head_stride", "key_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_stride", "value_head_stride", "max_positions")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_slot_entries", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
    )


def libraries() -> list[Library]:
    """What a server on a GPU loads."""
    return [Library("rotary_embedding.cu")]


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = load(libraries()[0])
    loaded.launch_rotary_embedding.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    loaded.launch_rotary_embedding.restype = ctypes.c_char_p
    for index, structure in enumerate((_Tokens, CacheArguments)):
        size = loaded.rotary_embedding_struct_bytes(index)
        assert size == ctypes.sizeof(structure), f"{structure.__name__} differs between Python and CUDA"
    return loaded


def _tokens(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> _Tokens:
    return _Tokens(
        query=query.data_ptr(), key=key.data_ptr(), positions=positions.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(),
        query_stride=query.stride(0), query_head_stride=query.stride(1), key_stride=key.stride(0), key_head_stride=key.stride(1),
        max_positions=cos.shape[0], num_tokens=query.shape[0], num_heads=query.shape[1], num_kv_heads=key.shape[1],
        head_dim=query.shape[2], rotary_dim=2 * cos.shape[1],
    )  # fmt: skip


def _rotary_embedding_cuda(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    tokens, cache = _tokens(query, key, positions, cos, sin), CacheArguments()
    launch(_library().launch_rotary_embedding, query.device, ctypes.byref(tokens), ctypes.byref(cache), SCALARS[query.dtype], 0)


def _rotary_embedding_and_cache_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    tokens = _tokens(query, key, positions, cos, sin)
    tokens.value, tokens.value_stride, tokens.value_head_stride = value.data_ptr(), value.stride(0), value.stride(1)
    tokens.slots, tokens.num_slot_entries = slot_mapping.data_ptr(), len(slot_mapping)
    cache = CacheArguments.of(key_cache, value_cache, k_scale, v_scale)
    kind = FP8_KINDS.get(key_cache.dtype, 0)
    launch(_library().launch_rotary_embedding, query.device, ctypes.byref(tokens), ctypes.byref(cache), SCALARS[query.dtype], kind)


def _rotary_embedding_cpu(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if cpu_rotary_embedding.rotate(query, key, positions, cos, sin):
        return
    _refuse_outside(positions, len(cos), None, 0)
    cos, sin = cos[positions], sin[positions]
    for rows in (query, key):
        rows.copy_(reference.rotary_embedding(rows.float(), cos, sin))


def _refuse_outside(positions: torch.Tensor, max_positions: int, slot_mapping: torch.Tensor | None, num_slots: int) -> None:
    """Before anything is written: IndexError for a position outside the table (-1 would mean its last row) or a slot outside the cache."""
    wrong = (positions < 0) | (positions >= max_positions)
    if slot_mapping is not None:
        wrong[: len(slot_mapping)] |= (slot_mapping < -1) | (slot_mapping >= num_slots)
    if bool(wrong.any()):
        raise cpu_rotary_embedding.outside(int(wrong.nonzero()[0]), positions, max_positions, slot_mapping, num_slots)


def _rotary_embedding_and_cache_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    if cpu_rotary_embedding.rotate_and_cache(query, key, value, positions, cos, sin, key_cache, value_cache, slot_mapping):
        return
    _refuse_outside(positions, len(cos), slot_mapping, len(key_cache) * block_size_of(key_cache, value_cache))
    torch.ops.pagewire.rotary_embedding(query, key, positions, cos, sin)
    torch.ops.pagewire.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


LIBRARY.impl("rotary_embedding", _rotary_embedding_cpu, "CPU")
LIBRARY.impl("rotary_embedding", _rotary_embedding_cuda, "CUDA")
LIBRARY.impl("rotary_embedding", lambda *_: None, "Meta")
LIBRARY.impl("rotary_embedding_and_cache", _rotary_embedding_and_cache_cpu, "CPU")
LIBRARY.impl("rotary_embedding_and_cache", _rotary_embedding_and_cache_cuda, "CUDA")
LIBRARY.impl("rotary_embedding_and_cache", lambda *_: None, "Meta")
