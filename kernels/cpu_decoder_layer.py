"""A decoder layer on the CPU in one call: kernels/csrc/cpu_decoder_layer.cpp, which calls the other kernels as Python would, with the same
results bit for bit and without what Python takes between them."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import cpu_attention, cpu_elementwise, cpu_linear, cpu_rotary_embedding
from kernels.build import KernelBuildError, Library, check, load
from kernels.cpu_attention import CPUPagedAttention
from kernels.cpu_linear import PackedWeight
from kernels.cpu_thread_pool import run_on_threads

_log = logging.getLogger(__name__)


def _fields(kind: type, *names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names)


class _Projection(ctypes.Structure):
    """Mirrors `Projection` of kernels/csrc/cpu_decoder_layer.cpp, as those below do theirs."""

    _fields_ = (*_fields(ctypes.c_void_p, "weights", "biases"), *_fields(ctypes.c_int64, "num_weights", "num_outputs"))


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_double))


class _Layer(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_void_p, "linear", "attention", "rotary_embedding_and_cache", "rms_norm", "silu_and_mul", "run_on_threads"),
        *_fields(_Norm, "input_norm", "post_attention_norm"),
        *_fields(_Projection, "qkv", "output", "gate_up", "down"),
        *_fields(ctypes.c_void_p, "cos", "sin", "key_cache", "value_cache"),
        *_fields(ctypes.c_int64, "max_positions", "rotary_dim", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "sliding_window"),
        *_fields(ctypes.c_int64, "num_slots", "block_size", "cache_block_stride", "cache_head_stride"),
        *_fields(ctypes.c_double, "scale", "soft_cap"),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_void_p, "x", "out", "positions", "slots", "rows", "attention"),
        *_fields(ctypes.c_int64, "num_tokens", "num_rows", "num_threads", "wrong_token"),
    )


def libraries() -> list[Library]:
    """What images build ahead of time."""
    return [Library("cpu_decoder_layer.cpp")]


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        loaded = load(libraries()[0])
    except (KernelBuildError, OSError) as error:
        _log.warning("kernels of a layer on the CPU are called one by one, which is slower for few tokens: %s", error)
        return None
    loaded.cpu_decoder_layer.argtypes, loaded.cpu_decoder_layer.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_char_p
    return loaded


def prepare() -> None:
    """Build and load the kernel, once; not while a request waits."""
    _library()


@dataclass(frozen=True)
class Projection:
    weights: Sequence[PackedWeight]  # their outputs side by side
    biases: Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Norm:
    weight: torch.Tensor  # fp32 [hidden_size]
    eps: float


@dataclass(frozen=True)
class LayerParts:
    """x += output(attention(rotary(qkv(norm(x))))), then x += down(silu(gate) * up) of gate_up(norm(x))."""

    input_norm: Norm
    qkv: Projection
    cos: torch.Tensor  # fp32 [max_positions, rotary_dim / 2]
    sin: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    output: Projection
    post_attention_norm: Norm
    gate_up: Projection
    down: Projection


class CPUDecoderLayer:
    def __init__(self, parts: LayerParts) -> None:
        """Raises LookupError where one of the kernels cannot be built."""
        library, elementwise = _library(), cpu_elementwise.kernels()
        linear, rotary = cpu_linear.kernel(), cpu_rotary_embedding.kernel(torch.float32)
        attention = cpu_attention.kernel(torch.float32, parts.head_dim)
        if library is None or elementwise is None or linear is None or rotary is None or attention is None:
            raise LookupError("a kernel is missing")
        self._kernel = library.cpu_decoder_layer
        self._parts = parts
        self._hidden_size = len(parts.input_norm.weight)
        self._arrays: list[ctypes.Array[ctypes.c_void_p]] = []
        self._key_cache: torch.Tensor | None = None
        max_positions, half = parts.cos.shape
        self._layer = _Layer(
            *(ctypes.cast(kernel, ctypes.c_void_p) for kernel in (linear, attention, rotary, *elementwise)),
            run_on_threads(),
            *((norm.weight.data_ptr(), norm.eps) for norm in (parts.input_norm, parts.post_attention_norm)),
            *(self._projection(projection) for projection in (parts.qkv, parts.output, parts.gate_up, parts.down)),
            parts.cos.data_ptr(), parts.sin.data_ptr(), None, None,
            max_positions, 2 * half, parts.num_heads, parts.num_kv_heads, parts.head_dim, self._hidden_size, parts.sliding_window or 0,
            0, 0, 0, 0, parts.scale, parts.soft_cap or 0.0,
        )  # fmt: skip
        self._address = ctypes.addressof(self._layer)

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: CPUPagedAttention,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """x: fp32 [num_tokens, hidden_size], which is written over; positions, slots: int64 [num_tokens]; caches: two views of one tensor,
        fp32 [num_blocks, num_kv_heads, block_size, head_dim], the last two dimensions contiguous. `rows`: int64, those whose output is
        wanted; None: all. Returns [len(rows), hidden_size]. Raises ValueError, and IndexError for a position or slot that does not
        exist."""
        num_tokens = len(x)
        if x.shape != (num_tokens, self._hidden_size) or x.dtype is not torch.float32 or not x.is_contiguous():
            raise ValueError(f"x must be contiguous float32 [num_tokens, {self._hidden_size}], not {x.dtype} {list(x.shape)}")
        for name, tensor in (("positions", positions), ("slots", slots)):
            if tensor.shape != (num_tokens,) or tensor.dtype is not torch.int64 or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous int64 [{num_tokens}], not {tensor.dtype} {list(tensor.shape)}")
        if attention.num_tokens != num_tokens:
            raise ValueError(f"attention is of {attention.num_tokens} tokens and x of {num_tokens}")
        if self._key_cache is not key_cache:
            self._bind(key_cache, value_cache)
        out, num_rows, rows_address = x, num_tokens, None
        if rows is not None:
            rows = rows.contiguous()
            num_rows, rows_address = len(rows), rows.data_ptr()
            if num_rows and not 0 <= int(rows.min()) <= int(rows.max()) < num_tokens:
                raise IndexError(f"rows are 0 to {num_tokens - 1}")
            out = torch.empty(num_rows, self._hidden_size)
        step = _Step(
            x.data_ptr(), out.data_ptr(), positions.data_ptr(), slots.data_ptr(), rows_address,
            attention.step_address, num_tokens, num_rows, torch.get_num_threads(), -1,
        )  # fmt: skip
        check(self._kernel(self._address, ctypes.byref(step)))
        if step.wrong_token >= 0:
            num_slots = self._layer.num_slots
            raise cpu_rotary_embedding.outside(step.wrong_token, positions, self._layer.max_positions, slots, num_slots)
        return out

    def _bind(self, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        """To caches, which stay the same from step to step."""
        layer, parts = self._layer, self._parts
        num_blocks, num_kv_heads, block_size, head_dim = key_cache.shape
        if (
            (num_kv_heads, head_dim) != (parts.num_kv_heads, parts.head_dim)
            or value_cache.shape != key_cache.shape
            or not key_cache.dtype is value_cache.dtype is torch.float32
            or key_cache.stride() != value_cache.stride()
            or key_cache.stride()[2:] != (head_dim, 1)
        ):
            raise ValueError(
                f"caches must be float32 [num_blocks, {parts.num_kv_heads}, block_size, {parts.head_dim}] with the same strides, not "
                f"{key_cache.dtype} {list(key_cache.shape)} and {value_cache.dtype} {list(value_cache.shape)}"
            )
        layer.key_cache, layer.value_cache = key_cache.data_ptr(), value_cache.data_ptr()
        layer.num_slots, layer.block_size = num_blocks * block_size, block_size
        layer.cache_block_stride, layer.cache_head_stride = key_cache.stride()[:2]
        self._key_cache, self._value_cache = key_cache, value_cache

    def _projection(self, projection: Projection) -> _Projection:
        count = len(projection.weights)
        weights = (ctypes.c_void_p * count)(*(weight.address for weight in projection.weights))
        biases = (ctypes.c_void_p * count)(*(None if bias is None else bias.data_ptr() for bias in projection.biases))
        self._arrays += [weights, biases]
        num_outputs = sum(weight.shape[0] for weight in projection.weights)
        return _Projection(ctypes.addressof(weights), ctypes.addressof(biases), count, num_outputs)
