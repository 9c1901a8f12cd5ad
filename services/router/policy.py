"""Which prefill and which decode worker should take a request: a pure decision from overlap and load, in predicted milliseconds.

Every candidate is priced on its own: what waits there before this request, plus what this request itself would cost there. A
cached prefix makes a worker cheaper by the tokens it saves, a queue makes it dearer by the time it takes, so a popular prefix
spreads as soon as waiting for its holder costs more than computing it elsewhere, and one busy worker changes nothing for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_TOKENS_PER_S = 2000.0
"""Assumed prefill speed of a worker that has not measured its own and has no peers that did."""
REQUEST_OVERHEAD_MS = 20.0
"""What one request ahead in a prefill queue costs besides its uncached tokens: a step has a floor."""
SEQUENCE_MS = 4.0
"""What one more sequence in a decode batch costs each step of the others."""
NO_BLOCKS_MS = 1000.0
"""Waiting for another request to finish, when a decode pool has no room for this one."""
TRANSFER_MS_PER_BLOCK = 0.05


@dataclass(frozen=True)
class Candidate:
    """One worker as the policy sees it. Loads count what the worker reported and what the router sent since, whichever is more."""

    worker_id: str
    incarnation: int
    overlap_blocks: int = 0
    num_requests: int = 0
    num_waiting_tokens: int = 0
    tokens_per_s: float = 0.0
    num_blocks_total: int = 0
    num_blocks_used: int = 0
    num_assigned: int = 0
    """Requests the router ever sent there: breaks ties, so that equal workers take turns."""


@dataclass(frozen=True)
class RequestFacts:
    num_prompt_tokens: int
    block_size: int
    local_prefill_max_tokens: int
    is_aggregated: bool = False
    """Decode workers compute every prompt themselves."""
    is_scored: bool = False
    """The log-probabilities of the prompt are asked for: whoever computes it computes all of it."""

    @property
    def max_usable_blocks(self) -> int:
        """The KV of the last prompt token has always to be computed, so a block that holds it is of no use."""
        return (self.num_prompt_tokens - 1) // self.block_size

    @property
    def max_saved_blocks(self) -> int:
        """Cached blocks that whoever computes the prompt need not compute."""
        return 0 if self.is_scored else self.max_usable_blocks


@dataclass(frozen=True)
class Route:
    """`prefill` None: the decode worker computes the prompt, or the short uncached tail of it, itself (`is_local`)."""

    prefill: Candidate | None
    decode: Candidate
    prefill_overlap_blocks: int
    decode_overlap_blocks: int
    predicted_ms: float

    @property
    def is_local(self) -> bool:
        return self.prefill is None


def select(facts: RequestFacts, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Route | None:
    """The cheapest pair, or None when no pair exists. A local route needs no prefill worker."""
    tokens_per_s = _typical_speed([*prefill, *decode])
    best_prefill = min(prefill, key=lambda candidate: _rank(candidate, prefill_cost_ms(facts, candidate, tokens_per_s)), default=None)
    remote_ms = prefill_cost_ms(facts, best_prefill, tokens_per_s) if best_prefill is not None else None
    best: tuple[tuple[float, int, int, str], Route] | None = None
    for candidate in decode:
        usable = min(candidate.overlap_blocks, facts.max_usable_blocks)
        saved = min(candidate.overlap_blocks, facts.max_saved_blocks)
        tail = facts.num_prompt_tokens - saved * facts.block_size
        wait_ms = decode_wait_ms(facts, candidate)
        if facts.is_aggregated or (saved >= 1 and tail <= facts.local_prefill_max_tokens):
            cost_ms = wait_ms + _compute_ms(candidate, candidate.num_waiting_tokens + tail, tokens_per_s)
            route = Route(None, candidate, 0, saved, cost_ms)
        elif best_prefill is not None and remote_ms is not None:
            missing = -(-facts.num_prompt_tokens // facts.block_size) - usable
            cost_ms = wait_ms + remote_ms + missing * TRANSFER_MS_PER_BLOCK
            overlap = min(best_prefill.overlap_blocks, facts.max_saved_blocks)
            route = Route(best_prefill, candidate, overlap, usable, cost_ms)
        else:
            continue
        rank = _rank(candidate, cost_ms)
        if best is None or rank < best[0]:
            best = (rank, route)
    return best[1] if best else None


def prefill_cost_ms(facts: RequestFacts, candidate: Candidate, default_tokens_per_s: float = DEFAULT_TOKENS_PER_S) -> float:
    """Time until `candidate` would have computed this prompt."""
    saved = min(candidate.overlap_blocks, facts.max_saved_blocks)
    uncached = facts.num_prompt_tokens - saved * facts.block_size
    queue_ms = candidate.num_requests * REQUEST_OVERHEAD_MS
    return queue_ms + _compute_ms(candidate, candidate.num_waiting_tokens + uncached, default_tokens_per_s)


def decode_wait_ms(facts: RequestFacts, candidate: Candidate) -> float:
    """How much later the first token comes for what already runs on `candidate`."""
    cost_ms = candidate.num_requests * SEQUENCE_MS
    needed = -(-facts.num_prompt_tokens // facts.block_size) + 1
    if candidate.num_blocks_total and candidate.num_blocks_used + needed > candidate.num_blocks_total:
        cost_ms += NO_BLOCKS_MS
    return cost_ms


def _compute_ms(candidate: Candidate, num_tokens: int, default_tokens_per_s: float) -> float:
    return 1000.0 * num_tokens / (candidate.tokens_per_s or default_tokens_per_s)


def _typical_speed(candidates: Sequence[Candidate]) -> float:
    measured = [candidate.tokens_per_s for candidate in candidates if candidate.tokens_per_s > 0]
    return sum(measured) / len(measured) if measured else DEFAULT_TOKENS_PER_S


def _rank(candidate: Candidate, cost_ms: float) -> tuple[float, int, int, str]:
    return (round(cost_ms, 3), candidate.num_requests, candidate.num_assigned, candidate.worker_id)
