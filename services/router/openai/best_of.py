"""Which of several drawn sequences are the best: by the mean of the raw log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.openai.choice import TokenPiece


def best(candidates: Sequence[Sequence[TokenPiece]], count: int) -> list[int]:
    """Indexes of the best `count` of `candidates`, best first, the earlier one where two are equal. Every piece has its logprobs."""
    return sorted(range(len(candidates)), key=lambda index: (-_mean_logprob(candidates[index]), index))[:count]


def _mean_logprob(pieces: Sequence[TokenPiece]) -> float:
    return sum(piece.logprobs.logprob for piece in pieces if piece.logprobs is not None) / len(pieces)
