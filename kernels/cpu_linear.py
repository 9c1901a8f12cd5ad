"""Linear layers on the CPU with weights as their file stores them: kernels/csrc/cpu_linear.cpp.

Inputs, products and sums are fp32; with `is_int16` the inputs of a quantized weight are rounded, group by group (32, for Q6_K 16), to whole
multiples of the 32767th part of the largest, and their products are integers. A row's result does not depend on the other rows or the
threads.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.build import KernelBuildError, Library, check, load
from kernels.cpu_thread_pool import run_on_threads

_log = logging.getLogger(__name__)

FORMATS = {"F32": 0, "F16": 1, "BF16": 2, "Q4_0": 3, "Q4_1": 4, "Q8_0": 5, "Q4_K": 6, "Q6_K": 7}
"""By the names of GGML, of which safetensors has the first three: as `with_format` of cpu_linear.cpp numbers them."""


class _Weight(ctypes.Structure):
    """Mirrors `Weight` of kernels/csrc/cpu_linear.h."""

    _fields_ = (("panels", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("num_outputs", "num_inputs", "format", "is_int16")))


class _Arguments(ctypes.Structure):
    """Mirrors `LinearArguments` of kernels/csrc/cpu_linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "bias", "out", "run_on_threads")),
        *((name, ctypes.c_int64) for name in ("num_rows", "x_stride", "out_stride", "num_threads", "is_added")),
    )


def libraries() -> list[Library]:
    """What images build ahead of time."""
    return [Library("cpu_linear.cpp")]


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        loaded = load(libraries()[0])
        run_on_threads()
    except (KernelBuildError, OSError) as error:
        _log.warning("linear layers on the CPU run on torch with weights in fp32, which is several times slower in decode: %s", error)
        return None
    loaded.cpu_linear.argtypes, loaded.cpu_linear.restype = [ctypes.c_void_p], ctypes.c_char_p
    loaded.cpu_linear_nbytes.argtypes, loaded.cpu_linear_nbytes.restype = [ctypes.c_void_p], ctypes.c_int64
    loaded.cpu_linear_pack.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int,
    ]  # fmt: skip
    loaded.cpu_linear_pack.restype = loaded.cpu_linear_rows.restype = None
    loaded.cpu_linear_rows.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return loaded


def kernel() -> ctypes._NamedFuncPointer | None:
    """None: it cannot be built here."""
    library = _library()
    return None if library is None else library.cpu_linear


def prepare() -> bool:
    """Build and load the kernel, once; seconds where it was never built, so not while a request waits. False: torch has to serve."""
    return _library() is not None


@dataclass(frozen=True)
class StoredRows:
    """Rows of a weight as they lie in a file."""

    type_name: str
    """One of FORMATS."""
    data: NDArray[np.uint8]
    """Contiguous, whole rows."""
    shape: tuple[int, int]
    """[num_outputs, num_inputs]."""
    row_order: NDArray[np.int64] | None = None
    """Row i of the weight is row `row_order[i]` of the file; None: as they lie."""
    is_int16: bool = False
    """Whether the inputs of a quantized weight are rounded to 16 bits."""


def packed_nbytes(type_name: str, shape: tuple[int, int]) -> int:
    """What a weight takes once it is packed. Needs `prepare()`. Raises ValueError."""
    library = _library()
    assert library is not None, "prepare() said there is no kernel"
    nbytes: int = library.cpu_linear_nbytes(ctypes.byref(_Weight(None, *shape, FORMATS[type_name])))
    if nbytes < 0:
        raise ValueError(f"rows of {shape[1]} are not whole {type_name} blocks")
    return nbytes


