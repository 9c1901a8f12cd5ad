"""Rows as E4M3, each with a factor of its own: activations on their way into an FP8 matrix product, weights once when they are loaded."""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels import reference
from kernels.build import Library, launch, load
from kernels.op_library import LIBRARY

SCALARS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

LIBRARY.define("quantize_rows(Tensor x) -> (Tensor, Tensor)")


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [num_rows, size], fp16, bf16 or fp32, rows may be strided. Returns E4M3 values [num_rows, size] and fp32 factors [num_rows, 1],
    whose product is x to within 1/16 of each item or 2^-10 of a factor. A row that is not finite stays none. Raises ValueError."""
    if x.dim() != 2 or (x.stride(1) != 1 and x.numel()):
        raise ValueError(f"x must be [num_rows, size] with contiguous rows, not {list(x.shape)} with strides {x.stride()}")
    if x.dtype not in SCALARS:
        raise ValueError(f"x is {x.dtype}; give float16, bfloat16 or float32")
    values, factors = torch.ops.pagewire.quantize_rows(x)
    return values, factors


def libraries() -> list[Library]:
    """What a server on a GPU loads."""
    return [Library("quantize_rows.cu")]


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = load(libraries()[0])
    loaded.launch_quantize_rows.argtypes = [*(ctypes.c_void_p,) * 3, ctypes.c_int64, *(ctypes.c_int,) * 3, ctypes.c_void_p]
    loaded.launch_quantize_rows.restype = ctypes.c_char_p
    return loaded


def _empty(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return values, torch.empty(len(x), 1, dtype=torch.float32, device=x.device)


def _quantize_rows_cuda(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, factors = _empty(x)
    arguments = (values.data_ptr(), factors.data_ptr(), x.data_ptr(), x.stride(0), *x.shape, SCALARS[x.dtype])
    launch(_library().launch_quantize_rows, x.device, *arguments)
    return values, factors


LIBRARY.impl("quantize_rows", reference.quantize_rows, "CPU")
LIBRARY.impl("quantize_rows", _quantize_rows_cuda, "CUDA")
LIBRARY.impl("quantize_rows", _empty, "Meta")
