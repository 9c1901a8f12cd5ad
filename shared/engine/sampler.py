"""From logits to tokens. Order: logit_bias; grammar, bad_words, allowed_token_ids, min_tokens; repetition, frequency, presence penalties;
temperature; min-p; top-k; top-p; draw. min-p, top-k and top-p each look at what the steps before left.

The arithmetic is in kernels/sampling.py, defined in integers: a random row draws by a race of its tokens, each with bits of a counter-based
generator keyed by (seed, sequence index, position, token), so its token depends neither on the rest of the batch nor on the worker or its
device, nor on the last digits of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels import sampling
from kernels.row_parameters import row_parameters
from shared.engine.device import Marker, to_device, to_host
from shared.engine.structured_output import TokenMask, without
from shared.errors import InvalidRequestError
from shared.messages import TokenLogprobs
from shared.sampling_params import SamplingParams

NEG_INF = float("-inf")


@dataclass(frozen=True)
class SamplingRow:
    """One row of logits and what to do with it."""

    params: SamplingParams
    seed: int
    """The request's seed, or the one drawn for it when it gave none."""
    token_ids: Sequence[int]
    """Prompt, then output; the request's own list, not a copy."""
    num_prompt_tokens: int
    stop_ids: frozenset[int]
    """Ids that would end the request; suppressed until min_tokens are out."""
    sequence_index: int = 0
    """Which sequence of its request this is: the second key of the random generator."""
    grammar_mask: TokenMask | None = None
    """What the request's grammar and bad words allow next."""
    num_ahead: int = 0
    """Tokens drawn before this one that are not in token_ids yet."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) + self.num_ahead - self.num_prompt_tokens

    @property
    def can_run_ahead(self) -> bool:
        """Its next draws depend on no token drawn before, but for the logits."""
        return not (self.is_masked or self.is_penalised or self.params.logit_bias or self.suppressed_ids)

    @property
    def suppressed_ids(self) -> frozenset[int]:
        return self.stop_ids if self.num_output_tokens < self.params.min_tokens else frozenset()

    @property
    def is_penalised(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    @property
    def is_masked(self) -> bool:
        return self.grammar_mask is not None or self.params.allowed_token_ids is not None

    def kernel_parameters(self) -> list[int]:
        params = self.params
        filters = (params.temperature, params.top_k, params.top_p, params.min_p)
        return row_parameters(*filters, self.seed, self.sequence_index, self.num_output_tokens)


_NOT_FINITE = "the model's logits are not finite numbers: its weights are damaged, or too large for the engine's dtype (float32 takes most)"


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | ValueError]:
    """logits: [len(rows), vocab_size], on any device; not changed. One wait for the device, at the end. See PendingTokens.result."""
    return PendingTokens(logits, rows).result()


class PendingTokens:
    """One token for each row, being drawn on the device of the logits: `tokens`, int64 [len(rows)]."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow], *, is_plain: bool = False) -> None:
        """logits: [len(rows), vocab_size]; not changed. Waits for nothing. `is_plain`: all rows can run ahead, so nothing is to be
        adjusted. Raises InvalidRequestError when a row's masks leave no token."""
        adjusted = logits if is_plain else adjust_logits(logits, rows)
        if all(row.params.is_greedy for row in rows):
            self.tokens = sampling.greedy_tokens(adjusted)
        else:
            parameters = _tensor([row.kernel_parameters() for row in rows], torch.int64, logits.device)
            self.tokens = sampling.sample_tokens(adjusted, parameters)
        self._logprobs = _PendingLogprobs(logits, rows, self.tokens)
        self._on_host = to_host(self.tokens)
        self._logits = to_host(logits.gather(1, self.tokens[:, None]))
        self._done = Marker(logits.device)

    def result(self) -> list[SampledToken | ValueError]:
        """Waits for the device. A ValueError for a row of which no logit, or no log-probability, is a number: whatever token was drawn
        of it means nothing."""
        self._done.wait()
        logprobs = self._logprobs.result()
        tokens: list[SampledToken | ValueError] = []
        for index, (token_id, (logit,)) in enumerate(zip(self._on_host.tolist(), self._logits.tolist(), strict=True)):
            found = logprobs.get(index) if math.isfinite(logit) else ValueError(_NOT_FINITE)
            tokens.append(found if isinstance(found, ValueError) else SampledToken(token_id, found))
        return tokens


