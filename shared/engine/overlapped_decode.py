"""Decode steps that are prepared and queued while the one before runs.

The tokens of a step stay on the device, where the next one takes them from; the host reads them one step late. So a request may be in a
step that turns out to come after its last token: what that step computes for it is dropped, and its blocks are free when the step has ended
(see BlockPool.free). Only steps that follow another with the same requests, less those that end, are queued ahead: whatever else is to be
scheduled waits until nothing runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shared.batch import ScheduledRequest, SchedulerOutput
from shared.cache.kv_cache_manager import KVCacheManager
from shared.engine.decode_batch import UNKNOWN, BlockTableRows, DecodeBatch
from shared.engine.model_runner import ModelRunner
from shared.engine.sampler import PendingTokens, SampledToken, SamplingRow
from shared.request import Request
from shared.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchedStep:
    output: SchedulerOutput
    rows: list[SamplingRow]  # one for each scheduled request
    drawn: PendingTokens
    start_ns: int
    start_s: float


@dataclass(frozen=True)
class DecodedStep:
    tokens: list[tuple[Request, SampledToken | ValueError]]
    """Of the requests that had not ended before; the token is not in token_ids yet."""
    start_ns: int
    end_ns: int


def is_decode(output: SchedulerOutput) -> bool:
    """All its requests generate: one token each, and nothing else is to be computed."""
    return all(row.num_new_tokens == 1 and row.completes and row.request.num_output_tokens > 0 for row in output.scheduled)


class OverlappedDecode:
    """Engine thread."""

    def __init__(
        self, manager: KVCacheManager, scheduler: Scheduler, runner: ModelRunner, tables: BlockTableRows, max_model_len: int
    ) -> None:
        self._manager, self._scheduler, self._runner, self._tables = manager, scheduler, runner, tables
        self._max_model_len = max_model_len
        self._num_running = 0

    def launch(self, output: SchedulerOutput, rows: list[SamplingRow]) -> LaunchedStep:
        """Queue a step for which `is_decode` holds, and the draw of its tokens; `rows` can run ahead."""
        token_ids = np.fromiter((row.request.token_ids[row.start] for row in output.scheduled), np.int64, len(output.scheduled))
        return self._launch(output, rows, token_ids, np.full(len(rows), UNKNOWN, np.int64), None)

    def launch_next(self, step: LaunchedStep) -> LaunchedStep | None:
        """Queue the step that follows `step`, which may still run. None: something else is to be scheduled first, or nothing is left."""
        scheduler = self._scheduler
        scheduled: list[ScheduledRequest] = []
        rows: list[SamplingRow] = []
        sources: list[int] = []
        num_alive = 0
        for source, (before, row) in enumerate(zip(step.output.scheduled, step.rows, strict=True)):
            request = before.request
            if not self._is_alive(request):
                continue
            num_alive += 1
            num_tokens = before.end + 1  # with the one that is being drawn
            if num_tokens - row.num_prompt_tokens < row.params.max_tokens and num_tokens < self._max_model_len:
                scheduled.append(ScheduledRequest(request, before.end, 1))
                rows.append(row)
                sources.append(source)
        if not scheduled or scheduler.waiting or len(scheduler.running) != num_alive:
            return None
        self._manager.begin_step()
        for after in scheduled:
            if after.start % self._manager.block_size == 0 and not self._manager.grow(after.request, num_ahead=1):
                return None
        rows = [row if row.num_ahead else replace(row, num_ahead=1) for row in rows]
        unknown = np.zeros(len(rows), np.int64)
        return self._launch(SchedulerOutput(scheduled), rows, unknown, np.array(sources, np.int64), step.drawn)

    def collect(self, step: LaunchedStep) -> DecodedStep:
        """Wait for the oldest step that was launched and book it."""
        drawn = step.drawn.result()
        self._end_one()
        self._scheduler.update(self.alive(step), time.monotonic() - step.start_s)
        tokens = [(row.request, token) for row, token in zip(step.output.scheduled, drawn, strict=True) if self._is_alive(row.request)]
        return DecodedStep(tokens, step.start_ns, time.time_ns())

    def alive(self, step: LaunchedStep) -> SchedulerOutput:
        """What of a step is still of use: it may have been queued before a token came to light that was some request's last."""
        return SchedulerOutput([row for row in step.output.scheduled if self._is_alive(row.request)])

    def abandon(self) -> bool:
        """Wait until nothing runs any more, whatever became of it. False: the device has failed; it computes nothing any more either."""
        is_whole = True
        try:
            self._runner.wait()
        except Exception:
            logger.exception("the device has failed")
            is_whole = False
        while self._num_running:
            self._end_one()
        return is_whole

    def _is_alive(self, request: Request) -> bool:
        return self._scheduler.running.get(request.request_id) is request

    def _launch(
        self,
        output: SchedulerOutput,
        rows: list[SamplingRow],
        token_ids: np.ndarray[tuple[int], np.dtype[np.int64]],
        sources: np.ndarray[tuple[int], np.dtype[np.int64]],
        previous: PendingTokens | None,
    ) -> LaunchedStep:
        start_ns, start_s = time.time_ns(), time.monotonic()
        batch = decode_batch(self._tables, output.scheduled, token_ids, sources, self._manager.block_size)
        self._manager.step_launched()
        self._num_running += 1
        hidden = self._runner.decode(batch, previous.tokens if previous is not None else None)
        drawn = PendingTokens(self._runner.compute_raw_logits(hidden), rows, is_plain=True)
        return LaunchedStep(output, rows, drawn, start_ns, start_s)

    def _end_one(self) -> None:
        self._num_running -= 1
        self._manager.step_completed()


def decode_batch(
    tables: BlockTableRows,
    scheduled: Sequence[ScheduledRequest],
    token_ids: np.ndarray[tuple[int], np.dtype[np.int64]],
    sources: np.ndarray[tuple[int], np.dtype[np.int64]],
    block_size: int,
) -> DecodeBatch:
    rows = tables.rows_of([row.request.request_id for row in scheduled])
    seq_lens = np.fromiter((row.end for row in scheduled), np.int32, len(scheduled))
    return DecodeBatch(token_ids, sources, seq_lens, rows, tables.matrix, block_size)
