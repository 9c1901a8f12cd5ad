"""Sampling on the CPU: the draws of kernels/reference.py without sorting the vocabulary.

What a filter keeps is found as on a GPU: by the maxima of groups for top-k, by a histogram of weights over levels for top-p. The race
of what is kept is kernels/csrc/cpu_sampling.cpp, or without a compiler torch, with the same result. Rows go one by one: a row fits the
cache of a core, a batch does not. Comparisons and searches go through numpy: those of torch are not vectorised on a CPU.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math

import numpy as np
import torch

from kernels.build import KernelBuildError, Library, load
from kernels.exponential_race import OUT, log_time_table, winners
from kernels.reference import EXP2_COEFFICIENTS, MAX_LEVEL
from kernels.row_parameters import MAX_LEVEL_OFF, SEED, TOP_P_OFF

NEG_INF = float("-inf")
_MAX_FLOAT = torch.finfo(torch.float32).max
_FRACTION = (1 << 23) - 1
_SEGMENT = 256
_BUCKET_BITS = 18
_NUM_BUCKETS = 1 << 29 - _BUCKET_BITS
"""Levels have 29 bits: 2048 buckets of 1/32 octave."""
_log = logging.getLogger(__name__)


def libraries() -> list[Library]:
    """What images build ahead of time."""
    return [Library("cpu_sampling.cpp")]


@functools.cache
def _kernel() -> ctypes._NamedFuncPointer | None:
    try:
        kernel = load(libraries()[0]).cpu_winner
    except (KernelBuildError, OSError) as error:
        _log.warning("draws on the CPU run on torch, which takes milliseconds a row: %s", error)
        return None
    kernel.argtypes, kernel.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int64
    return kernel


def prepare() -> None:
    """Build and load the kernel, once; not while a request waits."""
    _kernel()


def sample_tokens(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """As `kernels.reference.sample_tokens`."""
    scales = parameters[:, 0].to(torch.int32).view(torch.float32).tolist()
    rows = zip(logits.float(), scales, parameters, strict=True)
    return torch.tensor([_sample_row(row, scale, words) for row, scale, words in rows], dtype=torch.int64)


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """As `kernels.reference.greedy_tokens`."""
    return torch.tensor([_argmax(_without_nan(row)) for row in logits.float()], dtype=torch.int64)


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `kernels.reference.token_logprobs`."""
    logprobs, ranks = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int64)
    top_ids, top_logprobs = torch.empty(len(rows), num_top, dtype=torch.int64), torch.empty(len(rows), num_top)
    for i, (row, token_id) in enumerate(zip(rows.tolist(), token_ids.tolist(), strict=True)):
        x = _without_nan(logits[row].float())
        ranks[i] = int(np.count_nonzero(x.numpy() > x.numpy()[token_id])) + 1
        if num_top:
            top_ids[i] = most_likely(x, num_top)
        x = x.log_softmax(-1)
        logprobs[i] = x[token_id]
        top_logprobs[i] = x[top_ids[i]]
    return logprobs, ranks, top_ids, top_logprobs


def apply_token_mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """As `kernels.reference.apply_token_mask`."""
    bits = np.unpackbits(~masks.numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits.view(np.bool_))
    for row, is_forbidden in zip(rows.tolist(), forbidden, strict=True):
        if 0 <= row < logits.shape[0]:
            logits[row].masked_fill_(is_forbidden, NEG_INF)


