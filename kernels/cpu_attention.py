"""Paged attention on the CPU: kernels/csrc/cpu_attention.cpp where it can be compiled, torch where it cannot.

Same meaning as kernels/reference.py. What depends only on the step (block tables, lengths) is prepared once and used by all layers.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from kernels import reference
from kernels.build import KernelBuildError, Library, check, cpu_flags, load
from kernels.cpu_thread_pool import run_on_threads
from kernels.sdpa_attention import SDPAPagedAttention

_log = logging.getLogger(__name__)

_ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
_MAX_FACTOR = 16
MIN_MATRIX_UNIT_TOKENS = 64
"""bf16 chunks from here on are left to torch where the processor multiplies matrices of bf16 (AMX), for which it has kernels: up to 2.5
times faster though it gathers (bench/kernels/cpu_attention.py --dtype bfloat16)."""


class _Arguments(ctypes.Structure):
    """Mirrors `AttentionArguments` of kernels/csrc/cpu_attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key_cache", "value_cache", "out")),
        *(
            (name, ctypes.c_void_p)
            for name in ("blocks", "first_block", "query_start", "query_lens", "seq_lens", "alibi_slopes", "run_on_threads")
        ),
        *((name, ctypes.c_int64) for name in ("num_seqs", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        *((name, ctypes.c_int64) for name in ("query_stride", "cache_block_stride", "cache_head_stride", "sliding_window", "num_threads")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
    )


_launchers: dict[tuple[torch.dtype, int], ctypes._NamedFuncPointer | None] = {}
_lock = threading.Lock()


def library(dtype: torch.dtype, head_dim: int) -> Library:
    """What serves this dtype (fp32, bf16, fp16) and head size (even)."""
    return Library("cpu_attention.cpp", {"ELEMENT": _ELEMENTS[dtype], "HEAD_DIM_FACTOR": _factor(head_dim)})


def _factor(head_dim: int) -> int:
    return min(_MAX_FACTOR, head_dim & -head_dim)


def libraries() -> list[Library]:
    """What images build ahead of time: every dtype, head sizes that are multiples of 8."""
    return [library(dtype, head_dim) for dtype in _ELEMENTS for head_dim in (8, _MAX_FACTOR)]


def prepare(dtype: torch.dtype, head_dim: int) -> bool:
    """Build and load the kernel, once; seconds where it was never built, so not while a request waits. False: torch will serve."""
    return kernel(dtype, head_dim) is not None


def kernel(dtype: torch.dtype, head_dim: int) -> ctypes._NamedFuncPointer | None:
    """None: there is none, or it cannot be built here."""
    if dtype not in _ELEMENTS or head_dim % 2:
        return None
    wanted = (dtype, _factor(head_dim))
    with _lock:
        if wanted not in _launchers:
            try:
                launcher = load(library(dtype, head_dim)).cpu_paged_attention
                run_on_threads()
            except (KernelBuildError, OSError) as error:
                _log.warning("attention on the CPU runs on torch, which is several times slower in decode: %s", error)
                _launchers[wanted] = None
            else:
                launcher.argtypes, launcher.restype = [ctypes.c_void_p], ctypes.c_char_p
                _launchers[wanted] = launcher
        return _launchers[wanted]


@functools.cache
def _has_matrix_unit() -> bool:
    return "amx_bf16" in cpu_flags()


class CPUPagedAttention:
    """Attention of one step. `block_tables[i]` covers seq_lens[i] tokens; request i owns rows query_start_loc[i : i + 2], the last of
    its positions."""

    def __init__(
        self,
        block_tables: Sequence[Sequence[int]],
        query_start_loc: Sequence[int],
        seq_lens: Sequence[int],
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
    ) -> None:
        self._step = (block_tables, query_start_loc, seq_lens)
        self._block_size, self._num_heads, self._num_kv_heads = block_size, num_heads, num_kv_heads
        num_blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
        tables = (table[:count] for table, count in zip(block_tables, num_blocks, strict=True))
        self._blocks = np.fromiter(chain.from_iterable(tables), np.int32)
        if len(self._blocks) != sum(num_blocks):
            raise ValueError("a block table is shorter than its sequence; give ceil(seq_len / block_size) blocks")
        self._first_block = np.cumsum([0, *num_blocks], dtype=np.int64)
        self._query_start = np.array(query_start_loc, np.int64)
        self._query_lens = np.diff(self._query_start)
        self._seq_lens = np.array(seq_lens, np.int64)
        arrays = (self._blocks, self._first_block, self._query_start, self._query_lens, self._seq_lens)
        self._addresses = tuple(array.ctypes.data for array in arrays)  # once: asking takes longer than many a layer's attention
        self._max_query_len = int(self._query_lens.max(initial=0))
        self._on_torch: SDPAPagedAttention | None = None
        self._chunks: list[tuple[int, int, SDPAPagedAttention]] | None = None

    @property
    def num_tokens(self) -> int:
        return int(self._query_start[-1])

    @functools.cached_property
    def step_address(self) -> int:
        """Of `AttentionArguments` that say of the step all that is not of one layer."""
        self._step_arguments = _Arguments(None, None, None, None, *self._addresses, None, run_on_threads(), len(self._seq_lens))
        self._step_arguments.num_heads, self._step_arguments.num_kv_heads = self._num_heads, self._num_kv_heads
        self._step_arguments.block_size = self._block_size
        return ctypes.addressof(self._step_arguments)

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        *,
        alibi_slopes: torch.Tensor | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim], rows may be strided; caches of one layer: [num_blocks, num_kv_heads, block_size,
        head_dim] in the query's dtype, the last two dimensions contiguous, unused slots never read. alibi_slopes: fp32 [num_heads].
        Options as in `reference.paged_attention`. Returns a contiguous tensor like the query."""
        head_dim = query.shape[2]
        launcher = kernel(query.dtype, head_dim)
        if launcher is None:
            return self._without_kernel(query, key_cache, value_cache, scale, alibi_slopes, sliding_window, soft_cap)
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        if key_cache.stride() != value_cache.stride() or key_cache.stride()[2:] != (head_dim, 1):
            raise ValueError("key_cache and value_cache must have the same strides, with block_size and head_dim contiguous")
        if not query.dtype == key_cache.dtype == value_cache.dtype:
            raise ValueError(f"key_cache and value_cache must be {query.dtype} as the query is")
        out = torch.empty(query.shape, dtype=query.dtype)
        blocks, first_block, query_start, query_lens, seq_lens = self._addresses
        has_options = alibi_slopes is not None or sliding_window is not None or soft_cap is not None
        if query.dtype is torch.bfloat16 and not has_options and _has_matrix_unit() and self._max_query_len >= MIN_MATRIX_UNIT_TOKENS:
            for start, end, on_torch in self._long_chunks():
                out[start:end] = on_torch(query[start:end], key_cache, value_cache, scale)
            short = np.where(self._query_lens >= MIN_MATRIX_UNIT_TOKENS, 0, self._query_lens)
            query_lens = short.ctypes.data
        slopes = None if alibi_slopes is None else alibi_slopes.to(torch.float32).contiguous()
        arguments = _Arguments(
            query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), out.data_ptr(),
            blocks, first_block, query_start, query_lens, seq_lens, None if slopes is None else slopes.data_ptr(), run_on_threads(),
            len(self._seq_lens), self._num_heads, self._num_kv_heads, head_dim, self._block_size,
            query.stride(0), key_cache.stride(0), key_cache.stride(1), sliding_window or 0, torch.get_num_threads(),
            scale, soft_cap or 0.0,
        )  # fmt: skip
        check(launcher(ctypes.byref(arguments)))
        return out

    def _long_chunks(self) -> list[tuple[int, int, SDPAPagedAttention]]:
        if self._chunks is None:
            block_tables, query_start_loc, seq_lens = self._step
            self._chunks = []
            for i in np.flatnonzero(self._query_lens >= MIN_MATRIX_UNIT_TOKENS).tolist():
                start, end = query_start_loc[i], query_start_loc[i + 1]
                step = ([list(block_tables[i])], [0, end - start], [seq_lens[i]])
                self._chunks.append((start, end, SDPAPagedAttention(*step, self._block_size, self._num_heads, self._num_kv_heads)))
        return self._chunks

    def _without_kernel(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        alibi_slopes: torch.Tensor | None,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> torch.Tensor:
        block_tables, query_start_loc, seq_lens = self._step
        if alibi_slopes is not None or sliding_window is not None or soft_cap is not None or 0 in seq_lens:
            return reference.paged_attention(
                query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale,
                alibi_slopes=alibi_slopes, sliding_window=sliding_window, soft_cap=soft_cap,
            )  # fmt: skip
        if self._on_torch is None:
            self._on_torch = SDPAPagedAttention(
                [list(table) for table in block_tables], list(query_start_loc), list(seq_lens),
                self._block_size, self._num_heads, self._num_kv_heads,
            )  # fmt: skip
        return self._on_torch(query, key_cache, value_cache, scale)
