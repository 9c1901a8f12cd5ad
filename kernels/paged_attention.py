"""PagedAttention V1 and V2 (Kwon et al. 2023): one query token per sequence over the KV blocks its block table names.

O = softmax(scale * q K^T) V over positions 0 .. seq_len - 1, fp32 inside. V1 runs a sequence in one pass per KV head; V2 cuts it into
partitions, each leaving its output, max logit and exp sum, which a reduce kernel joins:
m = max m_j, L = sum l_j exp(m_j - m), O = sum O_j l_j exp(m_j - m) / L.

Layouts of one layer's cache (x = 16 bytes / item size):
  the engine's  K, V [num_blocks, num_kv_heads, block_size, head_dim], strided over blocks and heads
  classic       K [num_blocks, num_kv_heads, head_dim / x, block_size, x], V [num_blocks, num_kv_heads, head_dim, block_size]
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels import reference
from kernels.build import Library, launch, load
from kernels.kv_cache_format import FP8_KINDS, scale_tensor, typed_caches
from kernels.op_library import LIBRARY

HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256)
CLASSIC_PARTITION_SIZE = 512
STAGE_TOKENS = 64
"""Partitions are a multiple of what a thread block takes in at once."""
MAX_PARTITIONS = 2048
MAX_SEQS = 65535
"""They are the grid's second dimension."""
MIN_DEEP_TOKENS, MAX_DEEP_TOKENS = 128, 1024
"""Of a partition that has a multiprocessor to itself."""
RAGGED_TOKENS = 1536
"""Of a partition of a ragged batch, at most."""
MAX_EVICT_FIRST_BYTES = 400 << 20
"""A step that reads more than this evicts all of L2 anyway."""

_SCALARS = {torch.float16: 0, torch.bfloat16: 1}


class _Params(ctypes.Structure):
    """`Params` of paged_attention.cuh, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "partial_out", "max_logits", "exp_sums", "query", "key_cache", "value_cache")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "seq_lens", "alibi_slopes", "k_scale", "v_scale")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
        *((name, ctypes.c_int) for name in ("sliding_window", "num_seqs", "num_heads", "num_kv_heads", "group_size")),
        *((name, ctypes.c_int) for name in ("groups_per_kv_head", "block_size", "partition_size", "num_partitions")),
        *((name, ctypes.c_int) for name in ("max_context", "partial_is_f32", "is_even", "evict_first")),
        *((name, ctypes.c_int64) for name in ("query_stride", "out_stride", "block_table_stride")),
        *((name, ctypes.c_int64) for name in ("k_block_stride", "k_head_stride", "v_block_stride", "v_head_stride")),
    )


def library(head_size: int, dtype: torch.dtype, cache_dtype: torch.dtype, is_classic: bool) -> Library:
    defines = {
        "HEAD_SIZE": head_size,
        "SCALAR": _SCALARS[dtype],
        "KV_CACHE": FP8_KINDS.get(cache_dtype, 0),
        "CLASSIC_LAYOUT": int(is_classic),
    }
    return Library("paged_attention.cu", defines)


def libraries(head_sizes: tuple[int, ...] = (64, 128)) -> Iterator[Library]:
    """What a server with these head sizes may load: the engine's layout, every type."""
    for head_size in head_sizes:
        for dtype in _SCALARS:
            for cache_dtype in (dtype, *FP8_KINDS):
                yield library(head_size, dtype, cache_dtype, is_classic=False)


@functools.cache
def _library(head_size: int, dtype: torch.dtype, cache_dtype: torch.dtype, is_classic: bool) -> ctypes.CDLL:
    loaded = load(library(head_size, dtype, cache_dtype, is_classic))
    loaded.launch_paged_attention.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    loaded.launch_paged_attention.restype = ctypes.c_char_p
    assert loaded.paged_attention_params_bytes() == ctypes.sizeof(_Params), "Params differ between Python and CUDA"
    return loaded


class Launch(NamedTuple):
    """How a decode step is laid out on the GPU."""

    partition_size: int
    """Tokens; >= the longest sequence means V1."""
    is_deep: bool
    """Twice the copies in flight per thread block."""
    blocks_per_multiprocessor: int
    """At most."""
    evict_first: bool
    """K and V pass by what else stands in L2 instead of evicting it."""


