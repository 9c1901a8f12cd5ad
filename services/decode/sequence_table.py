"""The sequences of a decode worker and where each of them stands: with the scheduler (running or waiting), or set aside.

Sequences of one request fork from each other by reference; where there is no room for a fork it waits for admission like any other
request, and comes back by prefix hit and recomputation.
"""

from __future__ import annotations

from services.decode.job import DecodeJob, DecodeSequence
from shared.cache.kv_cache_manager import KVCacheManager
from shared.engine.structured_output import SequenceGuide
from shared.request import RequestStatus
from shared.scheduler import Scheduler


class SequenceTable:
    """Engine thread; but `add` and `num_placed` from any, under the worker's lock."""

    def __init__(self, manager: KVCacheManager, scheduler: Scheduler, max_num_seqs: int) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._max_num_seqs = max_num_seqs
        self._sequences: dict[str, DecodeSequence] = {}  # by the scheduler's request id
        self._set_aside: set[str] = set()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __getitem__(self, request_id: str) -> DecodeSequence:
        return self._sequences[request_id]

    @property
    def num_placed(self) -> int:
        """Sequences that neither wait for admission nor are set aside."""
        return len(self._sequences) - len(self._scheduler.waiting) - len(self._set_aside)

    @property
    def num_uncomputed_tokens(self) -> int:
        return sum(sequence.request.num_uncomputed_tokens for sequence in list(self._sequences.values()))

    def add(self, job: DecodeJob, guide: SequenceGuide | None = None) -> None:
        """The first sequence of a request."""
        self._enter(DecodeSequence(job, job.request, guide))

    def fork(self, parent: DecodeSequence, index: int) -> DecodeSequence:
        """Another sequence with the tokens that `parent` has now. It runs on the parent's blocks if there is room for one more row."""
        request = parent.request.fork(f"{parent.job.request.request_id}/{index}", index)
        if parent.request.request_id in self._scheduler.running and self._has_room(parent.job):
            self._manager.fork(parent.request.request_id, request.request_id)
            request.num_computed_tokens = parent.request.num_computed_tokens
            self._scheduler.add_running(request)
        else:
            self._scheduler.add(request)
        return self._enter(DecodeSequence(parent.job, request, parent.guide.fork() if parent.guide is not None else None))

    def end(self, sequence: DecodeSequence) -> None:
        """Forget it and give back the blocks that it alone holds. Safe to call again."""
        request = sequence.request
        if self._sequences.pop(request.request_id, None) is None:
            return
        del sequence.job.sequences[sequence.index]
        sequence.job.num_preemptions += request.num_preemptions
        self._take_out(sequence)
        self._set_aside.discard(request.request_id)
        if sequence.guide is not None:
            sequence.guide.close()
        request.status = RequestStatus.FINISHED

    def set_aside(self, sequence: DecodeSequence) -> None:
        """Take it from the scheduler; others may have its blocks until `resume`."""
        if sequence.request.request_id not in self._set_aside:
            self._take_out(sequence)
            sequence.request.num_computed_tokens = 0
            self._set_aside.add(sequence.request.request_id)

    def resume(self, sequence: DecodeSequence) -> None:
        """Back to the scheduler, if it was set aside."""
        if sequence.request.request_id in self._set_aside:
            self._set_aside.remove(sequence.request.request_id)
            self._scheduler.add(sequence.request)

    def is_waiting(self, sequence: DecodeSequence) -> bool:
        return sequence.request.request_id in self._scheduler.waiting

    def _enter(self, sequence: DecodeSequence) -> DecodeSequence:
        self._sequences[sequence.request.request_id] = sequence
        sequence.job.sequences[sequence.index] = sequence
        return sequence

    def _take_out(self, sequence: DecodeSequence) -> None:
        self._scheduler.remove(sequence.request.request_id)
        self._manager.free(sequence.request.request_id)

    def _has_room(self, job: DecodeJob) -> bool:
        # Beams take the places of those just dropped. Other forks are newcomers and go behind whoever waits for blocks.
        if job.beam_search is None and self._scheduler.has_waiting_for_blocks:
            return False
        return self.num_placed < self._max_num_seqs and self._manager.pool.num_free > len(self._scheduler.running)
