"""RMS norm (Zhang & Sennrich 2019), alone or with the residual addition before it: x / sqrt(mean(x^2) + eps) * weight, fp32 inside."""

from __future__ import annotations

import ctypes
import functools

import torch
import torch.nn.functional as F

from kernels import cpu_elementwise
from kernels.build import Library, launch, load
from kernels.op_library import LIBRARY

SCALARS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
LIBRARY.define("fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [num_rows, size], rows may be strided; weight: [size] in the type of x (fp16, bf16, fp32). Returns a new contiguous tensor.
    Raises ValueError."""
    _check("x", x, x, weight)
    if not x.is_cuda and (normed := cpu_elementwise.rms_norm(x, weight, eps)) is not None:
        return normed  # past the dispatcher, which costs a decode step on the CPU more than the kernel does
    result: torch.Tensor = torch.ops.pagewire.rms_norm(x, weight, eps)
    return result


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """residual += x, then x = rms_norm(residual), both in place. Shapes as rms_norm; the sum is rounded to its type before the norm, so
    that the result is that of the two ops one after the other. Raises ValueError."""
    _check("x", x, x, weight)
    _check("residual", residual, x, weight)
    torch.ops.pagewire.fused_add_rms_norm(x, residual, weight, eps)


def _check(name: str, rows: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    if rows.dim() != 2 or rows.shape != x.shape or (rows.stride(1) != 1 and rows.numel()):
        raise ValueError(
            f"{name} must be {list(x.shape[:1])} rows contiguous in themselves, not {list(rows.shape)} with strides {rows.stride()}"
        )
    if rows.dtype not in SCALARS or rows.dtype != x.dtype or rows.device != x.device:
        raise ValueError(f"{name} is {rows.dtype} on {rows.device}; give float16, bfloat16 or float32 like x, on {x.device}")
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype or weight.device != x.device or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous [{x.shape[1]}] {x.dtype} on {x.device}, not {list(weight.shape)} {weight.dtype}")


def libraries() -> list[Library]:
    """What a server on a GPU loads."""
    return [Library("rms_norm.cu")]


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = load(libraries()[0])
    loaded.launch_rms_norm.argtypes = [
        *(ctypes.c_void_p,) * 4, *(ctypes.c_int64,) * 3, ctypes.c_int, ctypes.c_int, ctypes.c_float, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    loaded.launch_rms_norm.restype = ctypes.c_char_p
    return loaded


def _run(out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> None:
    residual_address, residual_stride = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    launch(
        _library().launch_rms_norm, x.device, out.data_ptr(), x.data_ptr(), residual_address, weight.data_ptr(),
        out.stride(0), x.stride(0), residual_stride, x.shape[0], x.shape[1], eps, SCALARS[x.dtype],
    )  # fmt: skip


def _rms_norm_cuda(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(out, x, None, weight, eps)
    return out


def _fused_add_rms_norm_cuda(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    _run(x, x, residual, weight, eps)


def _rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    result = cpu_elementwise.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps) if result is None else result


def _fused_add_rms_norm_cpu(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    x.copy_(_rms_norm_cpu(residual.add_(x), weight, eps))


LIBRARY.impl("rms_norm", _rms_norm_cpu, "CPU")
LIBRARY.impl("rms_norm", _rms_norm_cuda, "CUDA")
LIBRARY.impl("rms_norm", lambda x, weight, eps: torch.empty(x.shape, dtype=x.dtype, device=x.device), "Meta")
LIBRARY.impl("fused_add_rms_norm", _fused_add_rms_norm_cpu, "CPU")
LIBRARY.impl("fused_add_rms_norm", _fused_add_rms_norm_cuda, "CUDA")
LIBRARY.impl("fused_add_rms_norm", lambda *_: None, "Meta")
