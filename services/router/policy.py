"""Which prefill and which decode worker should take a request: a pure decision from overlap and load, in predicted milliseconds.

Every candidate is priced on its own: what waits there before this request, plus what this request itself would cost there. A
cached prefix makes a worker cheaper by the tokens it saves, a queue makes it dearer by the time it takes, so a popular prefix
spreads as soon as waiting for its holder costs more than computing it elsewhere, and one busy worker changes nothing for the rest.
What a worker lacks of a prefix it may fetch from another that has it, where that costs less than computing it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared.cache.prefix_index import Holder
from shared.transport.protocol.kv_format import KVFormat

DEFAULT_TOKENS_PER_S = 2000.0
"""Assumed prefill speed of a worker that has not measured its own and has no peers that did."""
REQUEST_OVERHEAD_MS = 20.0
"""What one request ahead in a prefill queue costs besides its uncached tokens: a step has a floor."""
SEQUENCE_MS = 4.0
"""What one more sequence in a decode batch costs each step of the others."""
NO_BLOCKS_MS = 1000.0
"""Waiting for another request to finish, when a decode pool has no room for this one."""
TRANSFER_MS_PER_BLOCK = 0.05
LOAD_MS_PER_BLOCK = 0.25
"""Copying a block from a worker's host memory into its KV cache (bench/host_tier.py)."""
PULL_OVERHEAD_MS = 20.0
"""What it costs to have a prefix from another worker, whatever its length: two messages more, and the step it comes too late for."""
PULL_MS_PER_BLOCK = 0.5
"""Reading, checking and publishing a block, on a wire of one host (bench/prefix_pull.py)."""
MAX_PULL_MS = 1000.0
"""A prefix that is expected to take longer is computed: waiting for it would have to be allowed to take too long."""
PULL_GRACE_MS = 500.0
"""A pull may be late by this and by the time it was to save; then the prompt is computed as if there had been no pull."""

_COMMON_FORMAT = KVFormat("float32", 16)


@dataclass(frozen=True)
class Candidate:
    """One worker as the policy sees it. Loads count what the worker reported and what the router sent since, whichever is more."""

    worker_id: str
    incarnation: int
    overlap_blocks: int = 0
    num_host_blocks: int = 0
    """Of the overlap, in its host memory alone."""
    num_requests: int = 0
    num_waiting_tokens: int = 0
    tokens_per_s: float = 0.0
    num_blocks_total: int = 0
    num_blocks_used: int = 0
    num_assigned: int = 0
    """Requests the router ever sent there: breaks ties, so that equal workers take turns."""
    kv_format: KVFormat = _COMMON_FORMAT
    can_pull: bool = True
    """It has said where it takes KV blocks."""

    @property
    def identity(self) -> Holder:
        return Holder(self.worker_id, self.incarnation)


