"""Beam search: which hypotheses live, which have ended, and when the search is over. Knows nothing of blocks or messages.

Definitions are those of Hugging Face's generate. The score of a candidate is the sum of the log-probabilities of its tokens, by the
log-softmax of the logits after bias, masks and penalties. Each step ranks the continuations of all live beams together. A stop token
ends a hypothesis if it ranks among the best `width`; of the others the best `width` live on. Of those that ended, the best `width` by
score / num_tokens ** length_penalty are kept; num_tokens counts generated tokens, the stop token included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shared.engine.sampler import NEG_INF, SamplingRow, adjust_logits, raw_logprobs
from shared.messages import FinishReason, TokenLogprobs
from shared.sampling_params import BeamSearchParams


@dataclass
class Beam:
    """A live hypothesis. `logits`: [vocab_size], what follows its last token, once that is computed."""

    cumulative_logprob: float = 0.0
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One for each generated token."""
    logits: torch.Tensor | None = None


@dataclass(frozen=True)
class Hypothesis:
    """One that has ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    score: float
    finish_reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True)
class Continuation:
    """Beam `index` of the next step is beam `parent` of this one and a token. The first continuation of a beam keeps its index."""

    parent: int
    index: int
    token_id: int


@dataclass(frozen=True)
class _Candidate:
    parent: int
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """Starts as one beam, index 0: the prompt. Call `take_logits` for each beam, and `advance` when `is_ready`, until `is_done`."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos_token_ids: frozenset[int], stop_token_ids: frozenset[int]) -> None:
        self.params = params
        self.is_done = False
        self.beams: dict[int, Beam] = {0: Beam()}
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._ending_ids = eos_token_ids | stop_token_ids
        self._ended: list[Hypothesis] = []
        self._num_beams_made = 1

    def take_logits(self, index: int, logits: torch.Tensor) -> None:
        """logits: [vocab_size], for what follows the last token of beam `index`."""
        self.beams[index].logits = logits

    @property
    def is_ready(self) -> bool:
        return all(beam.logits is not None for beam in self.beams.values())

    def best(self, count: int) -> list[Hypothesis]:
        """The best that ended, best first. Where masks leave fewer answers than `count`, the last of them is repeated."""
        return (self._ended + self._ended[-1:] * count)[:count]

    def advance(self, rows: Mapping[int, SamplingRow]) -> list[Continuation]:
        """One token further. `rows`: each live beam's tokens and parameters. The live beams afterwards; none when the search is done.
        Raises ValueError when there is no candidate at all, as with logits that are not numbers."""
        indexes = list(self.beams)
        logits = torch.stack([beam.logits for beam in self.beams.values() if beam.logits is not None])
        beam_rows = [rows[index] for index in indexes]
        candidates = self._candidates(logits, beam_rows)
        if not candidates:
            raise ValueError("no token can follow")
        num_tokens = beam_rows[0].num_output_tokens + 1
        ending = [candidate for candidate in candidates[: self.params.width] if candidate.token_id in self._ending_ids]
        live = [candidate for candidate in candidates if candidate.token_id not in self._ending_ids][: self.params.width]
        logprobs = self._logprobs(logits, beam_rows, indexes, [*ending, *live])
        for candidate in ending:
            self._end(candidate, rows[candidate.parent], logprobs[candidate], "stop")
        if num_tokens >= self._max_tokens:
            for candidate in live:
                self._end(candidate, rows[candidate.parent], logprobs[candidate], "length")
            live = []
        self.is_done = not live or self._cannot_improve(live[0].cumulative_logprob, num_tokens)
        return [] if self.is_done else self._continue(live, logprobs)

    def _candidates(self, logits: torch.Tensor, rows: list[SamplingRow]) -> list[_Candidate]:
        """Best first: enough to rank the best `width` of all, and to find `width` that live on however many tokens end one."""
        scores = adjust_logits(logits, rows).log_softmax(-1, dtype=torch.float32)
        ending_ids = torch.tensor([i for i in sorted(self._ending_ids) if i < scores.shape[1]], dtype=torch.int64, device=scores.device)
        found: list[_Candidate] = []
        beams = list(self.beams.items())
        for part, token_ids in ((scores.index_fill(1, ending_ids, NEG_INF), None), (scores[:, ending_ids], ending_ids)):
            values, columns = part.topk(min(self.params.width, part.shape[1]))
            tokens = columns if token_ids is None else token_ids[columns]
            for (index, beam), beam_values, beam_tokens in zip(beams, values.tolist(), tokens.tolist(), strict=True):
                found += [
                    _Candidate(index, token_id, beam.cumulative_logprob + value)
                    for token_id, value in zip(beam_tokens, beam_values, strict=True)
                    if math.isfinite(value)
                ]
        order = {index: position for position, (index, _) in enumerate(beams)}
        return sorted(found, key=lambda c: (-c.cumulative_logprob, order[c.parent], c.token_id))

    def _logprobs(
        self, logits: torch.Tensor, rows: list[SamplingRow], indexes: list[int], candidates: list[_Candidate]
    ) -> dict[_Candidate, tuple[TokenLogprobs | None, ...]]:
        asked: dict[int, TokenLogprobs] = {}
        if rows[0].params.num_logprobs is not None:
            positions = [indexes.index(candidate.parent) for candidate in candidates]
            tokens = torch.tensor([candidate.token_id for candidate in candidates], device=logits.device)
            asked = raw_logprobs(logits[positions], [rows[position] for position in positions], tokens)
        return {candidate: (*self.beams[candidate.parent].logprobs, asked.get(number)) for number, candidate in enumerate(candidates)}

    def _end(
        self, candidate: _Candidate, row: SamplingRow, logprobs: tuple[TokenLogprobs | None, ...], finish_reason: FinishReason
    ) -> None:
        token_ids = (*row.token_ids[row.num_prompt_tokens :], candidate.token_id)
        score = candidate.cumulative_logprob / len(token_ids) ** self.params.length_penalty
        stop_token_id = candidate.token_id if candidate.token_id in self._stop_token_ids else None
        self._ended.append(Hypothesis(token_ids, logprobs, score, finish_reason, stop_token_id))
        self._ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self._ended[self.params.width :]

    def _cannot_improve(self, best_live: float, num_tokens: int) -> bool:
        if len(self._ended) < self.params.width:
            return False
        return self.params.early_stopping or self._ended[-1].score >= best_live / num_tokens**self.params.length_penalty

    def _continue(self, live: list[_Candidate], logprobs: Mapping[_Candidate, tuple[TokenLogprobs | None, ...]]) -> list[Continuation]:
        continuations: list[Continuation] = []
        beams: dict[int, Beam] = {}
        for candidate in live:
            index = candidate.parent
            if index in beams:
                index, self._num_beams_made = self._num_beams_made, self._num_beams_made + 1
            beams[index] = Beam(candidate.cumulative_logprob, logprobs[candidate])
            continuations.append(Continuation(candidate.parent, index, candidate.token_id))
        self.beams = beams
        return continuations
