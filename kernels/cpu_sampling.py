"""Sampling on the CPU: the draws of kernels/reference.py without sorting the vocabulary.

A row's weights are computed only where a filter needs the total or no filter makes the row short; the rest happens among the most
likely tokens, which `topk` finds. Rows go one by one: a row fits the cache of a core, a batch does not.
"""

from __future__ import annotations

import math

import torch

from kernels.philox import random_bits
from kernels.reference import EXP2_COEFFICIENTS, MAX_LEVEL
from kernels.row_parameters import MAX_LEVEL_OFF, TOP_P_OFF

NEG_INF = float("-inf")
_MAX_FLOAT = torch.finfo(torch.float32).max
_FRACTION = (1 << 23) - 1
_SEGMENT = 256


def sample_tokens(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """As `kernels.reference.sample_tokens`."""
    scales = parameters[:, 0].to(torch.int32).view(torch.float32).tolist()
    rows = zip(logits.float(), scales, parameters.tolist(), strict=True)
    return torch.tensor([_sample_row(row, scale, words) for row, scale, words in rows], dtype=torch.int64)


def _sample_row(x: torch.Tensor, scale: float, words: list[int]) -> int:
    maximum = float(x.amax())
    if not math.isfinite(maximum):
        x = x.nan_to_num(NEG_INF, posinf=float("inf"), neginf=NEG_INF)
        maximum = min(float(x.amax()), _MAX_FLOAT)
        if maximum == NEG_INF:
            return 0
    if scale == 0.0:
        return int(x.argmax())
    _, max_level, top_k, share, *keys = words
    bits = random_bits(*keys)
    if 0 < top_k < len(x):
        order = most_likely(x, top_k)
        weights = _weights(x[order], maximum, scale, max_level)
        if share < TOP_P_OFF:
            weights = _nucleus(weights, _share_of(int(weights.sum()), share))
        return _draw(*_in_index_order(order, weights), bits)
    weights = _weights(x, maximum, scale, max_level)
    if share >= TOP_P_OFF:
        segments = weights[: len(x) // _SEGMENT * _SEGMENT].view(-1, _SEGMENT).sum(-1).cumsum(0)
        return _draw_from_segments(weights, segments, bits)
    target = _share_of(int(weights.sum()), share)
    for num_candidates in (256, 4096, len(x)):
        order = most_likely(x, min(num_candidates, len(x)))
        candidates = weights[order]
        # Most distributions are decided within a few hundred tokens; a full sort is the last resort.
        if num_candidates >= len(x) or int(candidates.sum()) >= target:
            break
    return _draw(*_in_index_order(order, _nucleus(candidates, target)), bits)


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `kernels.reference.token_logprobs`."""
    x = logits[rows].float().nan_to_num(NEG_INF, posinf=float("inf"), neginf=NEG_INF)
    chosen = x.gather(-1, token_ids[:, None])
    top = torch.stack([most_likely(row, num_top) for row in x]) if num_top and len(rows) else rows.new_empty((len(rows), num_top))
    logprobs = x.log_softmax(-1)
    return logprobs.gather(-1, token_ids[:, None])[:, 0], (x > chosen).sum(-1) + 1, top, logprobs.gather(-1, top)


def apply_penalties(logits: torch.Tensor, history: torch.Tensor, slots: torch.Tensor, penalties: torch.Tensor) -> None:
    """As `kernels.reference.apply_penalties`; touches the tokens of the history only."""
    for row, slot in enumerate(slots.tolist()):
        if not 0 <= slot < len(history):
            continue
        token_ids = history[slot].nonzero().flatten()
        counts = history[slot][token_ids] & 0x7FFFFFFF
        repetition, frequency, presence = penalties[row]
        values = logits[row][token_ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[row][token_ids] = torch.where(counts > 0, values - (frequency * counts.float() + presence), values)


def most_likely(x: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest, ties by index: the first of a stable descending sort. x holds no NaN."""
    if count >= len(x):
        return x.sort(dim=-1, descending=True, stable=True).indices
    top = x.topk(count)
    last = top.values[-1]
    if int((x >= last).sum()) > count:  # topk takes any of the ties at its end
        above = top.indices[top.values > last]
        indices = torch.cat((above, (x == last).nonzero().flatten()[: count - len(above)]))
    else:
        indices = top.indices
    indices = indices.sort().values
    return indices[x[indices].sort(dim=-1, descending=True, stable=True).indices]


def _weights(x: torch.Tensor, maximum: float, scale: float, max_level: int) -> torch.Tensor:
    """`level_weights(token_levels(x))` where the level is at most max_level, else 0. int64."""
    levels = torch.sub(maximum, x).mul_(scale).clamp_(0.0, MAX_LEVEL).int()
    # The same numbers as in the reference, made from their bits: 2 - (1 + fraction), then 2^(39 - octaves).
    g = (levels & _FRACTION).bitwise_or_(127 << 23).view(torch.float32).neg_().add_(2.0)
    p = g * EXP2_COEFFICIENTS[0]
    p.add_(EXP2_COEFFICIENTS[1])
    for coefficient in EXP2_COEFFICIENTS[2:]:
        p.mul_(g).add_(coefficient)
    p.mul_((levels & ~_FRACTION).neg_().add_(166 << 23).view(torch.float32))
    if max_level < MAX_LEVEL_OFF:
        p.masked_fill_(levels > max_level, 0.0)
    return p.long()


def _share_of(total: int, share: int) -> int:
    return -(-total * share // TOP_P_OFF)


def _nucleus(weights: torch.Tensor, target: int) -> torch.Tensor:
    """weights: in order of likelihood; 0 behind the first that reach the target together."""
    return weights.where(weights.cumsum(0) - weights < target, 0)


def _in_index_order(order: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    indices, places = order.sort()
    return indices, weights[places]


def _draw(indices: torch.Tensor, weights: torch.Tensor, bits: int) -> int:
    cumulative = weights.cumsum(0)
    return int(indices[torch.searchsorted(cumulative, bits * int(cumulative[-1]) >> 64, right=True)])


def _draw_from_segments(weights: torch.Tensor, segments: torch.Tensor, bits: int) -> int:
    """segments: inclusive sums over whole segments; what is left of the row follows them."""
    tail = weights[len(segments) * _SEGMENT :]
    before_tail = int(segments[-1]) if len(segments) else 0
    threshold = bits * (before_tail + int(tail.sum())) >> 64
    segment = int(torch.searchsorted(segments, threshold, right=True))
    if segment > 0:
        threshold -= int(segments[segment - 1])
    first = segment * _SEGMENT
    return first + int(torch.searchsorted(weights[first : first + _SEGMENT].cumsum(0), threshold, right=True))