@dataclass(frozen=True)
class RequestFacts:
    num_prompt_tokens: int
    local_prefill_max_tokens: int
    is_aggregated: bool = False
    """Decode workers compute every prompt themselves."""
    is_scored: bool = False
    """The log-probabilities of the prompt are asked for: whoever computes it computes all of it."""

    def num_blocks(self, worker: Candidate) -> int:
        return -(-self.num_prompt_tokens // worker.kv_format.block_size)

    def num_uncached_tokens(self, worker: Candidate, num_blocks: int) -> int:
        """Without the leading `num_blocks` of its size."""
        return self.num_prompt_tokens - num_blocks * worker.kv_format.block_size

    def usable_blocks(self, worker: Candidate) -> int:
        """Of those it has. The KV of the last prompt token has always to be computed, so a block that holds it is of no use."""
        return min(worker.overlap_blocks, (self.num_prompt_tokens - 1) // worker.kv_format.block_size)

    def saved_blocks(self, worker: Candidate) -> int:
        """Of those it has: what it need not compute."""
        return 0 if self.is_scored else self.usable_blocks(worker)

    def load_ms(self, worker: Candidate, num_blocks: int) -> float:
        """Until the first `num_blocks` of those it has are in its KV cache: the ones in host memory are behind the others."""
        num_device_blocks = worker.overlap_blocks - worker.num_host_blocks
        return max(0, num_blocks - num_device_blocks) * LOAD_MS_PER_BLOCK


@dataclass(frozen=True)
class Pull:
    """Whoever computes the prompt first fetches its leading `num_blocks` from `holder`."""

    holder: Candidate
    num_blocks: int
    timeout_s: float
    """After which it goes on without them."""


@dataclass(frozen=True)
class Route:
    """`prefill` None: the decode worker computes the prompt, or the short uncached tail of it, itself (`is_local`)."""

    prefill: Candidate | None
    decode: Candidate
    prefill_overlap_blocks: int
    decode_overlap_blocks: int
    predicted_ms: float
    pull: Pull | None = None

    @property
    def is_local(self) -> bool:
        return self.prefill is None

    @property
    def num_saved_tokens(self) -> int:
        """Of the prompt, that whoever computes it will not compute."""
        own = self.decode_overlap_blocks if self.is_local else self.prefill_overlap_blocks
        return (own if self.pull is None else self.pull.num_blocks) * (self.prefill or self.decode).kv_format.block_size


@dataclass(frozen=True)
class _Prefix:
    """What one worker need not compute of a prompt, and what fetching parts of it costs."""

    num_blocks: int
    fetch_ms: float = 0.0
    """From another worker, or from its own host memory."""
    pull: Pull | None = None


def select(
    facts: RequestFacts, prefill: Sequence[Candidate], decode: Sequence[Candidate], avoided: Collection[tuple[Holder, Holder]] = ()
) -> Route | None:
    """The cheapest pair, or None when no pair exists. A local route needs no prefill worker. `avoided`: (sender, receiver) between which
    KV is to go only where there is nothing else."""
    workers = [*prefill, *decode]
    tokens_per_s = _typical_speed(workers)
    prefixes = {candidate.worker_id: _prefix(facts, candidate, workers, tokens_per_s, avoided) for candidate in workers}

    def computing_ms(candidate: Candidate) -> float:
        return prefill_cost_ms(facts, candidate, prefixes[candidate.worker_id], tokens_per_s)

    by_cost = sorted(prefill, key=lambda candidate: _rank(candidate, computing_ms(candidate)))
    best: tuple[tuple[float, int, int, str], Route] | None = None
    for candidate in decode:
        routes = []
        wait_ms = decode_wait_ms(facts, candidate)
        usable, saved = facts.usable_blocks(candidate), facts.saved_blocks(candidate)
        partners = (other for other in by_cost if other.kv_format.can_send_to(candidate.kv_format))
        best_prefill = next((other for other in partners if (other.identity, candidate.identity) not in avoided), None)
        prefix = prefixes[candidate.worker_id]
        is_near_complete = saved >= 1 and facts.num_uncached_tokens(candidate, saved) <= facts.local_prefill_max_tokens
        if facts.is_aggregated or (
            prefix.num_blocks >= 1 and facts.num_uncached_tokens(candidate, prefix.num_blocks) <= facts.local_prefill_max_tokens
        ):
            num_tokens = candidate.num_waiting_tokens + facts.num_uncached_tokens(candidate, prefix.num_blocks)
            cost_ms = wait_ms + prefix.fetch_ms + _compute_ms(candidate, num_tokens, tokens_per_s)
            routes.append(Route(None, candidate, 0, saved, cost_ms, prefix.pull))
        if best_prefill is not None and not facts.is_aggregated and not is_near_complete:
            missing = facts.num_blocks(candidate) - usable
            cost_ms = wait_ms + computing_ms(best_prefill) + missing * TRANSFER_MS_PER_BLOCK + facts.load_ms(candidate, usable)
            routes.append(
                Route(best_prefill, candidate, facts.saved_blocks(best_prefill), usable, cost_ms, prefixes[best_prefill.worker_id].pull)
            )
        for route in routes:
            rank = _rank(candidate, route.predicted_ms)
            if best is None or rank < best[0]:
                best = (rank, route)
    if best is not None:
        return best[1]
    between = {(sender.identity, receiver.identity) for sender in prefill for receiver in decode}
    return select(facts, prefill, decode, frozenset(avoided) - between) if between & set(avoided) else None


def prefill_cost_ms(
    facts: RequestFacts, candidate: Candidate, prefix: _Prefix | None = None, default_tokens_per_s: float = DEFAULT_TOKENS_PER_S
) -> float:
    """Time until `candidate` would have computed this prompt; without a `prefix`, with the blocks that it has."""
    own = facts.saved_blocks(candidate)
    prefix = prefix or _Prefix(own, facts.load_ms(candidate, own))
    num_tokens = candidate.num_waiting_tokens + facts.num_uncached_tokens(candidate, prefix.num_blocks)
    return candidate.num_requests * REQUEST_OVERHEAD_MS + prefix.fetch_ms + _compute_ms(candidate, num_tokens, default_tokens_per_s)


def _prefix(
    facts: RequestFacts,
    candidate: Candidate,
    holders: Sequence[Candidate],
    default_tokens_per_s: float,
    avoided: Collection[tuple[Holder, Holder]],
) -> _Prefix:
    """With what the best of `holders` other than itself has besides, if fetching that costs less than computing it."""
    own = facts.saved_blocks(candidate)
    without_pull = _Prefix(own, facts.load_ms(candidate, own))
    # Where the formats differ, so do the hashes: such a worker could not be told what is wanted.
    others = [
        holder
        for holder in holders
        if holder.worker_id != candidate.worker_id
        and holder.kv_format == candidate.kv_format
        and (holder.identity, candidate.identity) not in avoided
    ]
    holder = max(
        others, key=lambda other: (other.overlap_blocks, -other.num_host_blocks, -other.num_requests, other.worker_id), default=None
    )
    if holder is None or not candidate.can_pull:
        return without_pull
    num_blocks = facts.saved_blocks(holder)
    pull_ms = PULL_OVERHEAD_MS + (num_blocks - own) * PULL_MS_PER_BLOCK + facts.load_ms(holder, num_blocks)
    compute_ms = _compute_ms(candidate, (num_blocks - own) * candidate.kv_format.block_size, default_tokens_per_s)
    if pull_ms >= min(compute_ms, MAX_PULL_MS):
        return without_pull
    timeout_s = (PULL_GRACE_MS + min(compute_ms, MAX_PULL_MS)) / 1000
    return _Prefix(num_blocks, without_pull.fetch_ms + pull_ms, Pull(holder, num_blocks, timeout_s))


def decode_wait_ms(facts: RequestFacts, candidate: Candidate) -> float:
    """How much later the first token comes for what already runs on `candidate`."""
    cost_ms = candidate.num_requests * SEQUENCE_MS
    needed = facts.num_blocks(candidate) + 1
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
