"""Linear layers of few rows, as fast as the weight is read (csrc/skinny_linear.cuh, Hopper), with the norm before and the activation or the
residual addition after in the same kernel. Elsewhere, and where cuBLAS is faster, the separate ops one after the other.

A row's result does not depend on how many rows there are, nor on the others, as long as `can_serve` holds for their number.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.build import Library, launch, load
from kernels.op_library import LIBRARY
from kernels.rms_norm import rms_norm
from kernels.silu_and_mul import silu_and_mul

MAX_ROWS = 32
MAX_NORM_ROWS = 16
"""With more the normalised x leaves too little shared memory to the ring."""
_SCALARS = {torch.float16: 0, torch.bfloat16: 1}
_CHUNK, _BOX_ROWS = 64, 32
_MAX_X_BYTES = 64 << 10
"""Of a block's share of a normalised x, which stays in shared memory beside the ring that the weight passes through."""
_NUM_BLOCKS = {1: 132, 2: 132, 4: 120}
"""That run at once on an H200, by the size of a cluster."""

LIBRARY.define("skinny_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, float eps, bool silu, bool overlap) -> Tensor")
LIBRARY.define("skinny_linear_add(Tensor(a!) residual, Tensor x, Tensor weight, Tensor? bias, bool overlap) -> ()")


