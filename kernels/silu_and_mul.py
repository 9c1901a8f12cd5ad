"""silu(gate) * up, the gated activation of Llama's feed-forward part (Shazeer 2020)."""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels import cpu_elementwise, reference
from kernels.build import Library, launch, load
from kernels.op_library import LIBRARY

SCALARS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

LIBRARY.define("silu_and_mul(Tensor x) -> Tensor")


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [num_rows, 2 * size] = [gate | up], fp16, bf16 or fp32, rows may be strided. Returns a new [num_rows, size], fp32 inside.
    Raises ValueError."""
    if x.dim() != 2 or x.shape[1] % 2 or (x.stride(1) != 1 and x.numel()):
        raise ValueError(f"x must be [num_rows, 2 * size] with contiguous rows, not {list(x.shape)} with strides {x.stride()}")
    if x.dtype not in SCALARS:
        raise ValueError(f"x is {x.dtype}; give float16, bfloat16 or float32")
    if not x.is_cuda and (activated := cpu_elementwise.silu_and_mul(x)) is not None:
        return activated  # past the dispatcher, which costs a decode step on the CPU more than the kernel does
    result: torch.Tensor = torch.ops.pagewire.silu_and_mul(x)
    return result


def libraries() -> list[Library]:
    """What a server on a GPU loads."""
    return [Library("silu_and_mul.cu")]


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = load(libraries()[0])
    loaded.launch_silu_and_mul.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    loaded.launch_silu_and_mul.restype = ctypes.c_char_p
    return loaded


def _empty_like_half(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)


def _silu_and_mul_cuda(x: torch.Tensor) -> torch.Tensor:
    out = _empty_like_half(x)
    launch(_library().launch_silu_and_mul, x.device, out.data_ptr(), x.data_ptr(), x.stride(0), *out.shape, SCALARS[x.dtype])
    return out


def _silu_and_mul_cpu(x: torch.Tensor) -> torch.Tensor:
    result = cpu_elementwise.silu_and_mul(x)
    return reference.silu_and_mul(x) if result is None else result


LIBRARY.impl("silu_and_mul", _silu_and_mul_cpu, "CPU")
LIBRARY.impl("silu_and_mul", _silu_and_mul_cuda, "CUDA")
LIBRARY.impl("silu_and_mul", _empty_like_half, "Meta")
