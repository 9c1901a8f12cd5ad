"""Beam search as its definition reads: every hypothesis recomputed from its first token at every step. Slow, and nothing to get wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch


def plain_beam_search(
    logits_of: Callable[[list[int]], torch.Tensor],
    prompt: list[int],
    width: int,
    max_tokens: int,
    ending_ids: Collection[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool = False,
) -> list[tuple[float, list[int]]]:
    """`logits_of(token_ids)`: [vocab_size] after the last token. (score, generated tokens) of the best `width`, best first."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        totals = torch.cat([total + logits_of(prompt + tokens).float().log_softmax(-1).double() for total, tokens in live])
        vocab_size = len(totals) // len(live)
        next_live: list[tuple[float, list[int]]] = []
        num_candidates = min(len(totals), width * (1 + max(1, len(ending_ids))))
        for rank, position in enumerate(totals.topk(num_candidates).indices.tolist()):
            total, token_id = float(totals[position]), position % vocab_size
            tokens = [*live[position // vocab_size][1], token_id]
            if token_id in ending_ids:
                if rank < width:
                    ended.append((total / length**length_penalty, tokens))
            elif len(next_live) < width:
                next_live.append((total, tokens))
        ended = sorted(ended, key=lambda entry: -entry[0])[:width]
        live = next_live
        if length == max_tokens:
            ended += [(total / length**length_penalty, tokens) for total, tokens in live]
            break
        if len(ended) == width and (early_stopping or ended[-1][0] >= live[0][0] / length**length_penalty):
            break
    return sorted(ended, key=lambda entry: -entry[0])[:width]