class _Params(ctypes.Structure):
    """`Params` of skinny_linear.cuh, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "x", "norm_weight", "bias")),
        *((name, ctypes.c_int64) for name in ("out_stride", "x_stride")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("num_rows", "num_outputs", "num_inputs", "num_boxes", "num_stages", "is_gated", "is_added")),
    )


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    silu: bool = False,
    overlap: bool = False,
) -> torch.Tensor:
    """F.linear(x, weight, bias), of rms_norm(x, norm_weight, eps) where a norm is given, and then silu_and_mul where `silu`; rounded where
    these ops round.

    x: [num_rows, K], rows may be strided; weight: [N, K]; bias: [N]; norm_weight: [K]. Returns a new [num_rows, N], or [num_rows, N / 2].
    `overlap`: the kernel may begin to read the weight before the one before it in the stream has ended (programmatic dependent launch);
    so no work in the stream may still be writing the weights. Raises ValueError."""
    _check(x, weight, bias, norm_weight)
    if silu and len(weight) % 2:
        raise ValueError(f"silu needs a weight of gate and up, so an even number of rows, not {len(weight)}")
    result: torch.Tensor = torch.ops.pagewire.skinny_linear(x, weight, bias, norm_weight, eps, silu, overlap)
    return result


def skinny_linear_add(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    overlap: bool = False,
) -> None:
    """residual += F.linear(x, weight, bias), in place; what is added is rounded to its type first. residual: [num_rows, N], its rows may be
    strided, and it shares no memory with x. The rest as `skinny_linear`."""
    _check(x, weight, bias, None)
    if residual.shape != (len(x), len(weight)) or residual.dtype != x.dtype or residual.device != x.device:
        raise ValueError(
            f"residual must be [{len(x)}, {len(weight)}] {x.dtype} on {x.device}, not {list(residual.shape)} {residual.dtype} "
            f"on {residual.device}"
        )
    torch.ops.pagewire.skinny_linear_add(residual, x, weight, bias, overlap)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [num_rows, K] and the weight [N, K], not {list(x.shape)} and {list(weight.shape)}")
    for name, tensor, size in (("bias", bias, weight.shape[0]), ("norm_weight", norm_weight, weight.shape[1])):
        if tensor is not None and (tensor.shape != (size,) or not tensor.is_contiguous()):
            raise ValueError(f"{name} must be contiguous [{size}], not {list(tensor.shape)} with strides {tensor.stride()}")
    for name, tensor in (("weight", weight), ("bias", bias), ("norm_weight", norm_weight)):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; give {x.dtype} on {x.device} like x")


class Plan(NamedTuple):
    """How the work is cut up."""

    num_boxes: int
    """Of 32 rows of the weight, that a tile has."""
    num_splits: int
    """Blocks of a cluster, which split K."""


def choose(num_rows: int, num_outputs: int, num_inputs: int, *, has_norm: bool = False, silu: bool = False) -> Plan | None:
    """None where F.linear, or with a norm the separate ops, are to do it. The number of rows decides about that and no more, so that it
    changes no result.

    Measured on an H200 with an earlier revision (bf16, us a product, over weights that L2 does not hold, overlapped; cuBLAS in brackets):

    | N x K         | plan | 8 rows        | 32 rows       |
    | ------------- | ---- | ------------- | ------------- |
    | 6144 x 4096   | 3, 2 | 14.8 (15.7)   | 16.7 (16.3)   |
    | 4096 x 4096   | 2, 2 | 12.3 (13.3)   | 13.0 (14.0)   |
    | 28672 x 4096  | 2, 2 | 61.1 (61.8)   | 62.4 (63.1)   |
    | 4096 x 14336  | 2, 2 | 31.8 (32.5)   | 32.8 (33.7)   |
    | 128256 x 4096 | 2, 2 | 252.2 (250.1) | 262.0 (269.8) |
    | 960 x 576     | 2, 4 | 2.9 (3.4)     |               |
    | 3072 x 576    | 2, 2 | 3.2 (4.2)     |               |
    | 576 x 1536    | 2, 4 | 3.1 (5.2)     |               |
    | 49152 x 576   | 4, 1 | 20.2 (17.9)   |               |
    """
    if num_outputs % 8 or num_inputs % 8 or not 0 < num_rows <= (MAX_NORM_ROWS if has_norm else MAX_ROWS):
        return None
    num_tiles = -(-num_outputs // (2 * _BOX_ROWS))
    num_splits = 4 if 4 * num_tiles <= _NUM_BLOCKS[4] else 2
    if num_tiles > _NUM_BLOCKS[1] and num_inputs < 2048:  # many short sums: a tile ends before the ring is of use
        return None
    if has_norm and -(-num_inputs // (_CHUNK * num_splits)) * (8 if num_rows <= 8 else 16) * _CHUNK * 2 > _MAX_X_BYTES:
        return None

    def time_of(num_boxes: int) -> int:
        """In boxes that the busiest cluster reads."""
        return -(-num_outputs // (num_boxes * _BOX_ROWS) * num_splits // _NUM_BLOCKS[num_splits]) * num_boxes

    return Plan(2 if silu else min((2, 3), key=time_of), num_splits)


def can_serve(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu: bool = False,
) -> bool:
    """Whether the kernel does it: on a Hopper GPU, fp16 or bf16, up to MAX_ROWS rows (MAX_NORM_ROWS with a norm), N and K multiples of 8, a
    contiguous weight, addresses and row strides that allow vector loads, and no shape that `choose` leaves to cuBLAS."""
    return _plan(x, weight, norm_weight, residual, silu) is not None


def _plan(
    x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor | None, residual: torch.Tensor | None, silu: bool
) -> Plan | None:
    is_served = (
        x.is_cuda
        and x.dtype in _SCALARS
        and weight.is_contiguous()
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and (weight.data_ptr() | x.data_ptr()) % 16 == 0
        and (norm_weight is None or norm_weight.data_ptr() % 16 == 0)
        and (residual is None or (residual.stride(1) == 1 and residual.stride(0) % 4 == 0 and residual.data_ptr() % 8 == 0))
        and _is_hopper(x.device.index)
    )
    return choose(len(x), *weight.shape, has_norm=norm_weight is not None, silu=silu) if is_served else None


@functools.cache
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) == (9, 0)


def libraries() -> list[Library]:
    """What a server on a Hopper GPU loads."""
    return [Library("skinny_linear.cu", only_arch="sm_90a")]


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = load(libraries()[0])
    loaded.launch_skinny_linear.argtypes = [*(ctypes.c_void_p,) * 2, *(ctypes.c_int,) * 3, ctypes.c_void_p]
    loaded.launch_skinny_linear.restype = ctypes.c_char_p
    assert loaded.skinny_linear_params_bytes() == ctypes.sizeof(_Params), "Params differ between Python and CUDA"
    return loaded


def _run(
    plan: Plan,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    overlap: bool,
    *,
    is_gated: bool = False,
    is_added: bool = False,
) -> None:
    params = _Params(
        out.data_ptr(), x.data_ptr(), None if norm_weight is None else norm_weight.data_ptr(), None if bias is None else bias.data_ptr(),
        out.stride(0), x.stride(0), eps, len(x), *weight.shape, plan.num_boxes, 0, is_gated, is_added,
    )  # fmt: skip
    launcher = _library().launch_skinny_linear
    launch(launcher, x.device, ctypes.addressof(params), weight.data_ptr(), plan.num_splits, overlap, _SCALARS[x.dtype])


def _separate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    silu: bool,
    *_: object,
) -> torch.Tensor:
    y = F.linear(x if norm_weight is None else rms_norm(x, norm_weight, eps), weight, bias)
    return silu_and_mul(y) if silu else y


def _separate_add(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: object) -> None:
    residual.add_(F.linear(x, weight, bias))


def _cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    silu: bool,
    overlap: bool,
) -> torch.Tensor:
    plan = _plan(x, weight, norm_weight, None, silu)
    if plan is None:
        return _separate(x, weight, bias, norm_weight, eps, silu)
    out = torch.empty(len(x), len(weight) // 2 if silu else len(weight), dtype=x.dtype, device=x.device)
    _run(plan, out, x, weight, bias, norm_weight, eps, overlap, is_gated=silu)
    return out


def _cuda_add(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    overlap: bool,
) -> None:
    plan = _plan(x, weight, None, residual, False)
    if plan is None:
        _separate_add(residual, x, weight, bias)
    else:
        _run(plan, residual, x, weight, bias, None, 0.0, overlap, is_added=True)


def _meta(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    silu: bool,
    *_: object,
) -> torch.Tensor:
    return x.new_empty(len(x), len(weight) // 2 if silu else len(weight))


LIBRARY.impl("skinny_linear", _separate, "CPU")
LIBRARY.impl("skinny_linear", _cuda, "CUDA")
LIBRARY.impl("skinny_linear", _meta, "Meta")
LIBRARY.impl("skinny_linear_add", _separate_add, "CPU")
LIBRARY.impl("skinny_linear_add", _cuda_add, "CUDA")
LIBRARY.impl("skinny_linear_add", lambda *_: None, "Meta")
