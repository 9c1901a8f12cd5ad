"""Requests that compute, generate, fork, wait and are preempted while blocks come back from host memory, or fail to: what a step reads."""

from __future__ import annotations

import random

import pytest
import torch
from host_tier_cache import BLOCK_SIZE, ROOT, HostTierCache, StepByStepExecutor, content

from shared.batch import SchedulerOutput
from shared.request import Request
from shared.sampling_params import SamplingParams
from shared.scheduler import Scheduler, SchedulerLimits

LIMITS = SchedulerLimits(max_num_batched_tokens=24, max_num_seqs=6, long_prefill_token_threshold=0, max_step_s=1.0, block_size=BLOCK_SIZE)


class Load:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.cache = HostTierCache(24, 30, max_blocks_per_step=8)
        self.scheduler = Scheduler(self.cache.manager, LIMITS)
        self._beginnings = [self._tokens(4, 30) for _ in range(5)]
        self._lengths: dict[str, int] = {}
        """Of each request at its end."""
        self._num_requests = 0
        self.num_done = 0

    def _tokens(self, least: int, most: int) -> list[int]:
        return [self._draw.randrange(50) for _ in range(self._draw.randint(least, most))]

    def step(self) -> None:
        while len(self._lengths) < 9:
            self._num_requests += 1
            request = self.cache.request(f"r{self._num_requests}", [*self._draw.choice(self._beginnings), *self._tokens(0, 12)])
            request.sampling = SamplingParams()
            self._lengths[request.request_id] = request.num_tokens + self._draw.randint(1, 20)
            self.scheduler.add(request)
        if self._draw.random() < 0.05:
            self._end(self._draw.choice(list(self._lengths)))
        executor = self.cache.executor
        assert isinstance(executor, StepByStepExecutor)
        if executor.jobs and self._draw.random() < 0.4:
            self.cache.store.is_failing = self._draw.random() < 0.15
            executor.run_next()
        self.cache.manager.begin_step()
        output = self.scheduler.schedule()
        if output is not None and output.scheduled:
            self._compute(output)
        self.cache.check()

    def _compute(self, output: SchedulerOutput) -> None:
        for row in output.scheduled:
            block_ids = self.cache.manager.block_ids(row.request.request_id)
            row.request.update_block_hashes(ROOT, BLOCK_SIZE)
            for index, (block_id, block_hash) in enumerate(zip(block_ids, row.request.block_hashes, strict=False)):
                if index < row.start // BLOCK_SIZE:
                    read = self.cache.memory[block_id]
                    assert torch.equal(read, content(block_hash)), f"{row.request.request_id} reads foreign bytes in block {index}"
                elif index < row.end // BLOCK_SIZE:
                    self.cache.memory[block_id] = content(block_hash)
            if row.end % BLOCK_SIZE:
                self.cache.scribble(block_ids[row.end // BLOCK_SIZE])
        self.scheduler.update(output, 0.01)
        for row in output.scheduled:
            if row.end == row.request.num_tokens:
                self._go_on(row.request)

    def _go_on(self, request: Request) -> None:
        if request.num_tokens >= self._lengths[request.request_id]:
            self._end(request.request_id)
            self.num_done += 1
            return
        if self._draw.random() < 0.1 and self.scheduler.has_place:
            self._num_requests += 1
            child = request.fork(f"r{self._num_requests}", 1)
            self.cache.manager.fork(request.request_id, child.request_id)
            child.num_computed_tokens = request.num_computed_tokens
            child.token_ids.append(self._draw.randrange(50))
            self._lengths[child.request_id] = child.num_tokens + self._draw.randint(1, 15)
            self.scheduler.add_running(child)
        request.token_ids.append(self._draw.randrange(50))

    def _end(self, request_id: str) -> None:
        self.scheduler.remove(request_id)
        del self._lengths[request_id]

    def close(self) -> None:
        for request_id in list(self._lengths):
            self._end(request_id)
        self.cache.store.is_failing = False
        self.cache.manager.close()
        self.cache.check()


@pytest.mark.parametrize("seed", range(6))
def test_no_step_reads_a_block_whose_bytes_are_not_there(seed: int) -> None:
    load = Load(seed)
    for _ in range(1500):
        load.step()
    load.close()
    assert load.cache.manager.num_used() == 0
    assert load.num_done > 100 and load.scheduler.num_preemptions > 10
    assert load.cache.tier.counters["kv_host_loaded_blocks"] > 100 and load.cache.tier.counters["kv_host_load_failures"] > 3
