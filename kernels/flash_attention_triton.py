"""Chunked-prefill attention over the paged cache in Triton: online softmax (Dao 2023), one program per tile of queries and KV head.

All query heads of a KV head stand in the rows of one tile (row = token x head of the group), so that keys and values are read once
a group whatever its size, and a group of 3 or 7 wastes a few rows rather than a matrix. Tiles of keys that every row sees run in a
loop without masks; only those at the diagonal, at the end of the sequence and at the edge of a window pay for them.

Tile sizes come from `CONFIGURATIONS`, measured by bench/kernels/tune_flash_attention.py, so that a server start tunes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.build import KernelBuildError, cache_folder

with contextlib.suppress(KernelBuildError):  # without a home Triton looks for a folder of its own
    # Read when something is compiled. One folder to keep, or to mount, for all that was.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))

LOG2_E = 1.4426950408889634
UNKNOWN_SHARED_BYTES = 48 << 10
MAX_SPLITS = 32
MIN_TILES_OF_A_SPLIT = 4
"""A part of the keys shorter than this many tiles costs more to merge than it saves."""


@triton.jit
def _attend(
    accumulator, maximum, total, query, first_key, end_key, num_keys, key_ptr, value_ptr, table_ptr, stride_key_block,
    stride_value_block, positions, slopes, qk_scale, soft_cap, window,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Take keys first_key .. end_key (a multiple of TILE apart unless MASKED) into the running softmax of every row."""
    dims = tl.arange(0, PADDED_DIM)
    within_tile = tl.arange(0, TILE)
    for start in range(first_key, end_key, TILE):
        keys = start + within_tile
        is_used = keys < num_keys
        if HAS_WINDOW:  # blocks before every window need not exist
            is_used = is_used & (keys > tl.min(positions, 0) - window)
        entries = table_ptr + keys // BLOCK_SIZE
        blocks = tl.load(entries, mask=is_used, other=0) if MASKED else tl.load(entries)
        # 64 bits: block x stride passes 2^31 elements in real caches.
        blocks = blocks.to(tl.int64)
        within_block = (keys % BLOCK_SIZE) * HEAD_DIM
        key_ptrs = key_ptr + (blocks * stride_key_block + within_block)[None, :] + dims[:, None]
        value_ptrs = value_ptr + (blocks * stride_value_block + within_block)[:, None] + dims[None, :]
        if MASKED or PADDED_DIM != HEAD_DIM:
            key = tl.load(key_ptrs, mask=is_used[None, :] & (dims < HEAD_DIM)[:, None], other=0.0).to(query.dtype)
        else:
            key = tl.load(key_ptrs).to(query.dtype)
        scores = tl.dot(query, key, input_precision="ieee")
        # In units of log2 from here on, since exp2 is one instruction. Without a cap or ALiBi the scale waits for the fused multiply-add.
        SCALED: tl.constexpr = HAS_SOFT_CAP or HAS_ALIBI
        if HAS_SOFT_CAP:
            # cap * tanh(x) = cap * (1 - 2 / (1 + exp(2 x))), which saturates to the right side for any x.
            scores = (soft_cap * 1.4426950408889634) * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * qk_scale / soft_cap))))
        elif HAS_ALIBI:
            scores = scores * qk_scale
        if HAS_ALIBI:
            scores += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
        if MASKED:
            visible = (keys[None, :] <= positions[:, None]) & is_used[None, :]
            if HAS_WINDOW:
                visible = visible & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        highest = tl.max(scores, 1)
        if not SCALED:
            highest *= qk_scale
        new_maximum = tl.maximum(maximum, highest)
        # A row that has seen no key yet must not subtract infinity from infinity.
        pivot = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
        weights = tl.exp2((scores if SCALED else scores * qk_scale) - pivot[:, None])
        correction = tl.exp2(maximum - pivot)
        total = total * correction + tl.sum(weights, 1)
        accumulator = accumulator * correction[:, None]
        # Rows of V past the sequence or before the window count as zero: 0 x NaN would be NaN.
        if MASKED or PADDED_DIM != HEAD_DIM:
            value = tl.load(value_ptrs, mask=is_used[:, None] & (dims < HEAD_DIM)[None, :], other=0.0).to(query.dtype)
        else:
            value = tl.load(value_ptrs).to(query.dtype)
        accumulator = tl.dot(weights.to(query.dtype), value, accumulator, input_precision="ieee")
        maximum = new_maximum
    return accumulator, maximum, total


