"""RMS norm and gated activation on the CPU in fp32: kernels/csrc/cpu_elementwise.cpp, one pass where torch takes several."""

from __future__ import annotations

import ctypes
import functools
import logging

import torch

from kernels.build import KernelBuildError, Library, load
from kernels.cpu_thread_pool import run_on_threads

_log = logging.getLogger(__name__)


def libraries() -> list[Library]:
    """What images build ahead of time."""
    return [Library("cpu_elementwise.cpp")]


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        loaded = load(libraries()[0])
        run_on_threads()
    except (KernelBuildError, OSError) as error:
        _log.warning("norms and activations on the CPU run on torch, which is slower: %s", error)
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    loaded.cpu_rms_norm.argtypes = [pointer, size, pointer, ctypes.c_float, size, size, pointer, pointer, ctypes.c_int]
    loaded.cpu_silu_and_mul.argtypes = [pointer, size, size, size, pointer, pointer, ctypes.c_int]
    loaded.cpu_rms_norm.restype = loaded.cpu_silu_and_mul.restype = None
    return loaded


def kernels() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer] | None:
    """RMS norm and gated activation. None: they cannot be built here."""
    library = _library()
    return None if library is None else (library.cpu_rms_norm, library.cpu_silu_and_mul)


def prepare() -> None:
    """Build and load the kernels, once; not while a request waits."""
    _library()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """x: fp32 [num_rows, size] with contiguous rows; weight: fp32 [size]. None: nothing was done, torch has to."""
    library = _library()
    if library is None or x.dtype is not torch.float32:
        return None
    num_rows, size = x.shape
    out = torch.empty(num_rows, size)
    library.cpu_rms_norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), eps, num_rows, size, out.data_ptr(), run_on_threads(), torch.get_num_threads()
    )
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor | None:
    """x: fp32 [num_rows, 2 * size] = [gate | up] with contiguous rows. None: nothing was done, torch has to."""
    library = _library()
    if library is None or x.dtype is not torch.float32:
        return None
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_rows, size)
    library.cpu_silu_and_mul(x.data_ptr(), x.stride(0), num_rows, size, out.data_ptr(), run_on_threads(), torch.get_num_threads())
    return out