def most_likely(x: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest, ties by index: the first of a stable descending sort. x holds no NaN."""
    # At least `count` elements reach the count-th largest maximum of any groups; with enough groups, hardly more do.
    group_size = next((size for size in (16, 4) if len(x) // size >= 2 * count), None)
    if group_size is None:
        return x.sort(dim=-1, descending=True, stable=True).indices[:count]
    maxima = x[: len(x) // group_size * group_size].view(group_size, -1).amax(0)
    candidates = _indices_where(x.numpy() >= maxima.topk(count).values[-1].numpy())
    return candidates[x[candidates].sort(dim=-1, descending=True, stable=True).indices[:count]]


def _indices_where(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(mask))


def _without_nan(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(NEG_INF, posinf=float("inf"), neginf=NEG_INF) if math.isnan(float(x.amax())) else x


def _argmax(x: torch.Tensor) -> int:
    """The lowest index of the maximum: in the first segment that has it."""
    num_segments = len(x) // _SEGMENT
    if num_segments > 1:
        first = int(x[: num_segments * _SEGMENT].view(-1, _SEGMENT).amax(-1).argmax()) * _SEGMENT
        tail = x[num_segments * _SEGMENT :]
        if not len(tail) or float(tail.amax()) <= float(x[first : first + _SEGMENT].amax()):
            return first + int(x[first : first + _SEGMENT].argmax())
    return int(x.argmax())


def _sample_row(x: torch.Tensor, scale: float, words: torch.Tensor) -> int:
    x = _without_nan(x)
    maximum = min(float(x.amax()), _MAX_FLOAT)
    if maximum == NEG_INF:
        return 0
    if scale == 0.0:
        return _argmax(x)
    max_level, top_k, share = words[1:SEED].tolist()
    if 0 < top_k < len(x):
        order = most_likely(x, top_k)
        kept = _levels(x[order], maximum, scale, max_level)
        if share < TOP_P_OFF:
            weights = _weights(kept)
            kept = kept.where(_nucleus(weights, _share_of(int(weights.sum()), share)) > 0, OUT)
        levels = torch.full((len(x),), OUT, dtype=torch.int32)
        levels[order] = kept
    else:
        levels = _levels(x, maximum, scale, max_level)
        if share < TOP_P_OFF:
            _drop_tail(x, levels, share)
    return _winner(levels, words[SEED:])


def _winner(levels: torch.Tensor, keys: torch.Tensor) -> int:
    """`kernels.exponential_race.winners` of one row. levels: contiguous int32; keys: int64 [3]."""
    kernel = _kernel()
    if kernel is None:
        return int(winners(levels[None], keys[None]))
    return int(kernel(levels.data_ptr(), len(levels), keys.data_ptr(), log_time_table().data_ptr()))


def _levels(x: torch.Tensor, maximum: float, scale: float, max_level: int) -> torch.Tensor:
    """int32, OUT past max_level."""
    levels = torch.sub(maximum, x).mul_(scale).clamp_(0.0, MAX_LEVEL).int()
    return levels.masked_fill_(levels > max_level, OUT) if max_level < MAX_LEVEL_OFF else levels


def _weights(levels: torch.Tensor) -> torch.Tensor:
    """`kernels.reference.level_weights`; 0 of OUT. int64."""
    # The same numbers as in the reference, made from their bits: 2 - (1 + fraction), then 2^(39 - octaves).
    g = (levels & _FRACTION).bitwise_or_(127 << 23).view(torch.float32).neg_().add_(2.0)
    p = g * EXP2_COEFFICIENTS[0]
    p.add_(EXP2_COEFFICIENTS[1])
    for coefficient in EXP2_COEFFICIENTS[2:]:
        p.mul_(g).add_(coefficient)
    return p.mul_((levels & ~_FRACTION).neg_().add_(166 << 23).view(torch.float32)).long()


def _share_of(total: int, share: int) -> int:
    return -(-total * share // TOP_P_OFF)


def _nucleus(weights: torch.Tensor, target: int) -> torch.Tensor:
    """weights: in order of likelihood; 0 behind the first that reach the target together."""
    return weights.where(weights.cumsum(0) - weights < target, 0)


def _drop_tail(x: torch.Tensor, levels: torch.Tensor, share: int) -> None:
    """Put OUT, in place, what top-p drops from a whole row: only the bucket in which the target is reached needs an order."""
    weights, buckets = _weights(levels), (levels >> _BUCKET_BITS).clamp_(max=_NUM_BUCKETS - 1)
    sums = torch.zeros(_NUM_BUCKETS, dtype=torch.int64).scatter_add_(0, buckets.long(), weights).cumsum(0)
    target = _share_of(int(sums[-1]), share)
    boundary = int(torch.searchsorted(sums, target))
    members = _indices_where(buckets.numpy() == boundary)
    members = members[x[members].sort(dim=-1, descending=True, stable=True).indices]
    kept = _nucleus(weights[members], target - int(sums[boundary - 1]) if boundary else target)
    levels.numpy()[buckets.numpy() > boundary] = OUT
    levels[members] = levels[members].where(kept > 0, OUT)


def apply_penalties(logits: torch.Tensor, history: torch.Tensor, slots: torch.Tensor, penalties: torch.Tensor) -> None:
    """As `kernels.reference.apply_penalties`; touches the tokens of the history only."""
    for row, slot in enumerate(slots.tolist()):
        if not 0 <= slot < len(history):
            continue
        token_ids = _indices_where(history[slot].numpy() != 0)
        counts = history[slot][token_ids] & 0x7FFFFFFF
        repetition, frequency, presence = penalties[row]
        values = logits[row][token_ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[row][token_ids] = torch.where(counts > 0, values - (frequency * counts.float() + presence), values)