# What changes from step to step must not be compiled in: a server would stop for seconds at the first batch of 16 sequences.
@triton.jit(
    do_not_specialize=["num_seqs", "num_tiles", "num_splits", "max_context", "window", "stride_split", "stride_table"],
    do_not_specialize_on_alignment=["maxima_ptr", "totals_ptr", "table_ptr", "query_start_ptr", "seq_lens_ptr", "slopes_ptr"],
)
def _flash_attention_kernel(
    out_ptr, partial_ptr, maxima_ptr, totals_ptr, query_ptr, key_ptr, value_ptr, table_ptr, query_start_ptr, seq_lens_ptr, slopes_ptr,
    num_seqs, num_tiles, num_splits, max_context, qk_scale, v_scale, soft_cap, window, stride_split,
    stride_out_token, stride_out_head, stride_query_token, stride_query_head,
    stride_key_block, stride_key_head, stride_value_block, stride_value_head, stride_table,
    NUM_HEAD_GROUPS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile: TOKENS tokens of one sequence x HEADS query heads of one KV head, in ROWS rows; or one part of its keys if IS_SPLIT."""
    program = tl.program_id(0)
    if IS_SPLIT:
        split = program % num_splits
        program //= num_splits
    # The last tile of a sequence sees the most keys: it goes first, so that the end of the launch is filled with short ones.
    tile = num_tiles - 1 - program // NUM_HEAD_GROUPS
    first_head = (program % NUM_HEAD_GROUPS) * HEADS
    # Sequence i owns the tiles from query_start[i] // TOKENS + i on: room for all of its tokens without counting tiles on the host.
    low = tl.full([], 0, tl.int32)
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    query_start = tl.load(query_start_ptr + low)
    num_queries = tl.load(query_start_ptr + low + 1) - query_start
    first_token = (tile - query_start // TOKENS - low) * TOKENS
    if first_token >= num_queries:
        return
    num_keys = tl.minimum(tl.load(seq_lens_ptr + low), max_context)  # what the block table holds: a longer sequence is cut to it
    first_position = num_keys - num_queries + first_token

    rows = tl.arange(0, ROWS)
    tokens = first_token + rows // HEADS
    heads = first_head + rows % HEADS
    positions = first_position + rows // HEADS
    dims = tl.arange(0, PADDED_DIM)
    in_tile = (rows < TOKENS * HEADS) & (tokens < num_queries)
    mask = in_tile[:, None] & (dims < HEAD_DIM)[None, :]
    token_rows = (query_start + tokens).to(tl.int64)
    query_rows = token_rows * stride_query_token + heads * stride_query_head
    query = tl.load(query_ptr + query_rows[:, None] + dims[None, :], mask=mask, other=0.0)
    slopes = tl.zeros([ROWS], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads, mask=in_tile, other=0.0).to(tl.float32) * 1.4426950408889634

    kv_head = (first_head // GROUP).to(tl.int64)
    key_ptr += kv_head * stride_key_head
    value_ptr += kv_head * stride_value_head
    table_ptr += low.to(tl.int64) * stride_table

    num_keys = tl.maximum(tl.minimum(num_keys, first_position + TOKENS), 0)
    begin = 0
    full_begin = 0
    full_end = tl.maximum(first_position + 1, 0) // TILE * TILE
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        full_begin = tl.minimum((tl.maximum(num_keys - window, 0) + TILE - 1) // TILE * TILE, full_end)
    if IS_SPLIT:
        num_key_tiles = (num_keys - begin + TILE - 1) // TILE
        part = (num_key_tiles + num_splits - 1) // num_splits * TILE
        begin += split * part
        end = tl.minimum(begin + part, num_keys)
        window_end = tl.minimum(full_begin, end)
        full_begin = tl.maximum(full_begin, begin)
        tail_begin = tl.maximum(full_end, begin)
        full_end = tl.minimum(full_end, end)
    else:
        end = num_keys
        window_end = full_begin
        tail_begin = full_end
    accumulator = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_WINDOW:
        accumulator, maximum, total = _attend(
            accumulator, maximum, total, query, begin, window_end, num_keys, key_ptr, value_ptr, table_ptr, stride_key_block,
            stride_value_block, positions, slopes, qk_scale, soft_cap, window,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, True, HAS_ALIBI, HAS_WINDOW, HAS_SOFT_CAP,
        )  # fmt: skip
    accumulator, maximum, total = _attend(
        accumulator, maximum, total, query, full_begin, full_end, num_keys, key_ptr, value_ptr, table_ptr, stride_key_block,
        stride_value_block, positions, slopes, qk_scale, soft_cap, window,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, False, HAS_ALIBI, HAS_WINDOW, HAS_SOFT_CAP,
    )  # fmt: skip
    accumulator, maximum, total = _attend(
        accumulator, maximum, total, query, tail_begin, end, num_keys, key_ptr, value_ptr, table_ptr, stride_key_block,
        stride_value_block, positions, slopes, qk_scale, soft_cap, window,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, True, HAS_ALIBI, HAS_WINDOW, HAS_SOFT_CAP,
    )  # fmt: skip
    if IS_SPLIT:
        partial_rows = split.to(tl.int64) * stride_split + token_rows * (NUM_HEAD_GROUPS * HEADS) + heads
        tl.store(partial_ptr + partial_rows[:, None] * HEAD_DIM + dims[None, :], accumulator, mask=mask)
        tl.store(maxima_ptr + partial_rows, maximum, mask=in_tile)
        tl.store(totals_ptr + partial_rows, total, mask=in_tile)
    else:
        # A row without keys is zero.
        result = accumulator * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        out_rows = token_rows * stride_out_token + heads * stride_out_head
        tl.store(out_ptr + out_rows[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits", "stride_split"], do_not_specialize_on_alignment=["maxima_ptr", "totals_ptr"])
def _merge_kernel(
    out_ptr, partial_ptr, maxima_ptr, totals_ptr, num_splits, v_scale, stride_split, stride_out_token, stride_out_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row: m = max m_j, O = sum O_j 2^(m_j - m) / sum l_j 2^(m_j - m)."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    rows = splits.to(tl.int64) * stride_split + row
    maxima = tl.load(maxima_ptr + rows, mask=splits < num_splits, other=float("-inf"))
    has_keys = maxima > float("-inf")
    totals = tl.load(totals_ptr + rows, mask=has_keys, other=0.0)
    highest = tl.max(maxima, 0)
    weights = tl.where(has_keys, tl.exp2(maxima - highest), 0.0)
    total = tl.sum(totals * weights, 0)
    partials = tl.load(
        partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=has_keys[:, None] & (dims < HEAD_DIM)[None, :], other=0.0
    )
    result = tl.sum(partials * weights[:, None], 0) * (v_scale / tl.where(total == 0.0, 1.0, total))
    out_row = row // NUM_HEADS * stride_out_token + row % NUM_HEADS * stride_out_head
    tl.store(out_ptr + out_row + dims, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True)
class Configuration:
    """Shape of a tile: query rows, keys, warps, and how many tiles of keys are in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, padded_dim: int, query_bytes: int, cache_bytes: int) -> int:
        """At most what the compiled kernel takes of a multiprocessor's shared memory. Half of the stages go to the block table: keys
        and values are loaded at addresses that are loaded themselves."""
        num_buffers = 1 if self.num_stages == 1 else max(2, (self.num_stages + 1) // 2)
        return 2 * num_buffers * self.keys * padded_dim * cache_bytes + self.rows * padded_dim * query_bytes + 2048


# (padded head dim, bytes of a query element, bytes of a cache element) -> by most query rows of a KV head: 16, 32, 64, more.
CONFIGURATIONS: dict[tuple[int, int, int], tuple[Configuration, Configuration, Configuration, Configuration]] = {
    (32, 2, 2): (Configuration(16, 128, 4, 3), Configuration(32, 128, 4, 3), Configuration(64, 64, 4, 3), Configuration(128, 64, 4, 3)),
    (64, 2, 2): (Configuration(16, 128, 4, 2), Configuration(32, 128, 4, 5), Configuration(64, 128, 4, 5), Configuration(128, 64, 8, 2)),
    (128, 2, 2): (Configuration(16, 128, 4, 3), Configuration(32, 128, 4, 3), Configuration(64, 128, 4, 5), Configuration(128, 64, 4, 3)),
    (256, 2, 2): (Configuration(16, 32, 4, 3), Configuration(32, 32, 4, 3), Configuration(64, 32, 4, 3), Configuration(128, 32, 8, 3)),
    (32, 2, 1): (Configuration(16, 128, 4, 3), Configuration(32, 128, 4, 3), Configuration(64, 64, 4, 3), Configuration(128, 64, 4, 3)),
    (64, 2, 1): (Configuration(16, 128, 4, 3), Configuration(32, 64, 4, 3), Configuration(64, 64, 4, 3), Configuration(128, 64, 4, 3)),
    (128, 2, 1): (Configuration(16, 64, 4, 3), Configuration(32, 64, 4, 3), Configuration(64, 64, 4, 3), Configuration(128, 64, 8, 3)),
    (256, 2, 1): (Configuration(16, 32, 4, 3), Configuration(32, 32, 4, 3), Configuration(64, 32, 4, 3), Configuration(128, 32, 8, 3)),
}
# fp32 products run on the ordinary units (full precision, for checking): small tiles, since all of a tile is in registers.
FP32_CONFIGURATION = Configuration(16, 32, 8, 1)


def configuration(padded_dim: int, query_bytes: int, cache_bytes: int, num_rows: int, max_shared_bytes: int) -> Configuration:
    """The measured configuration, made smaller where a device's shared memory cannot hold it.

    num_rows: query rows of the longest chunk, tokens x heads of a group."""
    if query_bytes == 4:
        return FP32_CONFIGURATION
    size = 0 if num_rows <= 16 else 1 if num_rows <= 32 else 2 if num_rows <= 64 else 3
    chosen = CONFIGURATIONS[padded_dim, query_bytes, min(cache_bytes, 2)][size]
    while chosen.shared_bytes(padded_dim, query_bytes, cache_bytes) > max_shared_bytes:
        if chosen.num_stages > 1:
            chosen = replace(chosen, num_stages=chosen.num_stages - 1)
        elif chosen.keys > 16:
            chosen = replace(chosen, keys=chosen.keys // 2)
        elif chosen.rows > 16:
            chosen = replace(chosen, rows=chosen.rows // 2)
        else:
            break
    return chosen


def choose_num_splits(num_programs: int, num_key_tiles: int, num_multiprocessors: int) -> int:
    """Into how many parts the keys of every tile are cut: enough that few programs over a long context fill the device."""
    wanted = min(num_multiprocessors // max(1, num_programs), num_key_tiles // MIN_TILES_OF_A_SPLIT, MAX_SPLITS)
    return max(1, wanted)


@functools.cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Bytes of shared memory a program can have, and multiprocessors; for the interpreter, figures of no device."""
    if device.type != "cuda":
        return UNKNOWN_SHARED_BYTES, 1
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", UNKNOWN_SHARED_BYTES)), properties.multi_processor_count


def flash_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: float,
    v_scale: float,
    chosen: Configuration | None = None,
    num_splits: int | None = None,
) -> None:
    """Launch the kernel on arguments that kernels/flash_attention.py has checked. `chosen` and `num_splits` overrule what the table
    and `choose_num_splits` say (for tuning and tests)."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    num_seqs = len(seq_lens)
    if num_tokens == 0 or num_seqs == 0:
        return
    group = num_heads // num_kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    max_shared_bytes, num_multiprocessors = _limits(query.device)
    if chosen is None:
        chosen = configuration(padded_dim, query.itemsize, key_cache.itemsize, min(max_query_len, num_tokens) * group, max_shared_bytes)
    # A group larger than a tile is cut into equal parts, each of which reads the keys for itself.
    heads = max(part for part in range(1, min(group, chosen.rows) + 1) if group % part == 0)
    tokens = chosen.rows // heads
    num_tiles = triton.cdiv(num_tokens, tokens) + num_seqs - 1
    num_head_groups = num_heads // heads
    num_programs = num_tiles * num_head_groups
    if num_splits is None:
        max_num_keys = max_seq_len if sliding_window is None else min(max_seq_len, sliding_window + tokens)
        num_splits = choose_num_splits(num_programs, triton.cdiv(max_num_keys, chosen.keys), num_multiprocessors)
    partial = maxima = totals = out
    num_rows = num_tokens * num_heads
    if num_splits > 1:
        partial = torch.empty(num_splits * num_rows * head_dim, dtype=torch.float32, device=query.device)
        maxima, totals = torch.empty(2, num_splits * num_rows, dtype=torch.float32, device=query.device)
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        _flash_attention_kernel[(num_programs * num_splits,)](
            out,
            partial,
            maxima,
            totals,
            query,
            key_cache,
            value_cache,
            block_tables,
            query_start_loc,
            seq_lens,
            seq_lens if alibi_slopes is None else alibi_slopes,
            num_seqs,
            num_tiles,
            num_splits,
            block_tables.shape[1] * block_size,
            scale * k_scale * LOG2_E,
            v_scale,
            0.0 if soft_cap is None else soft_cap,
            0 if sliding_window is None else sliding_window,
            num_rows,
            out.stride(0),
            out.stride(1),
            query.stride(0),
            query.stride(1),
            key_cache.stride(0),
            key_cache.stride(1),
            value_cache.stride(0),
            value_cache.stride(1),
            block_tables.stride(0),
            NUM_HEAD_GROUPS=num_head_groups,
            HEADS=heads,
            GROUP=group,
            TOKENS=tokens,
            ROWS=chosen.rows,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            BLOCK_SIZE=block_size,
            TILE=chosen.keys,
            HAS_ALIBI=alibi_slopes is not None,
            HAS_WINDOW=sliding_window is not None,
            HAS_SOFT_CAP=soft_cap is not None,
            IS_SPLIT=num_splits > 1,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
        if num_splits > 1:
            _merge_kernel[(num_rows,)](
                out,
                partial,
                maxima,
                totals,
                num_splits,
                v_scale,
                num_rows,
                out.stride(0),
                out.stride(1),
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                PADDED_DIM=padded_dim,
                SPLITS=MAX_SPLITS,
                num_warps=4,
            )
