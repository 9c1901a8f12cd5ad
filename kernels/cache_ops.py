"""Writing new keys and values into the paged KV cache, and moving whole blocks: copy-on-write, swapping, to and from a staging buffer.

Rows are blocks: a cache is any tensor whose first dimension counts blocks and whose blocks are contiguous, such as the engine's whole
cache (a block over all layers is one piece of memory) or one layer's K or V in a classic layout.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Sequence

import torch

from kernels import reference
from kernels.build import Library, launch, load
from kernels.kv_cache_format import FP8_KINDS, SCALARS, CacheArguments, block_size_of, check_caches, scale_tensor, typed_caches
from kernels.op_library import LIBRARY

LIBRARY.define(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, Tensor? k_scale, "
    "Tensor? v_scale) -> ()"
)
LIBRARY.define("copy_blocks(Tensor(a!) cache, Tensor block_mapping) -> ()")
LIBRARY.define("swap_blocks(Tensor source, Tensor(a!) target, Tensor block_mapping) -> ()")
LIBRARY.define("gather_blocks(Tensor cache, Tensor block_ids, Tensor(a!) staging) -> ()")
LIBRARY.define("scatter_blocks(Tensor staging, Tensor block_ids, Tensor(a!) cache) -> ()")


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    *,
    debug: bool | None = None,
) -> None:
    """Write token i to slot slot_mapping[i] = block * block_size + offset; a slot of -1 is padding and writes nothing.

    key, value: [num_tokens, num_kv_heads, head_dim], fp16, bf16 or fp32, strided but for head_dim; rows past the end of slot_mapping
    (int64 [<= num_tokens]) are ignored. Caches: either layout (kernels/kv_cache_format.py) in the key's dtype ("auto") or FP8, which
    holds key / k_scale and value / v_scale, saturated. A slot outside the cache is never written: on the CPU it raises IndexError; on
    the GPU it is skipped, and raises when `debug` (default: PAGEWIRE_DEBUG) asks for the check, which waits for the GPU.
    Raises ValueError for what does not fit together. (Kwon et al. 2023)"""
    check_new_tokens(key, value, slot_mapping)
    key_cache, value_cache = typed_caches(key_cache, value_cache, kv_cache_dtype, key.dtype)
    check_caches(key_cache, value_cache, key.shape[1], key.shape[2])
    check_same_device(key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    if is_debugging(debug):
        check_slots(slot_mapping, len(key_cache) * block_size_of(key_cache, value_cache))
    scales = (scale_tensor(k_scale, key.device), scale_tensor(v_scale, key.device))
    torch.ops.pagewire.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, *scales)


def copy_blocks(caches: torch.Tensor | Sequence[torch.Tensor], block_mapping: torch.Tensor, *, debug: bool | None = None) -> None:
    """Copy block block_mapping[i, 0] over block block_mapping[i, 1] of every cache (copy-on-write of a forked sequence's tail).

    block_mapping: int64 [num_pairs, 2] on the caches' device; no block may be both source and target, or target twice."""
    for cache in [caches] if isinstance(caches, torch.Tensor) else caches:
        _check_blocks("cache", cache)
        _check_mapping(block_mapping, cache.device)
        if is_debugging(debug) or not cache.is_cuda:
            _check_block_ids(block_mapping, len(cache))
        torch.ops.pagewire.copy_blocks(cache, block_mapping)


def swap_blocks(source: torch.Tensor, target: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """Copy block block_mapping[i, 0] of `source` over block block_mapping[i, 1] of `target`, for caches of any two devices.

    block_mapping: int64 [num_pairs, 2] on the CPU. Pinned memory does not make the host wait; synchronise before touching it."""
    _check_blocks("source", source)
    _check_blocks("target", target)
    _check_mapping(block_mapping, torch.device("cpu"))
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"source and target hold blocks of {list(source.shape[1:])} {source.dtype} and {list(target.shape[1:])} {target.dtype}"
        )
    _check_block_ids(block_mapping[:, 0], len(source))
    _check_block_ids(block_mapping[:, 1], len(target))
    torch.ops.pagewire.swap_blocks(source, target, block_mapping)


def gather_blocks(cache: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor, *, debug: bool | None = None) -> None:
    """Copy block block_ids[i] of the cache to row i of `staging`, all blocks in one launch.

    block_ids: int64 [n] on the cache's device. staging: contiguous, n blocks in shape or in bytes, on the cache's device or in pinned
    memory of the host. An id outside the cache leaves its row as it was; on the CPU, or with `debug`, it raises IndexError."""
    _check_staging(cache, block_ids, staging, debug)
    torch.ops.pagewire.gather_blocks(cache, block_ids, staging)


def scatter_blocks(staging: torch.Tensor, block_ids: torch.Tensor, cache: torch.Tensor, *, debug: bool | None = None) -> None:
    """Copy row i of `staging` over block block_ids[i] of the cache: undoes `gather_blocks`, whose conditions hold. Ids must differ."""
    _check_staging(cache, block_ids, staging, debug)
    torch.ops.pagewire.scatter_blocks(staging, block_ids, cache)


# ---- checks: shapes, types and places only, so that nothing waits for the GPU ---------------------------------------------
def is_debugging(debug: bool | None) -> bool:
    return os.environ.get("PAGEWIRE_DEBUG", "0") not in ("", "0") if debug is None else debug


def check_new_tokens(key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    if key.dim() != 3 or key.shape != value.shape or key.dtype != value.dtype:
        raise ValueError(
            f"key and value must be [num_tokens, num_kv_heads, head_dim] of one type, not {list(key.shape)} {key.dtype} and "
            f"{list(value.shape)} {value.dtype}"
        )
    if key.dtype not in SCALARS:
        raise ValueError(f"key must be float16, bfloat16 or float32, not {key.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.stride(2) != 1 and tensor.numel():
            raise ValueError(f"{name} must be contiguous along head_dim; its strides are {tensor.stride()}")
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 [num_tokens], not {list(slot_mapping.shape)} {slot_mapping.dtype}")
    if len(slot_mapping) > len(key):
        raise ValueError(f"slot_mapping has {len(slot_mapping)} entries and key {len(key)} rows; give at most one per row")


def check_same_device(first: torch.Tensor, **others: torch.Tensor) -> None:
    for name, tensor in others.items():
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device} and should be on {first.device}; move it there")


def check_slots(slot_mapping: torch.Tensor, num_slots: int) -> None:
    """Raises IndexError. Waits for the GPU."""
    outside = slot_mapping[(slot_mapping < -1) | (slot_mapping >= num_slots)]
    if len(outside):
        raise IndexError(f"slot {int(outside[0])} is outside the cache of {num_slots} slots")


def _check_block_ids(block_ids: torch.Tensor, num_blocks: int) -> None:
    outside = block_ids[(block_ids < 0) | (block_ids >= num_blocks)]
    if len(outside):
        raise IndexError(f"block {int(outside[0])} is outside the cache of {num_blocks} blocks")


def _check_blocks(name: str, cache: torch.Tensor) -> None:
    expected = 1
    for size, stride in zip(reversed(cache.shape[1:]), reversed(cache.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            raise ValueError(f"{name} must have contiguous blocks (all but its first dimension); its strides are {cache.stride()}")
        expected *= size


def _check_mapping(block_mapping: torch.Tensor, device: torch.device) -> None:
    if block_mapping.dim() != 2 or block_mapping.shape[1] != 2 or block_mapping.dtype != torch.int64 or not block_mapping.is_contiguous():
        raise ValueError(f"block_mapping must be contiguous int64 [num_pairs, 2], not {list(block_mapping.shape)} {block_mapping.dtype}")
    if block_mapping.device != device:
        raise ValueError(f"block_mapping is on {block_mapping.device} and should be on {device}; move it there")


def _check_staging(cache: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor, debug: bool | None) -> None:
    _check_blocks("cache", cache)
    if block_ids.dim() != 1 or block_ids.dtype != torch.int64 or not block_ids.is_contiguous() or block_ids.device != cache.device:
        raise ValueError(
            f"block_ids must be contiguous int64 [n] on {cache.device}, not {list(block_ids.shape)} {block_ids.dtype} on {block_ids.device}"
        )
    block_nbytes = _block_nbytes(cache)
    if not staging.is_contiguous() or staging.nbytes != len(block_ids) * block_nbytes:
        raise ValueError(f"staging must be contiguous and hold {len(block_ids)} blocks of {block_nbytes} bytes; it has {staging.nbytes}")
    if staging.device != cache.device and not (staging.device.type == "cpu" and staging.is_pinned()):
        raise ValueError(f"staging is on {staging.device}; give memory of {cache.device} or pinned memory of the host")
    if is_debugging(debug) or not cache.is_cuda:
        _check_block_ids(block_ids, len(cache))


def _block_nbytes(cache: torch.Tensor) -> int:
    return math.prod(cache.shape[1:]) * cache.element_size()


# ---- on the GPU -----------------------------------------------------------------------------------------------------------
class _NewTokens(ctypes.Structure):
    """Mirrors `NewTokens` of kernels/csrc/cache_ops.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("key", "value", "slots")),
        *((name, ctypes.c_int64) for name in ("key_stride", "key_head_stride", "value_stride", "value_head_stride")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_heads", "head_dim")),
    )


class _Rows(ctypes.Structure):
    """Mirrors `Rows` of kernels/csrc/cache_ops.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "ids")),
        *((name, ctypes.c_int64) for name in ("stride_bytes", "id_step", "num_rows")),
    )


def libraries() -> list[Library]:
    """What a server on a GPU loads."""
    return [Library("cache_ops.cu")]


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = load(libraries()[0])
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    loaded.launch_reshape_and_cache.argtypes = [pointer, pointer, ctypes.c_int, ctypes.c_int, pointer]
    loaded.launch_copy_rows.argtypes = [pointer, pointer, int64, int64, pointer]
    loaded.launch_swap_rows.argtypes = [pointer, pointer, pointer, int64, int64, pointer]
    for launcher in (loaded.launch_reshape_and_cache, loaded.launch_copy_rows, loaded.launch_swap_rows):
        launcher.restype = ctypes.c_char_p
    for index, structure in enumerate((_NewTokens, CacheArguments, _Rows)):
        assert loaded.cache_ops_struct_bytes(index) == ctypes.sizeof(structure), f"{structure.__name__} differs between Python and CUDA"
    return loaded


def _reshape_and_cache_cuda(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    tokens = _NewTokens(
        key.data_ptr(), value.data_ptr(), slot_mapping.data_ptr(), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        len(slot_mapping), key.shape[1], key.shape[2],
    )  # fmt: skip
    cache = CacheArguments.of(key_cache, value_cache, k_scale, v_scale)
    kind = FP8_KINDS.get(key_cache.dtype, 0)
    launch(_library().launch_reshape_and_cache, key.device, ctypes.byref(tokens), ctypes.byref(cache), SCALARS[key.dtype], kind)


def _rows(cache: torch.Tensor, ids: torch.Tensor | None = None, column: int = 0) -> _Rows:
    """Blocks named by `ids`, or by a column of a mapping."""
    address = None if ids is None else ids.data_ptr() + column * ids.element_size()
    return _Rows(cache.data_ptr(), address, cache.stride(0) * cache.element_size(), 1 if ids is None else ids.stride(0), len(cache))


def _copy_rows(to: _Rows, source: _Rows, num_pairs: int, cache: torch.Tensor) -> None:
    arguments = (ctypes.byref(to), ctypes.byref(source), num_pairs, _block_nbytes(cache))
    launch(_library().launch_copy_rows, cache.device, *arguments)


def _copy_blocks_cuda(cache: torch.Tensor, block_mapping: torch.Tensor) -> None:
    _copy_rows(_rows(cache, block_mapping, 1), _rows(cache, block_mapping, 0), len(block_mapping), cache)


def _staging_rows(staging: torch.Tensor, cache: torch.Tensor, num_rows: int) -> _Rows:
    return _Rows(staging.data_ptr(), None, _block_nbytes(cache), 1, num_rows)


def _gather_blocks_cuda(cache: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    _copy_rows(_staging_rows(staging, cache, len(block_ids)), _rows(cache, block_ids), len(block_ids), cache)


def _scatter_blocks_cuda(staging: torch.Tensor, block_ids: torch.Tensor, cache: torch.Tensor) -> None:
    _copy_rows(_rows(cache, block_ids), _staging_rows(staging, cache, len(block_ids)), len(block_ids), cache)


def _swap_blocks_cuda(source: torch.Tensor, target: torch.Tensor, block_mapping: torch.Tensor) -> None:
    device = source.device if source.is_cuda else target.device
    if source.stride(0) * source.element_size() != _block_nbytes(source) or target.stride(0) != source.stride(0):
        raise ValueError("source and target must be contiguous to be swapped between devices")
    arguments = (target.data_ptr(), source.data_ptr(), block_mapping.data_ptr(), len(block_mapping), _block_nbytes(source))
    launch(_library().launch_swap_rows, device, *arguments)


# ---- on the CPU -----------------------------------------------------------------------------------------------------------
def _reshape_and_cache_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    block_size = block_size_of(key_cache, value_cache)
    check_slots(slot_mapping, len(key_cache) * block_size)
    is_mapped = slot_mapping >= 0
    slots = slot_mapping[is_mapped]
    blocks, offsets = slots // block_size, slots % block_size
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        stored = reference.quantize(rows[: len(slot_mapping)][is_mapped], cache.dtype, 1.0 if scale is None else float(scale))
        memory = cache
        if cache.itemsize == 1:  # torch does not index FP8 everywhere
            memory, stored = cache.view(torch.uint8), stored.view(torch.uint8)
        if cache.dim() == 5:
            memory[blocks, :, :, offsets] = stored.view(*stored.shape[:2], -1, cache.shape[4])
        elif key_cache.dim() == 5:
            memory[blocks, :, :, offsets] = stored
        else:
            memory[blocks, :, offsets] = stored


def _bytes(cache: torch.Tensor) -> torch.Tensor:
    """[num_blocks, block_nbytes] of the same memory."""
    return cache.as_strided((len(cache), _block_nbytes(cache) // cache.itemsize), (cache.stride(0), 1)).view(torch.uint8)


def _staged(staging: torch.Tensor, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    return staging.view(torch.uint8).view(num_blocks, _block_nbytes(cache))


def _copy_blocks_cpu(cache: torch.Tensor, block_mapping: torch.Tensor) -> None:
    memory = _bytes(cache)
    memory[block_mapping[:, 1]] = memory[block_mapping[:, 0]]


def _swap_blocks_cpu(source: torch.Tensor, target: torch.Tensor, block_mapping: torch.Tensor) -> None:
    _bytes(target)[block_mapping[:, 1]] = _bytes(source)[block_mapping[:, 0]]


def _gather_blocks_cpu(cache: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    torch.index_select(_bytes(cache), 0, block_ids, out=_staged(staging, cache, len(block_ids)))


def _scatter_blocks_cpu(staging: torch.Tensor, block_ids: torch.Tensor, cache: torch.Tensor) -> None:
    _bytes(cache)[block_ids] = _staged(staging, cache, len(block_ids))


for _name, _on_cpu, _on_cuda in (
    ("reshape_and_cache", _reshape_and_cache_cpu, _reshape_and_cache_cuda),
    ("copy_blocks", _copy_blocks_cpu, _copy_blocks_cuda),
    ("swap_blocks", _swap_blocks_cpu, _swap_blocks_cuda),
    ("gather_blocks", _gather_blocks_cpu, _gather_blocks_cuda),
    ("scatter_blocks", _scatter_blocks_cpu, _scatter_blocks_cuda),
):
    LIBRARY.impl(_name, _on_cpu, "CPU")
    LIBRARY.impl(_name, _on_cuda, "CUDA")
    LIBRARY.impl(_name, lambda *_: None, "Meta")