def choose_launch(
    num_seqs: int,
    num_kv_heads: int,
    max_seq_len: int,
    row_bytes: int,
    num_multiprocessors: int,
    num_kv_tokens: int | None = None,
) -> Launch:
    """V1 or V2 and the rest, fitted to the tables of bench/kernels/paged_attention.py --partitions (bench/RESULTS.md).

    row_bytes: of one token and KV head in K; num_kv_tokens: the sum of all lengths where it is known, which tells a ragged batch from an
    even one. What the tables say: four blocks a multiprocessor with little in flight each read fastest, as many as there is work for; a
    short step rather has fewer, longer partitions to join, and few rows of it one block a multiprocessor with more in flight; up to some
    400 MB it pays not to evict what stands in L2."""
    max_seq_len = max(1, max_seq_len)
    num_rows = max(1, num_seqs * num_kv_heads)
    num_kv_tokens = num_seqs * max_seq_len if num_kv_tokens is None else num_kv_tokens
    is_large = 2 * num_kv_tokens * num_kv_heads * row_bytes > MAX_EVICT_FIRST_BYTES
    share = -(-max_seq_len // max(1, num_multiprocessors // num_rows))  # of a multiprocessor
    if num_rows <= num_multiprocessors // 4 and share <= MAX_DEEP_TOKENS:
        chosen = Launch(max(share, MIN_DEEP_TOKENS), True, 2, not is_large)
    else:
        num_partitions = max(1, (4 if is_large else 2) * num_multiprocessors // num_rows)
        chosen = Launch(-(-max_seq_len // num_partitions), False, 4, not is_large)
    if num_kv_tokens < 0.8 * num_seqs * max_seq_len:
        # A long sequence must not run on alone when the others have ended.
        chosen = Launch(min(chosen.partition_size, RAGGED_TOKENS), False, 4, not is_large)
    size = max(chosen.partition_size, -(-max_seq_len // MAX_PARTITIONS))
    return chosen._replace(partition_size=-(-size // STAGE_TOKENS) * STAGE_TOKENS)


LIBRARY.define(
    "paged_attention_v1(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, "
    "Tensor block_tables, Tensor seq_lens, int block_size, int max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, "
    "Tensor? k_scale, Tensor? v_scale, *, int sliding_window=0, float soft_cap=0.0) -> ()"
)
LIBRARY.define(
    "paged_attention_v2(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, Tensor(d!) tmp_out, Tensor query, Tensor key_cache, "
    "Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, int block_size, int max_seq_len, "
    "Tensor? alibi_slopes, str kv_cache_dtype, Tensor? k_scale, Tensor? v_scale, *, int sliding_window=0, float soft_cap=0.0, "
    "int partition_size=512) -> ()"
)


def paged_attention_v1(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """One pass per (sequence, KV head). out, query: [num_seqs, num_heads, head_dim], fp16 or bf16; caches: see the file's head, in the
    query's dtype ("auto") or FP8 (float8 or uint8 tensors) with one scale for all of K and of V; block_tables: int32
    [num_seqs, max_blocks]; seq_lens: int32 [num_seqs]; alibi_slopes: fp32 [num_heads]. Any context length. seq_len 0 gives zeros.
    Raises ValueError for what does not fit together, KernelError for what the GPU refuses."""
    key_cache, value_cache = typed_caches(key_cache, value_cache, kv_cache_dtype, query.dtype)
    _check(out, query, key_cache, value_cache, num_kv_heads, block_tables, seq_lens, block_size, alibi_slopes, sliding_window, soft_cap)
    torch.ops.pagewire.paged_attention_v1(
        out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        scale_tensor(k_scale, query.device),
        scale_tensor(v_scale, query.device),
        sliding_window=sliding_window or 0,
        soft_cap=soft_cap or 0.0,
    )


def paged_attention_v2(
    out: torch.Tensor,
    exp_sums: torch.Tensor,
    max_logits: torch.Tensor,
    tmp_out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    partition_size: int = CLASSIC_PARTITION_SIZE,
) -> None:
    """Partitions of `partition_size` tokens (a multiple of 64), then a reduce. No seq_len may exceed max_seq_len: with P =
    ceil(max_seq_len / partition_size), exp_sums and max_logits are fp32 [num_seqs, num_heads, P] and tmp_out
    [num_seqs, num_heads, P, head_dim] in the query's dtype or fp32, all contiguous. The rest as paged_attention_v1."""
    key_cache, value_cache = typed_caches(key_cache, value_cache, kv_cache_dtype, query.dtype)
    _check(out, query, key_cache, value_cache, num_kv_heads, block_tables, seq_lens, block_size, alibi_slopes, sliding_window, soft_cap)
    shape = (*query.shape[:2], _count_partitions(max_seq_len, partition_size))
    for name, tensor, wanted, dtypes in (
        ("exp_sums", exp_sums, shape, (torch.float32,)),
        ("max_logits", max_logits, shape, (torch.float32,)),
        ("tmp_out", tmp_out, (*shape, query.shape[2]), (torch.float32, query.dtype)),
    ):
        if tensor.shape != wanted or tensor.dtype not in dtypes or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {list(wanted)} of {dtypes}, not {list(tensor.shape)} of {tensor.dtype}")
    torch.ops.pagewire.paged_attention_v2(
        out,
        exp_sums,
        max_logits,
        tmp_out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        scale_tensor(k_scale, query.device),
        scale_tensor(v_scale, query.device),
        sliding_window=sliding_window or 0,
        soft_cap=soft_cap or 0.0,
        partition_size=partition_size,
    )


class PagedAttentionPlan:
    """One decode step, planned once and run for every layer: V1 or V2, whichever `choose_launch` finds faster, everything
    checked, the workspace allocated. `query`, `key_cache` and `value_cache` show the shapes, strides and types of those it will run on;
    the caches' dtype says how they are read, so FP8 ones are float8 tensors. No seq_len may exceed max_seq_len; what block_tables and
    seq_lens hold may change between runs. num_kv_tokens: the sum of seq_lens where it is known; partition_size: instead of the choice,
    a multiple of 64; is_even: each sequence is cut into equal parts, as many at most as the longest would be, which suits a plan that is to
    serve any lengths. The rest as paged_attention_v1. Runs share one workspace: one thread and one stream at a time, and the plan must
    live as long as a CUDA graph that captured a run."""

    def __init__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        scale: float,
        *,
        alibi_slopes: torch.Tensor | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        k_scale: float | torch.Tensor = 1.0,
        v_scale: float | torch.Tensor = 1.0,
        num_kv_tokens: int | None = None,
        partition_size: int | None = None,
        is_even: bool = False,
    ) -> None:
        num_kv_heads, block_size = value_cache.shape[1], value_cache.shape[3 if key_cache.dim() == 5 else 2]
        tables = (block_tables, seq_lens, block_size)
        _check(query, query, key_cache, value_cache, num_kv_heads, *tables, alibi_slopes, sliding_window, soft_cap)
        if key_cache.dtype not in (query.dtype, *FP8_KINDS) or value_cache.dtype != key_cache.dtype:
            raise ValueError(f"the caches are {key_cache.dtype} and {value_cache.dtype}; give both the query's {query.dtype} or float8")
        self._signature = _signature(query, key_cache, value_cache)
        scales = (scale_tensor(k_scale, query.device), scale_tensor(v_scale, query.device))
        chosen = FORCED
        if query.is_cuda:
            covered = min(max_seq_len, sliding_window + STAGE_TOKENS) if sliding_window else max_seq_len
            row_bytes = query.shape[2] * key_cache.element_size()
            known = num_kv_tokens if covered == max_seq_len else None
            chosen = choose_launch(len(query), num_kv_heads, covered, row_bytes, _num_multiprocessors(query.device.index), known)
            # A narrow window asks for short partitions, but there are as many of them as without it.
            least = -(-max_seq_len // (MAX_PARTITIONS * STAGE_TOKENS)) * STAGE_TOKENS
            chosen = chosen._replace(partition_size=max(chosen.partition_size, least))
        if partition_size is not None:
            chosen = chosen._replace(partition_size=partition_size)
        num_partitions = _count_partitions(max_seq_len, chosen.partition_size)
        size = WHOLE if num_partitions <= 1 else chosen.partition_size
        self.launch = chosen._replace(partition_size=size)
        self._layout = (num_kv_heads, scale, block_tables, seq_lens, block_size)
        self._scales = scales
        self._alibi_slopes, self._sliding_window, self._soft_cap = alibi_slopes, sliding_window or 0, soft_cap or 0.0
        if query.is_cuda:
            self._params = _params(
                query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, size, max(1, num_partitions),
                alibi_slopes, scales[0], scales[1], self._sliding_window, self._soft_cap, chosen.evict_first,
            )  # fmt: skip
            if size != WHOLE:
                shape = (*query.shape[:2], num_partitions)
                sums = torch.empty(2, *shape, dtype=torch.float32, device=query.device)
                tmp_out = torch.empty(*shape, query.shape[2], dtype=torch.float32, device=query.device)
                self._workspace = (sums, tmp_out)
                _with_partitions(self._params, sums[0], sums[1], tmp_out)
                if is_even and not sliding_window:  # of which only the parts within the window have work
                    self._params.is_even, self._params.partition_size = 1, min(size, MIN_DEEP_TOKENS)

    def run(self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns `out`, or a new tensor: [num_seqs, num_heads, head_dim]."""
        if _signature(query, key_cache, value_cache) != self._signature:
            raise ValueError("query or caches differ from those that were planned for in shape, strides, type, device or alignment")
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        elif out.shape != query.shape or out.dtype != query.dtype or out.device != query.device or not out.is_contiguous():
            raise ValueError(f"out must be contiguous {list(query.shape)} of {query.dtype} on {query.device}")
        elif out.data_ptr() % 8:
            raise ValueError("out must start at a multiple of 8 bytes")
        if query.is_cuda:
            _launch(self.launch, self._params, out, query, key_cache, value_cache)
        else:
            torch.ops.pagewire.paged_attention_v1(
                out, query, key_cache, value_cache, *self._layout, 0, self._alibi_slopes, "auto", *self._scales,
                sliding_window=self._sliding_window, soft_cap=self._soft_cap,
            )  # fmt: skip
        return out


def _signature(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[object, ...]:
    is_aligned = query.data_ptr() % 8 == 0 and (key_cache.data_ptr() | value_cache.data_ptr()) % 16 == 0
    return (
        query.shape, query.stride(), query.dtype, query.device, key_cache.device, value_cache.device, is_aligned or not query.is_cuda,
        key_cache.shape, key_cache.stride(), key_cache.dtype, value_cache.shape, value_cache.stride(), value_cache.dtype,
    )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    *,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A plan made and run once; arguments as PagedAttentionPlan. Returns [num_seqs, num_heads, head_dim]."""
    plan = PagedAttentionPlan(
        query, key_cache, value_cache, block_tables, seq_lens, max_seq_len, scale, alibi_slopes=alibi_slopes,
        sliding_window=sliding_window, soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return plan.run(query, key_cache, value_cache, out)


@functools.cache
def _num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _check(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    """Everything a kernel would take on trust. Looks at shapes, types and strides only: nothing here waits for the GPU."""
    if len(query) > MAX_SEQS:
        raise ValueError(f"query holds {len(query)} sequences; a GPU takes {MAX_SEQS} in one launch: call once for each such part")
    if query.dim() != 3:
        raise ValueError(f"query must be [num_seqs, num_heads, head_dim], not {list(query.shape)}")
    num_seqs, num_heads, head_dim = query.shape
    if query.is_cuda and query.dtype not in _SCALARS:
        raise ValueError(f"query must be float16 or bfloat16 on the GPU, not {query.dtype}")
    if head_dim not in HEAD_SIZES:
        raise ValueError(f"head size {head_dim} is not one of {HEAD_SIZES}")
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of num_kv_heads = {num_kv_heads}")
    item = key_cache.element_size()
    if key_cache.dim() == 5:
        x = 16 // item
        if head_dim % x:
            raise ValueError(f"the classic K layout holds {x} items together; head size {head_dim} is no multiple: use the engine's layout")
        if query.is_cuda and block_size not in (8, 16, 32, 64):
            raise ValueError(f"block size {block_size} is not 8, 16, 32 or 64, which the classic layouts allow")
        shapes: tuple[tuple[int, ...], ...] = ((num_kv_heads, head_dim // x, block_size, x), (num_kv_heads, head_dim, block_size))
    else:
        if query.is_cuda and block_size != 8 and block_size % 16:
            raise ValueError(f"block size {block_size} is neither 8 nor a multiple of 16")
        shapes = ((num_kv_heads, block_size, head_dim),) * 2
    for name, cache, shape in (("key_cache", key_cache, shapes[0]), ("value_cache", value_cache, shapes[1])):
        if cache.shape[1:] != shape:
            raise ValueError(f"{name} must be [num_blocks, {', '.join(map(str, shape))}], not {list(cache.shape)}")
        if cache.device != query.device:
            raise ValueError(f"{name} is on {cache.device}, query on {query.device}")
        if cache.stride()[2:] != _contiguous_strides(shape[1:]):
            raise ValueError(f"{name} must be contiguous within a block and head; its strides are {cache.stride()}")
        if query.is_cuda and (cache.data_ptr() % 16 or cache.stride(0) * item % 16 or cache.stride(1) * item % 16):
            raise ValueError(f"{name} must start, and step from block to block and head to head, at multiples of 16 bytes")
    for name, tensor, shape, dtype in (
        ("out", out, query.shape, query.dtype),
        ("block_tables", block_tables, (num_seqs, *block_tables.shape[1:2]), torch.int32),
        ("seq_lens", seq_lens, (num_seqs,), torch.int32),
        *((("alibi_slopes", alibi_slopes, (num_heads,), torch.float32),) if alibi_slopes is not None else ()),
    ):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {list(shape)} of {dtype}, not {list(tensor.shape)} of {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query on {query.device}")
    for name, tensor in (("query", query), ("out", out)):
        if num_seqs and (tensor.stride(2) != 1 or tensor.stride(1) != head_dim or (query.is_cuda and tensor.stride(0) % 4)):
            raise ValueError(f"{name} must be contiguous over heads and their items; its strides are {tensor.stride()}")
        if query.is_cuda and tensor.data_ptr() % 8:
            raise ValueError(f"{name} must start at a multiple of 8 bytes")
    if num_seqs and block_tables.stride(1) != 1:
        raise ValueError("block_tables must be contiguous along a row")
    if not seq_lens.is_contiguous():
        raise ValueError("seq_lens must be contiguous")
    if alibi_slopes is not None and not alibi_slopes.is_contiguous():
        raise ValueError("alibi_slopes must be contiguous")
    if sliding_window is not None and sliding_window <= 0:
        raise ValueError(f"sliding_window must be positive, not {sliding_window}; None means none")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, not {soft_cap}; None means none")


def _count_partitions(max_seq_len: int, partition_size: int) -> int:
    if partition_size <= 0 or partition_size % STAGE_TOKENS:
        raise ValueError(f"partition_size must be a multiple of {STAGE_TOKENS}, not {partition_size}")
    num_partitions = -(-max_seq_len // partition_size)
    if num_partitions > MAX_PARTITIONS:
        raise ValueError(
            f"{num_partitions} partitions of {partition_size} tokens are more than {MAX_PARTITIONS}; give a larger partition_size"
        )
    return num_partitions


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _params(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    partition_size: int,
    num_partitions: int,
    alibi_slopes: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sliding_window: int,
    soft_cap: float,
    evict_first: bool,
) -> _Params:
    """Everything but where query, caches and results stand."""
    num_seqs, num_heads, _ = query.shape
    group_size = num_heads // num_kv_heads
    return _Params(
        block_tables=block_tables.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.data_ptr(),
        k_scale=None if k_scale is None else k_scale.data_ptr(),
        v_scale=None if v_scale is None else v_scale.data_ptr(),
        scale=scale,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
        num_seqs=num_seqs,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        groups_per_kv_head=-(-group_size // (8 * _num_groups(group_size))),
        block_size=block_size,
        partition_size=partition_size,
        num_partitions=num_partitions,
        max_context=min(block_tables.shape[1] * block_size, 2**31 - 1 - partition_size),
        evict_first=int(evict_first),
        query_stride=query.stride(0),
        block_table_stride=block_tables.stride(0),
        k_block_stride=key_cache.stride(0),
        k_head_stride=key_cache.stride(1),
        v_block_stride=value_cache.stride(0),
        v_head_stride=value_cache.stride(1),
    )


def _num_groups(group_size: int) -> int:
    """Groups of 8 query heads that one thread block takes."""
    return 1 if group_size <= 8 else 2


def _launch(
    how: Launch, params: _Params, out: torch.Tensor, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> None:
    if not len(query):
        return
    params.out, params.out_stride = out.data_ptr(), out.stride(0)
    params.query, params.key_cache, params.value_cache = query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
    kernels = _library(query.shape[2], query.dtype, key_cache.dtype, key_cache.dim() == 5)
    shape = (_num_groups(params.group_size), how.is_deep, how.blocks_per_multiprocessor)
    launch(kernels.launch_paged_attention, query.device, ctypes.addressof(params), *shape)


def _with_partitions(params: _Params, exp_sums: torch.Tensor, max_logits: torch.Tensor, tmp_out: torch.Tensor) -> _Params:
    params.exp_sums, params.max_logits, params.partial_out = exp_sums.data_ptr(), max_logits.data_ptr(), tmp_out.data_ptr()
    params.partial_is_f32 = int(tmp_out.dtype == torch.float32)
    return params


WHOLE = 1 << 30
"""A partition size that no sequence fills."""
FORCED = Launch(WHOLE, False, 4, False)
"""How V1 and V2 run where the caller chose the version."""


@torch.library.impl(LIBRARY, "paged_attention_v1", "CUDA")
def _v1_cuda(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    *,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    layout = (num_kv_heads, scale, block_tables, seq_lens, block_size, WHOLE, 1)
    params = _params(query, key_cache, value_cache, *layout, alibi_slopes, k_scale, v_scale, sliding_window, soft_cap, FORCED.evict_first)
    _launch(FORCED, params, out, query, key_cache, value_cache)


@torch.library.impl(LIBRARY, "paged_attention_v2", "CUDA")
def _v2_cuda(
    out: torch.Tensor,
    exp_sums: torch.Tensor,
    max_logits: torch.Tensor,
    tmp_out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    *,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    partition_size: int = CLASSIC_PARTITION_SIZE,
) -> None:
    num_partitions = max(1, -(-max_seq_len // partition_size))  # without a partition the empty sequences' zeros are written all the same
    layout = (num_kv_heads, scale, block_tables, seq_lens, block_size, partition_size, num_partitions)
    params = _params(query, key_cache, value_cache, *layout, alibi_slopes, k_scale, v_scale, sliding_window, soft_cap, FORCED.evict_first)
    _launch(FORCED, _with_partitions(params, exp_sums, max_logits, tmp_out), out, query, key_cache, value_cache)


@torch.library.impl(LIBRARY, "paged_attention_v1", "CPU")
def _v1_cpu(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    *,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    if key_cache.dim() == 5:
        key_cache, value_cache = reference.to_engine_layout(key_cache, value_cache)
    result = reference.paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables.tolist(),
        list(range(len(query) + 1)),
        seq_lens.tolist(),
        scale,
        alibi_slopes=alibi_slopes,
        sliding_window=sliding_window or None,
        soft_cap=soft_cap or None,
        k_scale=1.0 if k_scale is None else float(k_scale),
        v_scale=1.0 if v_scale is None else float(v_scale),
    )
    out.copy_(result)


@torch.library.impl(LIBRARY, "paged_attention_v2", "CPU")
def _v2_cpu(
    out: torch.Tensor,
    exp_sums: torch.Tensor,
    max_logits: torch.Tensor,
    tmp_out: torch.Tensor,
    *arguments: object,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    partition_size: int = CLASSIC_PARTITION_SIZE,
) -> None:
    # The partitions exist for the GPU's sake: what comes out is the same.
    torch.ops.pagewire.paged_attention_v1(out, *arguments, sliding_window=sliding_window, soft_cap=soft_cap)


def _nothing_to_infer(*arguments: object, **options: object) -> None:
    """For a compiler: they write to what they are given and return nothing."""


for _name in ("paged_attention_v1", "paged_attention_v2"):
    LIBRARY.impl(_name, _nothing_to_infer, "Meta")
