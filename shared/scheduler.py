"""Which requests run in the next step and how many tokens of each: one token budget, no separate prefill and decode phases.

The budget of a step is the least of `max_num_batched_tokens` and what the machine does in `max_step_ms` at its measured speed,
so waiting is bounded in milliseconds on any machine. Rows that generate come first, one token each. The rest is shared by the
prompts: the oldest is guaranteed an eighth (so every request becomes the oldest and ends), and the others go shortest first
(so a short prompt passes beside a long one instead of behind it). Pure decisions: no clock, no I/O; blocks come from the manager.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.batch import ScheduledRequest, SchedulerOutput
from shared.cache.kv_cache_manager import KVCacheManager
from shared.request import Request, RequestStatus
from shared.step_time import StepTimeModel

OLDEST_SHARE = 8
"""The oldest unfinished prompt gets at least 1/8 of every step's budget."""
MAX_BYPASSES = 64
"""After this many later admissions, a request that waits for blocks closes the door to all behind it."""


MIN_TIMED_BLOCKS = 8
"""The time bound never cuts a step below this many blocks: below them the matrix products lose more speed than the step gets
shorter (bench/chunk_size.py), and a machine that is busy with something else would crawl."""


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_token_threshold: int
    max_step_s: float
    block_size: int


class Scheduler:
    """Owns the requests of a worker from `add` to `remove`. Called from the engine thread only."""

    def __init__(self, manager: KVCacheManager, limits: SchedulerLimits) -> None:
        self.manager = manager
        self.limits = limits
        self.step_time = StepTimeModel()
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    # ---- membership -------------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """A request that holds no blocks and waits for admission."""
        assert not self.manager.holds(request.request_id)
        request.status = RequestStatus.WAITING
        self.waiting[request.request_id] = request

    def add_running(self, request: Request) -> None:
        """A request that holds its blocks: their KV came with a transfer, or is to be computed here."""
        assert self.manager.holds(request.request_id)
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request

    def remove(self, request_id: str, free_blocks: bool = True) -> Request | None:
        """Forget a request wherever it is; its blocks go back unless another part of the worker still needs them."""
        request = self.waiting.pop(request_id, None) or self.running.pop(request_id, None)
        if request is not None and free_blocks:
            request.status = RequestStatus.FINISHED
            self.manager.free(request_id)
        return request

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def has_waiting_for_blocks(self) -> bool:
        """Someone was refused blocks or a place; newcomers must not take them first."""
        # A copy: the control thread asks while the engine thread changes the dict.
        return any(request.status is RequestStatus.PREEMPTED or request.num_bypasses for request in list(self.waiting.values()))

    @property
    def has_place(self) -> bool:
        """A newcomer may start at once if there are blocks for it."""
        return len(self.running) < self.limits.max_num_seqs and not self.has_waiting_for_blocks

    @property
    def num_uncomputed_tokens(self) -> int:
        return sum(r.num_uncomputed_tokens for r in self.waiting.values()) + sum(r.num_uncomputed_tokens for r in self.running.values())

    # ---- one step ---------------------------------------------------------------------------------------------------
    def token_budget(self) -> int:
        limit = self.limits.max_num_batched_tokens
        timed = self.step_time.tokens_within(self.limits.max_step_s)
        if timed is None:
            return limit
        # Whole blocks: a chunk then ends where a block ends, and the block can leave for decode at once.
        timed = timed // self.limits.block_size * self.limits.block_size
        return min(limit, max(timed, MIN_TIMED_BLOCKS * self.limits.block_size))

    def schedule(self) -> SchedulerOutput | None:
        """None when nothing can run."""
        preempted = [request for request in self.running.values() if self.manager.has_failed(request.request_id)]
        for request in preempted:
            request.num_cached_tokens = None  # it has less than it was promised
            self._preempt(request)
        rows = self._schedule_generating(preempted)
        budget = max(0, self.token_budget() - len(rows))
        rows += self._schedule_prompts(budget, may_admit=not preempted, num_rows=len(rows))
        if not rows and not preempted:
            return None
        rows.sort(key=lambda row: row.num_new_tokens != 1)
        return SchedulerOutput(rows, preempted)

    def update(self, output: SchedulerOutput, step_s: float) -> None:
        """Book what a step computed: positions, published blocks, measured speed."""
        num_prompt_rows = output.num_tokens - output.num_decode_rows
        if num_prompt_rows > output.num_decode_rows:
            self.step_time.record(output.num_tokens, step_s)
        for row in output.scheduled:
            row.request.num_scored_tokens = max(row.request.num_scored_tokens, row.scored_positions.stop)
            row.request.num_computed_tokens = row.end
            self.manager.publish_full_blocks(row.request)

    def _schedule_generating(self, preempted: list[Request]) -> list[ScheduledRequest]:
        """One token for every running request whose only uncomputed token is the last; preempts the latest when blocks run out."""
        rows: dict[str, ScheduledRequest] = {}
        for request in sorted(self.running.values(), key=lambda r: r.order):
            if request.request_id not in self.running or request.num_uncomputed_tokens != 1 or request.num_output_tokens == 0:
                continue
            if not self.manager.is_ready(request.request_id):
                continue
            while not self.manager.grow(request):
                victim = max(self.running.values(), key=lambda r: r.order)
                self._preempt(victim)
                preempted.append(victim)
                rows.pop(victim.request_id, None)
                if victim is request:
                    break
            else:
                rows[request.request_id] = ScheduledRequest(request, request.num_computed_tokens, 1)
        return list(rows.values())

    def _preempt(self, request: Request) -> None:
        del self.running[request.request_id]
        self.manager.free(request.request_id)
        self.num_preemptions += 1
        self.num_recomputed_tokens += request.num_computed_tokens
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self.waiting[request.request_id] = request

    def _schedule_prompts(self, budget: int, may_admit: bool, num_rows: int) -> list[ScheduledRequest]:
        partial = [
            request
            for request in self.running.values()
            if (request.num_uncomputed_tokens > 1 or (request.num_uncomputed_tokens and not request.num_output_tokens))
            and self.manager.is_ready(request.request_id)
        ]
        candidates = sorted(partial + (list(self.waiting.values()) if may_admit else []), key=lambda r: r.order)
        if not candidates or budget <= 0:
            return []
        oldest = candidates[0]
        if oldest.request_id in self.waiting:
            self._admit(oldest, candidates)
        can_oldest_run = self._can_run(oldest)
        others = sorted(candidates[1:], key=lambda r: r.num_uncomputed_tokens)
        threshold = self.limits.long_prefill_token_threshold
        cap = min(budget, threshold) if others and threshold else budget
        share = 0
        if others and can_oldest_run:
            share = min(oldest.num_uncomputed_tokens, cap, max(self.limits.block_size, budget // OLDEST_SHARE))
        rows: list[ScheduledRequest] = []
        left = budget
        for request in [*others, oldest]:
            is_oldest = request is oldest
            available = left if is_oldest else left - share
            # A row is kept for the oldest, unless it cannot run: then nobody would.
            max_rows = self.limits.max_num_seqs - num_rows - (1 if can_oldest_run and not is_oldest else 0)
            if available <= 0 or len(rows) >= max_rows:
                continue
            if request.request_id in self.waiting and (is_oldest or not self._admit(request, candidates)):
                continue
            if not self._can_run(request):
                continue
            num_new_tokens = self._chunk(request, min(available, cap))
            rows.append(ScheduledRequest(request, request.num_computed_tokens, num_new_tokens))
            left -= num_new_tokens
        return rows

    def _can_run(self, request: Request) -> bool:
        """It has its blocks, and nothing is still being copied into them."""
        return request.request_id in self.running and self.manager.is_ready(request.request_id)

    def _chunk(self, request: Request, limit: int) -> int:
        """At most `limit` tokens; a chunk that does not end the prompt stops at a block boundary where it can."""
        if request.num_uncomputed_tokens <= limit:
            return request.num_uncomputed_tokens
        end = (request.num_computed_tokens + limit) // self.limits.block_size * self.limits.block_size
        return end - request.num_computed_tokens if end > request.num_computed_tokens else limit

    def _admit(self, request: Request, queue: Iterable[Request]) -> bool:
        """Give a waiting request its blocks. One that waits for blocks may be passed MAX_BYPASSES times, then nobody passes."""
        if len(self.running) >= self.limits.max_num_seqs:
            request.num_bypasses = max(1, request.num_bypasses)
            return False
        ahead = [r for r in queue if r.request_id in self.waiting and r.order < request.order and r.num_bypasses]
        if any(r.num_bypasses >= MAX_BYPASSES for r in ahead):
            return False
        # A running row may need a block at its next token; without this headroom a resumed request is preempted again at once.
        num_generating = sum(r.sampling is not None for r in self.running.values())
        if self.manager.reserve(request, num_headroom_blocks=num_generating) is None:
            request.num_bypasses = max(1, request.num_bypasses)
            return False
        for passed in ahead:
            passed.num_bypasses += 1
        request.num_bypasses = 0
        del self.waiting[request.request_id]
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request
        return True