class PackedWeight:
    """A weight [num_outputs, num_inputs] of one format, repacked for the kernel: as many bytes as in the file, but for K-quants, whose
    scales become fp32. Needs `prepare()`."""

    def __init__(self, type_name: str, shape: tuple[int, int], panels: torch.Tensor | None = None, *, is_int16: bool = False) -> None:
        """Zeros. `panels`: those of another weight, of which this one is the leading outputs. `is_int16`: as in StoredRows. Raises
        ValueError."""
        library = _library()
        assert library is not None, "prepare() said there is no kernel"
        self._library = library
        self.type_name, self.shape, self.is_int16 = type_name, shape, is_int16
        nbytes = packed_nbytes(type_name, shape)
        self._weight = _Weight(None, *shape, FORMATS[type_name], is_int16)
        self._panels = torch.zeros(nbytes, dtype=torch.uint8) if panels is None else panels
        self._weight.panels = self._panels.data_ptr()
        self._address = ctypes.addressof(self._weight)

    @classmethod
    def pack(cls, parts: Sequence[StoredRows]) -> PackedWeight:
        """`parts`: of one format and number of inputs; their outputs side by side. Raises ValueError."""
        type_name, num_inputs = parts[0].type_name, parts[0].shape[1]
        if any(part.type_name != type_name or part.shape[1] != num_inputs for part in parts):
            raise ValueError("a packed weight has one format and one number of inputs")
        weight = cls(type_name, (sum(part.shape[0] for part in parts), num_inputs), is_int16=parts[0].is_int16)
        first = 0
        for part in parts:
            data = np.ascontiguousarray(part.data)
            order = None if part.row_order is None else np.ascontiguousarray(part.row_order, np.int64)
            weight._library.cpu_linear_pack(
                weight._address, first, data.ctypes.data, None if order is None else order.ctypes.data, part.shape[0],
                run_on_threads(), torch.get_num_threads(),
            )  # fmt: skip
            first += part.shape[0]
        return weight

    def leading(self, num_outputs: int) -> PackedWeight:
        """The first outputs alone, in the same memory."""
        return PackedWeight(self.type_name, (num_outputs, self.shape[1]), self._panels, is_int16=self.is_int16)

    @property
    def nbytes(self) -> int:
        return len(self._panels)

    @property
    def address(self) -> int:
        """Of the kernel's `Weight`, which lives as long as this object."""
        return self._address

    def linear(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None, *, is_added: bool = False) -> None:
        """out = x W^T + bias, or with `is_added` out += that. x: [num_rows, num_inputs], out: [num_rows, num_outputs], both with contiguous
        rows; bias: [num_outputs]. All fp32 on the CPU. Raises ValueError."""
        num_outputs, num_inputs = self.shape
        num_rows = len(x)
        _check_rows("x", x, num_rows, num_inputs)
        _check_rows("out", out, num_rows, num_outputs)
        if bias is not None and (bias.shape != (num_outputs,) or bias.dtype is not torch.float32 or not bias.is_contiguous()):
            raise ValueError(f"bias must be contiguous float32 [{num_outputs}], not {bias.dtype} {list(bias.shape)}")
        arguments = _Arguments(
            self._address, x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), run_on_threads(),
            num_rows, x.stride(0), out.stride(0), torch.get_num_threads(), is_added,
        )  # fmt: skip
        check(self._library.cpu_linear(ctypes.byref(arguments)))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """indices: int64 [n], of outputs -> fp32 [n, num_inputs]. Raises IndexError."""
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < self.shape[0]:
            raise IndexError(f"rows are 0 to {self.shape[0] - 1}")
        indices = indices.contiguous()
        out = torch.empty(len(indices), self.shape[1])
        self._library.cpu_linear_rows(self._address, indices.data_ptr(), len(indices), out.data_ptr())
        return out


def _check_rows(name: str, rows: torch.Tensor, num_rows: int, size: int) -> None:
    if rows.shape != (num_rows, size) or rows.dtype is not torch.float32 or (rows.stride(1) != 1 and rows.numel()):
        raise ValueError(
            f"{name} must be float32 [{num_rows}, {size}] with contiguous rows, not {rows.dtype} {list(rows.shape)} with strides "
            f"{rows.stride()}"
        )
