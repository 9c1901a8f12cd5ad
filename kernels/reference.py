"""The meaning of every op in plain PyTorch, one request and one step at a time; what all faster paths are compared with.

Cache layout of one layer: [num_blocks, num_kv_heads, block_size, head_dim]. Addresses are computed in int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.exponential_race import OUT, winners
from kernels.row_parameters import SEED

NEG_INF = float("-inf")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (Zhang & Sennrich 2019)."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """residual += x, then x = rms_norm(residual), both in place; the sum is rounded to its type before it is normalised."""
    residual += x
    x.copy_(rms_norm(residual, weight, eps))


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + r/2) of the first r items of each head (the half-split convention); the rest stays. x: [num_tokens,
    num_heads, head_dim]; cos, sin: [num_tokens, r / 2] (Su et al. 2021)."""
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:]), dim=-1)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x = [gate | up] along the last dimension (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def quantize(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What a cache of this type holds: x itself, or for FP8 x / scale, saturated at the largest finite value."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values and an fp32 factor for each row, which makes its largest item the largest number of E4M3; see kernels.quantize_rows."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    largest = x.float().abs().amax(1, keepdim=True) if x.shape[1] else torch.zeros(len(x), 1)
    factors = (largest / limit).clamp_min(torch.finfo(torch.float32).tiny)  # a denormal factor would be too coarse, or zero
    return (x.float() / factors).clamp(-limit, limit).to(torch.float8_e4m3fn), factors


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write token i to slot `slot_mapping[i]` = block * block_size + offset; -1 writes nothing.

    key, value: [num_tokens, num_kv_heads, head_dim], possibly with more rows than slot_mapping has entries. Caches: this file's layout,
    in the key's type or FP8."""
    num_blocks, _, block_size, _ = key_cache.shape
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        if slot >= num_blocks * block_size:
            raise IndexError(f"slot {slot} is outside the cache of {num_blocks * block_size} slots")
        block, offset = divmod(slot, block_size)
        key_cache[block, :, offset] = quantize(key[row], key_cache.dtype, k_scale)
        value_cache[block, :, offset] = quantize(value[row], value_cache.dtype, v_scale)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
    *,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    accumulate: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Causal attention of a ragged batch over the paged cache.

    query: [num_tokens, num_heads, head_dim], flattened; request i owns rows query_start_loc[i] : query_start_loc[i + 1], the last
    rows of its seq_lens[i] positions. Keys and values past seq_len are not read, whatever the slots hold. A row without keys
    (seq_len 0, or owned by no request) is zero. Sums are kept in `accumulate`.

    A score is query . key x scale, where an FP8 cache holds key / k_scale and value / v_scale (any other holds keys and values, whatever
    the scales: see `quantize`), then soft_cap x tanh(score / soft_cap) (Gemma 2), then + alibi_slopes[head] x (key position - query
    position) (Press et al. 2022); a query at position p sees keys p - sliding_window + 1 .. p (Beltagy et al. 2020)."""
    out = torch.zeros_like(query)
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    num_heads = query.shape[1]
    group = num_heads // num_kv_heads
    if key_cache.itemsize > 1:
        k_scale = v_scale = 1.0
    for i, seq_len in enumerate(seq_lens):
        start, end = query_start_loc[i], query_start_loc[i + 1]
        if seq_len == 0 or start == end:
            continue
        blocks = torch.tensor(block_tables[i][: -(-seq_len // block_size)], dtype=torch.int64, device=query.device)
        if sliding_window is not None:  # blocks before every window need not exist: any other stands in for them
            blocks[: max(0, seq_len - (end - start) + 1 - sliding_window) // block_size] = blocks[-1]
        key = _sequence(key_cache, blocks, seq_len).to(accumulate) * k_scale
        value = _sequence(value_cache, blocks, seq_len).to(accumulate) * v_scale
        rows = query[start:end].to(accumulate).view(end - start, num_kv_heads, group, head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", rows, key) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = (
            torch.arange(seq_len, device=query.device)[None, :]
            - torch.arange(seq_len - (end - start), seq_len, device=query.device)[:, None]
        )
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(accumulate).view(num_kv_heads, group, 1, 1) * distance
        hidden = distance > 0
        if sliding_window is not None:
            hidden |= distance <= -sliding_window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
        value = value.masked_fill(hidden.all(0)[:, None, None], 0.0)  # there the slots may hold anything, and 0 x NaN is NaN
        out[start:end] = torch.einsum("hgqk,khd->qhgd", weights, value).reshape(end - start, num_heads, head_dim).to(out.dtype)
    return out


def _sequence(cache: torch.Tensor, blocks: torch.Tensor, seq_len: int) -> torch.Tensor:
    """One sequence of a cache as [seq_len, num_kv_heads, head_dim]. FP8 goes through its bytes: torch does not index it everywhere."""
    gathered = cache.view(torch.uint8)[blocks].view(cache.dtype).float() if cache.itemsize == 1 else cache[blocks]
    return gathered.transpose(1, 2).flatten(0, 1)[:seq_len]


def to_classic_layout(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies in vLLM's layouts: keys [num_blocks, num_kv_heads, head_dim / x, block_size, x] with x = 16 bytes / item size, so that
    threads of a warp read 16 bytes each of neighbouring tokens; values [num_blocks, num_kv_heads, head_dim, block_size]
    (Kwon et al. 2023)."""
    x = 16 // key_cache.itemsize
    key = key_cache.reshape(*key_cache.shape[:3], -1, x).transpose(2, 3).contiguous()
    return key, value_cache.transpose(2, 3).contiguous()


def to_engine_layout(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of classic caches as [num_blocks, num_kv_heads, block_size, head_dim]: undoes `to_classic_layout`."""
    return key_cache.transpose(2, 3).flatten(3).contiguous(), value_cache.transpose(2, 3).contiguous()


MAX_LEVEL = 536870880.0
"""The largest fp32 below 2^29: 64 octaves under the best token."""
EXP2_COEFFICIENTS = tuple(
    float.fromhex(x)
    for x in ("0x1.b4d1e4p-13", "0x1.4ca4ccp-10", "0x1.3c4a8ap-7", "0x1.c69f6ap-5", "0x1.ebfc3ep-3", "0x1.62e430p-1", "0x1p0")
)
"""2^g on (0, 1], highest power first: within 1.4 units in the last place, and exactly 2 at 1."""


def token_levels(logits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """How much less likely than the best token of its row each token is, in 2^-23 octaves: floor((max - logit) * scale).

    logits: [num_rows, vocab_size]; scales: fp32 [num_rows], log2(e) / temperature * 2^23. Every fp32 operation is rounded once. int64."""
    x = logits.float()
    maximum = x.nan_to_num(NEG_INF, posinf=torch.finfo(torch.float32).max, neginf=NEG_INF).amax(-1, keepdim=True)
    levels = (maximum - x) * scales[:, None]
    return levels.nan_to_num(MAX_LEVEL, posinf=MAX_LEVEL, neginf=0.0).clamp(0.0, MAX_LEVEL).long()


def level_weights(levels: torch.Tensor) -> torch.Tensor:
    """floor(2^40 * 2^(-level / 2^23)), by a polynomial of fp32 multiplications and additions that are each rounded once: the same
    integer on every device, and sums that do not depend on their order. int64."""
    g = ((1 << 23) - (levels & 0x7FFFFF)).float() * 2.0**-23
    p = torch.full_like(g, EXP2_COEFFICIENTS[0])
    for coefficient in EXP2_COEFFICIENTS[1:]:
        p = p * g + coefficient
    return ((p * 2.0**23).long() << 16) >> (levels >> 23)


def kept_weights(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """The weight of each token after temperature, min-p, top-k and top-p; 0 = filtered out. int64 [num_rows, vocab_size].

    parameters: int64 [num_rows, 7] of kernels/row_parameters.py. Tokens are ordered by (logit descending, index ascending), and each
    filter looks at what those before it left: top-p keeps the fewest whose weight reaches ceil(p * weight left)."""
    scales = parameters[:, 0].to(torch.int32).view(torch.float32)
    is_greedy = (scales == 0.0)[:, None]
    levels = token_levels(logits, torch.where(scales == 0.0, 1.0, scales))
    order = logits.float().nan_to_num(NEG_INF, posinf=float("inf"), neginf=NEG_INF).sort(dim=-1, descending=True, stable=True).indices
    levels = levels.gather(-1, order)
    places = torch.arange(logits.shape[-1], device=logits.device)[None]
    max_level, top_k, share = (parameters[:, column, None] for column in (1, 2, 3))
    kept = torch.where(is_greedy, places == 0, (levels <= max_level) & ((top_k <= 0) | (places < top_k)))
    weights = level_weights(levels).where(kept, 0)
    total = weights.sum(-1, keepdim=True)
    target = (total >> 31) * share + (((total & 0x7FFFFFFF) * share + 0x7FFFFFFF) >> 31)
    before = weights.cumsum(-1) - weights
    weights = weights.where((before < target) | (share >= 1 << 31), 0)
    return torch.zeros_like(weights).scatter_(-1, order, weights)


def sample_tokens(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """One token a row: the winner of the exponential race of the kept tokens (kernels/exponential_race.py), whose time is the level plus
    the logarithm of an exponential variable. A row without any finite logit yields token 0. int64 [num_rows]."""
    is_kept = kept_weights(logits, parameters) > 0
    scales = parameters[:, 0].to(torch.int32).view(torch.float32)
    levels = token_levels(logits, torch.where(scales == 0.0, 1.0, scales)).where(is_kept, OUT)
    return torch.where(is_kept.any(-1), winners(levels, parameters[:, SEED:]), 0)


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The lowest index of the largest logit of each row; NaN never wins. int64 [num_rows]."""
    return logits.float().nan_to_num(NEG_INF, posinf=float("inf"), neginf=NEG_INF).argmax(-1)


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw log-softmax in fp32 of token_ids[i] in row rows[i], its rank (1 = the most likely), and the ids and logprobs of the
    num_top most likely tokens, ties by index."""
    x = logits[rows].float().nan_to_num(NEG_INF, posinf=float("inf"), neginf=NEG_INF)
    chosen = x.gather(-1, token_ids[:, None])
    top = x.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    logprobs = x.log_softmax(-1)
    return logprobs.gather(-1, token_ids[:, None])[:, 0], (x > chosen).sum(-1) + 1, top, logprobs.gather(-1, top)


IN_PROMPT = -(1 << 31)
"""Bit 31 of a token's entry in the history; the other bits count how often it was generated."""


def record_tokens(history: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, is_prompt: bool) -> None:
    """Note token_ids[i] in the history of slot slots[i]; ids and slots outside of it are skipped.
    history: int32 [num_slots, vocab_size]."""
    is_in = (slots >= 0) & (slots < history.shape[0]) & (token_ids >= 0) & (token_ids < history.shape[1])
    slots, token_ids = slots[is_in], token_ids[is_in]
    if is_prompt:
        history[slots, token_ids] |= IN_PROMPT
    else:
        history.index_put_((slots, token_ids), torch.ones_like(slots, dtype=torch.int32), accumulate=True)


def apply_penalties(logits: torch.Tensor, history: torch.Tensor, slots: torch.Tensor, penalties: torch.Tensor) -> None:
    """Repetition (Keskar et al. 2019) over prompt and output, then frequency and presence over the output. In place.

    logits: fp32 [num_rows, vocab_size]; slots: int64 [num_rows], -1 = none; penalties: fp32 [num_rows, 3]."""
    is_in = (slots >= 0) & (slots < history.shape[0])
    entries = history[slots.where(is_in, 0)].where(is_in[:, None], 0)
    counts = entries & 0x7FFFFFFF
    repetition, frequency, presence = (penalties[:, column, None] for column in range(3))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(counts > 0, repeated - (frequency * counts.float() + presence), repeated)
    logits.copy_(penalised.where(entries != 0, logits))


def apply_token_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """logits[rows[i], token_ids[i]] += values[i], in place; a pair occurs once, and pairs outside of the logits are skipped."""
    is_in = (rows >= 0) & (rows < logits.shape[0]) & (token_ids >= 0) & (token_ids < logits.shape[1])
    logits[rows[is_in], token_ids[is_in]] += values[is_in]


def apply_token_mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """-infinity, in place, where bit t % 32 of masks[i, t // 32] is clear, for token t of row rows[i]. masks: int32
    [num_masks, ceil(vocab_size / 32)]."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    for row, mask in zip(rows.tolist(), masks, strict=True):
        if 0 <= row < logits.shape[0]:
            logits[row].masked_fill_((mask[tokens // 32] >> (tokens % 32)) & 1 == 0, NEG_INF)
