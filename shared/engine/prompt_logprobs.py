"""Log-probabilities of a prompt's own tokens, from the hidden states of the chunk that was just computed.

The LM head is applied a slice of rows at a time, so that the logits stay small whatever the size of the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels import sampling
from shared.batch import ScheduledRequest
from shared.messages import PromptLogprobs, TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity."""
MAX_LOGITS = 1 << 23
"""Elements of one slice of logits: 32 MiB of fp32. Also what bounds the size of a message."""


def score_prompts(
    hidden: torch.Tensor, rows: Sequence[ScheduledRequest], compute_logits: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
) -> list[PromptLogprobs]:
    """hidden: [sum of len(row.scored_positions), hidden_size], after the last norm, in the order of `rows`. One message a slice;
    raw log-softmax in fp32. The row at position p is about the token at p + 1."""
    messages: list[PromptLogprobs] = []
    slice_size = max(1, MAX_LOGITS // vocab_size)
    first_row = 0
    for row in rows:
        positions = row.scored_positions
        for start in range(positions.start, positions.stop, slice_size):
            end = min(start + slice_size, positions.stop)
            offset = first_row + start - positions.start
            logits = compute_logits(hidden[offset : offset + end - start])
            messages.append(_score(row, start, end, logits))
        first_row += len(positions)
    return messages


def _score(row: ScheduledRequest, start: int, end: int, logits: torch.Tensor) -> PromptLogprobs:
    request = row.request
    targets = torch.tensor(request.token_ids[start + 1 : end + 1], device=logits.device)
    num_top = min(request.num_prompt_logprobs or 0, logits.shape[1])
    results = sampling.token_logprobs(logits, torch.arange(end - start, device=logits.device), targets, num_top)
    entries = zip(*(result.tolist() for result in results), strict=True)
    return PromptLogprobs(
        request_id=request.request_id,
        first_position=start + 1,
        entries=tuple(
            TokenLogprobs(logprob=_finite(logprob), rank=rank, top_token_ids=tuple(top_ids), top_logprobs=tuple(map(_finite, top_logprobs)))
            for logprob, rank, top_ids, top_logprobs in entries
        ),
    )


def _finite(logprob: float) -> float:
    # JSON has no infinity. In this order, since nothing is greater than NaN.
    return max(LOWEST_LOGPROB, logprob)
