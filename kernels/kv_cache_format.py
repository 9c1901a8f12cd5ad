"""What a layer's KV cache holds and where: layout, number type and scales, as the ops take them and as the kernels are told.

Layouts of one layer (x = 16 bytes / item size), both strided over blocks and heads:
  the engine's  K, V [num_blocks, num_kv_heads, block_size, head_dim]
  classic       K [num_blocks, num_kv_heads, head_dim / x, block_size, x], V [num_blocks, num_kv_heads, head_dim, block_size]
"""

from __future__ import annotations

import ctypes

import torch

SCALARS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""How the launchers call the types of keys and values."""
FP8_KINDS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""How they call what a cache is quantised to; 0 is not at all."""
FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""By the names of `kv_cache_dtype`, beside "auto"."""


class CacheArguments(ctypes.Structure):
    """Mirrors `kv_write::Cache` of kernels/csrc/kv_write.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("key", "value", "k_scale", "v_scale")),
        *((name, ctypes.c_int64) for name in ("k_block_stride", "k_head_stride", "v_block_stride", "v_head_stride", "num_slots")),
        *((name, ctypes.c_int) for name in ("block_size", "x")),
    )

    @classmethod
    def of(
        cls, key_cache: torch.Tensor, value_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
    ) -> CacheArguments:
        block_size = block_size_of(key_cache, value_cache)
        return cls(
            key=key_cache.data_ptr(), value=value_cache.data_ptr(),
            k_scale=None if k_scale is None else k_scale.data_ptr(), v_scale=None if v_scale is None else v_scale.data_ptr(),
            k_block_stride=key_cache.stride(0), k_head_stride=key_cache.stride(1),
            v_block_stride=value_cache.stride(0), v_head_stride=value_cache.stride(1),
            num_slots=len(key_cache) * block_size, block_size=block_size, x=key_cache.shape[4] if key_cache.dim() == 5 else 0,
        )  # fmt: skip


def block_size_of(key_cache: torch.Tensor, value_cache: torch.Tensor) -> int:
    return value_cache.shape[3 if key_cache.dim() == 5 else 2]


def typed_caches(
    key_cache: torch.Tensor, value_cache: torch.Tensor, kv_cache_dtype: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches in the type that `kv_cache_dtype` names: bytes are viewed as FP8. `dtype`: of keys and values. Raises ValueError."""
    if kv_cache_dtype != "auto" and kv_cache_dtype not in FP8_DTYPES:
        raise ValueError(f"kv_cache_dtype must be auto, {', '.join(FP8_DTYPES)}, not {kv_cache_dtype!r}")
    wanted = FP8_DTYPES.get(kv_cache_dtype, dtype)
    if wanted in FP8_KINDS:
        key_cache, value_cache = (cache.view(wanted) if cache.dtype == torch.uint8 else cache for cache in (key_cache, value_cache))
    if key_cache.dtype != wanted or value_cache.dtype != wanted:
        raise ValueError(f"the caches are {key_cache.dtype} and {value_cache.dtype}; kv_cache_dtype {kv_cache_dtype!r} means {wanted}")
    return key_cache, value_cache


def check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor, num_kv_heads: int, head_dim: int) -> None:
    """Raises ValueError where the shapes are neither layout's or a block's head is not contiguous."""
    if key_cache.dim() == 5:
        x, block_size = 16 // key_cache.element_size(), key_cache.shape[3]
        shapes: tuple[tuple[int, ...], ...] = ((num_kv_heads, head_dim // x, block_size, x), (num_kv_heads, head_dim, block_size))
        if head_dim % x:
            raise ValueError(f"the classic key layout holds {x} items together and head_dim {head_dim} is no multiple: use the engine's")
    else:
        shapes = ((num_kv_heads, key_cache.shape[2] if key_cache.dim() == 4 else -1, head_dim),) * 2
    for name, cache, shape in (("key_cache", key_cache, shapes[0]), ("value_cache", value_cache, shapes[1])):
        if cache.shape != (len(key_cache), *shape):
            raise ValueError(f"{name} must be [{len(key_cache)}, {', '.join(map(str, shape))}], not {list(cache.shape)}")
        expected = 1
        for size, stride in zip(reversed(cache.shape[2:]), reversed(cache.stride()[2:]), strict=True):
            if size > 1 and stride != expected:
                raise ValueError(f"{name} must be contiguous within a block and head; its strides are {cache.stride()}")
            expected *= size


def scale_tensor(scale: float | torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """One fp32 number on the device, None for 1. A tensor is taken as it is, so that nothing waits for the GPU."""
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1:
            raise ValueError(f"k_scale and v_scale are one number for the whole cache, not {list(scale.shape)}")
        return scale.to(device=device, dtype=torch.float32)
    if not scale > 0:
        raise ValueError(f"k_scale and v_scale must be greater than 0, not {scale}")
    return None if scale == 1.0 else _constant(float(scale), device)


_constants: dict[tuple[float, torch.device], torch.Tensor] = {}
"""Kept for good: a captured graph may read them."""


def _constant(value: float, device: torch.device) -> torch.Tensor:
    if (value, device) not in _constants:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Written when the graph is replayed and not before: of no use to anybody else.
            return torch.full((1,), value, dtype=torch.float32, device=device)
        # A copy from the host is waited for, so that every stream finds the value.
        _constants[value, device] = torch.tensor([value], dtype=torch.float32).to(device)
    return _constants[value, device]
