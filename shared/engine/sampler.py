"""From logits to tokens. Order: logit_bias, allowed_token_ids, min_tokens; repetition, frequency, presence penalties; temperature;
min-p; top-k; top-p; draw. min-p, top-k and top-p each look at what the steps before left.

Greedy rows take the argmax and never divide by the temperature. A random row draws once from a counter-based generator keyed by
(seed, sequence index, position), so its token does not depend on the rest of the batch or on the worker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from kernels.philox import uniform
from shared.messages import TokenLogprobs
from shared.sampling_params import SamplingParams

NEG_INF = float("-inf")


@dataclass(frozen=True)
class SamplingRow:
    """One row of logits and what to do with it."""

    params: SamplingParams
    seed: int
    """The request's seed, or the one drawn for it when it gave none."""
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    stop_ids: frozenset[int]
    """Ids that would end the request; suppressed until min_tokens are out."""


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    """logits: fp32 [len(rows), vocab_size]; not changed."""
    greedy = logits.argmax(-1).tolist()
    return [_sample_row(logits[i], row, greedy[i]) for i, row in enumerate(rows)]


def _sample_row(raw: torch.Tensor, row: SamplingRow, argmax: int) -> SampledToken:
    adjusted = adjust_logits(raw, row)
    if not row.params.is_greedy:
        token_id = _draw(adjusted, row)
    elif adjusted is raw:
        token_id = argmax
    else:
        token_id = int(adjusted.argmax())
    num_logprobs = row.params.num_logprobs
    return SampledToken(token_id, None if num_logprobs is None else token_logprobs(raw, token_id, num_logprobs))


def adjust_logits(raw: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """Bias, masks and penalties on a copy; `raw` itself when none applies."""
    params = row.params
    masks_stops = len(row.output_token_ids) < params.min_tokens and row.stop_ids
    penalises = params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    if not (params.logit_bias or params.allowed_token_ids is not None or masks_stops or penalises):
        return raw
    logits = raw.clone()
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids)
        kept = torch.full_like(logits, NEG_INF)
        kept[allowed] = logits[allowed]
        logits = kept
    if masks_stops:
        masked = logits.clone()
        masked[[token_id for token_id in row.stop_ids if 0 <= token_id < len(logits)]] = NEG_INF
        # allowed_token_ids may name nothing but stops; then the stop is the only answer left.
        logits = masked if masked.max() > NEG_INF else logits
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.prompt_token_ids) | set(row.output_token_ids)))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if row.output_token_ids and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(row.output_token_ids)
        ids = torch.tensor(list(counts))
        logits[ids] -= params.frequency_penalty * torch.tensor(list(counts.values()), dtype=logits.dtype) + params.presence_penalty
    return logits.nan_to_num_(nan=NEG_INF, posinf=torch.finfo(logits.dtype).max, neginf=NEG_INF)


def filtered_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """fp64 probabilities over the vocabulary after temperature, min-p, top-k and top-p, not normalised; 0 = filtered out."""
    # The maximum is taken off first: a temperature near 0 then sends all others to -inf instead of overflowing.
    probs = ((logits - logits.max()).double() / params.temperature).softmax(-1)
    if params.min_p > 0.0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    if 0 < params.top_k < len(probs):
        top = probs.topk(params.top_k)
        probs = torch.zeros_like(probs).scatter_(0, top.indices, top.values)
    if params.top_p < 1.0:
        probs = _top_p(probs, params.top_p)
    return probs


def _top_p(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of most likely tokens whose share reaches top_p; at least one."""
    target = top_p * probs.sum()
    for num_candidates in (256, 4096, len(probs)):
        # Most distributions are decided within a few hundred tokens; a full sort is the last resort.
        top = probs.topk(min(num_candidates, len(probs)))
        before = top.values.cumsum(0) - top.values
        if num_candidates >= len(probs) or before[-1] + top.values[-1] >= target:
            break
    kept = torch.where(before < target, top.values, 0.0)
    kept[0] = top.values[0]
    return torch.zeros_like(probs).scatter_(0, top.indices, kept)


def _draw(logits: torch.Tensor, row: SamplingRow) -> int:
    cumulative = filtered_probs(logits, row.params).cumsum(0)
    u = uniform(row.seed, row.params.sequence_index, len(row.output_token_ids))
    # right=True skips tokens of probability 0, which add nothing to the cumulative sum.
    index = int(torch.searchsorted(cumulative, cumulative[-1] * u, right=True))
    # Only logits that are not numbers lead past the end; an id outside the vocabulary must never leave here.
    return index if index < len(cumulative) else int(logits.nan_to_num(nan=NEG_INF).argmax())


def token_logprobs(raw: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Raw log-softmax in fp32, before bias, penalties and temperature."""
    logprobs = raw.float().log_softmax(-1)
    top = logprobs.topk(min(num_top, len(logprobs)))
    chosen = logprobs[token_id]
    return TokenLogprobs(
        logprob=float(chosen),
        rank=int((logprobs > chosen).sum()) + 1,
        top_token_ids=tuple(top.indices.tolist()),
        top_logprobs=tuple(top.values.tolist()),
    )