def adjust_logits(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Bias, masks and penalties on an fp32 copy; `logits` itself when no row has any."""
    vocab_size, device = logits.shape[1], logits.device
    biases = [(index, token_id, value) for index, row in enumerate(rows) for token_id, value in _biases(row, vocab_size).items()]
    masked = [(index, mask) for index, row in enumerate(rows) if (mask := _allowed_mask(row, vocab_size)) is not None]
    penalised = [index for index, row in enumerate(rows) if row.is_penalised]
    if not (biases or masked or penalised):
        return logits
    logits = logits.to(torch.float32, copy=True)
    if biases:
        row_ids, token_ids, values = zip(*biases, strict=True)
        pairs = _tensor(row_ids, torch.int64, device), _tensor(token_ids, torch.int64, device)
        sampling.apply_token_bias(logits, *pairs, _tensor(values, torch.float32, device))
    if masked:
        masks = torch.from_numpy(np.stack([mask for _, mask in masked])).to(device)
        sampling.apply_token_mask(logits, _tensor([index for index, _ in masked], torch.int64, device), masks)
    if penalised:
        _penalise(logits, rows, penalised)
    return logits


def _biases(row: SamplingRow, vocab_size: int) -> dict[int, float]:
    biases = dict(row.params.logit_bias)
    if not row.is_masked:  # else the mask takes care of suppressed ids
        biases |= {token_id: NEG_INF for token_id in row.suppressed_ids if 0 <= token_id < vocab_size}
    return biases


def _allowed_mask(row: SamplingRow, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]] | None:
    """A bit per token. Raises InvalidRequestError when nothing is left."""
    if not row.is_masked:
        return None
    mask = row.grammar_mask
    if row.params.allowed_token_ids is not None:
        is_allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
        is_allowed[list(row.params.allowed_token_ids)] = True
        allowed = np.packbits(is_allowed, bitorder="little").view(np.uint32)
        mask = allowed if mask is None else mask & allowed
    assert mask is not None
    if not mask.any():
        raise InvalidRequestError("its grammar, allowed_token_ids and bad_words together leave no token to go on with")
    # Nothing but stops may be left; then the stop is the only answer, whatever min_tokens says.
    unstopped = without(mask, row.suppressed_ids)
    return (unstopped if unstopped.any() else mask).view(np.int32)


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow], penalised: list[int]) -> None:
    device = logits.device
    history = torch.zeros(len(penalised), logits.shape[1], dtype=torch.int32, device=device)
    slots = torch.full((len(rows),), -1)
    penalties = torch.ones(len(rows), 3)
    for slot, index in enumerate(penalised):
        row, params = rows[index], rows[index].params
        slots[index] = slot
        penalties[index] = torch.tensor([params.repetition_penalty, params.frequency_penalty, params.presence_penalty])
        token_ids = _tensor(row.token_ids, torch.int64, device)
        for part, is_prompt in ((token_ids[: row.num_prompt_tokens], True), (token_ids[row.num_prompt_tokens :], False)):
            sampling.record_tokens(history, torch.full_like(part, slot), part, is_prompt)
    sampling.apply_penalties(logits, history, slots.to(device), penalties.to(device))


def raw_logprobs(logits: torch.Tensor, rows: Sequence[SamplingRow], tokens: torch.Tensor) -> dict[int, TokenLogprobs]:
    """By row, for the rows that ask: raw log-softmax in fp32, before bias, penalties and temperature.

    Raises ValueError when one is no number: none can be sent, and a message that says so would spoil the frame of the whole batch.
    """
    pending = _PendingLogprobs(logits, rows, tokens)
    Marker(logits.device).wait()
    found: dict[int, TokenLogprobs] = {}
    for index, logprobs in pending.result().items():
        if isinstance(logprobs, ValueError):
            raise logprobs
        found[index] = logprobs
    return found


class _PendingLogprobs:
    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow], tokens: torch.Tensor) -> None:
        self._asked = {index: row.params.num_logprobs for index, row in enumerate(rows) if row.params.num_logprobs is not None}
        self._results: list[torch.Tensor] = []
        if self._asked:
            row_ids = _tensor(list(self._asked), torch.int64, logits.device)
            num_top = min(max(self._asked.values()), logits.shape[1])
            self._results = [to_host(result) for result in sampling.token_logprobs(logits, row_ids, tokens[row_ids], num_top)]

    def result(self) -> dict[int, TokenLogprobs | ValueError]:
        """When the device is done."""
        found: dict[int, TokenLogprobs | ValueError] = {}
        parts = (result.tolist() for result in self._results)
        for (index, num), logprob, rank, top_ids, top_logprobs in zip(self._asked.items(), *parts, strict=True) if self._asked else ():
            if all(map(math.isfinite, (logprob, *top_logprobs[:num]))):
                found[index] = TokenLogprobs(
                    logprob=logprob, rank=rank, top_token_ids=tuple(top_ids[:num]), top_logprobs=tuple(top_logprobs[:num])
                )
            else:
                found[index] = ValueError(_NOT_FINITE)
        return found


def _tensor(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=dtype), device)
