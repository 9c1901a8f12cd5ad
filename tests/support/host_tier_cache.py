"""A KV cache in ordinary memory with a host tier, whose blocks hold what a function of their hash says; copies back are made when told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import torch

from shared.block_hash import BlockHash, root_hash
from shared.cache.block_pool import BlockPool
from shared.cache.host_tier import HostTier
from shared.cache.kv_cache_manager import KVCacheManager
from shared.cache.prefix_index import Tier
from shared.engine.host_block_store import new_host_block_store
from shared.request import Request

BLOCK_SIZE = 4
ROOT = root_hash("m", "float32", BLOCK_SIZE)
BLOCK_NBYTES = 64


class StepByStepExecutor(Executor):
    """Runs what was submitted when told to, in this thread."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], object]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs.append(lambda: fn(*args, **kwargs))
        return Future()

    def run_next(self) -> None:
        self.jobs.popleft()()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self.jobs:
            self.run_next()


class FailingStore:
    """Passes everything on, but a `load` that is to fail."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.is_failing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def load(self, slots: list[int], block_ids: list[int]) -> None:
        if self.is_failing:
            raise OSError("the copy failed")
        self._store.load(slots, block_ids)


class HostTierCache:
    """`index`: where each hash is, as the global index is told."""

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        executor: Executor | None = None,
        max_blocks_per_step: int = 1000,
        checks_contents: bool = True,
        **manager: Any,
    ) -> None:
        self.memory = torch.zeros((num_blocks, BLOCK_NBYTES), dtype=torch.uint8)
        self.store = FailingStore(new_host_block_store(self.memory, num_slots * BLOCK_NBYTES))
        self.executor = executor or StepByStepExecutor()
        self.tier = HostTier(self.store, self.executor, max_blocks_per_step, checks_contents)
        self.index: dict[BlockHash, Tier] = {}
        self.pool = BlockPool(num_blocks, self.index.__setitem__, lambda block_hash: self.index.pop(block_hash, None), self.tier)
        self.manager = KVCacheManager(self.pool, BLOCK_SIZE, ROOT, host_tier=self.tier, **manager)

    def request(self, name: str, tokens: list[int]) -> Request:
        request = Request(name, list(tokens), arrival_s=0.0, deadline_at_s=0.0)
        request.update_block_hashes(ROOT, BLOCK_SIZE)
        return request

    def run_loads(self) -> None:
        assert isinstance(self.executor, StepByStepExecutor)
        while self.executor.jobs:
            self.executor.run_next()

    def scribble(self, block_id: int) -> None:
        """As the owner of a fresh block does."""
        self.memory[block_id] = 0xEE

    def compute(self, request: Request) -> None:
        """What is missing of its full blocks, and publish them. What is there already must be right: a step reads it."""
        self.check_contents(request)
        block_ids = self.manager.block_ids(request.request_id)
        for block_id, block_hash in list(zip(block_ids, request.block_hashes, strict=False))[request.num_computed_tokens // BLOCK_SIZE :]:
            self.memory[block_id] = content(block_hash)
        request.num_computed_tokens = request.num_tokens
        self.manager.publish_full_blocks(request)

    def check_contents(self, request: Request) -> None:
        block_ids = self.manager.block_ids(request.request_id)
        for block_id, block_hash in zip(block_ids, request.block_hashes[: request.num_computed_tokens // BLOCK_SIZE], strict=False):
            assert torch.equal(self.memory[block_id], content(block_hash)), f"{request.request_id} would read foreign bytes"

    def serve(self, name: str, tokens: list[int]) -> Request:
        """A request from its reservation to its end."""
        request = self.request(name, tokens)
        assert self.manager.reserve(request) is not None
        self.run_loads()
        self.compute(request)
        self.manager.free(name)
        return request

    def check(self) -> None:
        """Invariants; and the index says where every hash is."""
        self.manager.check_invariants()
        for block_hash, tier in self.index.items():
            expected = Tier.DEVICE if self.pool.get_cached(block_hash) is not None else Tier.HOST
            assert tier is expected and (tier is Tier.DEVICE or block_hash in self.tier)
        cached = sum(tier is Tier.DEVICE for tier in self.index.values())
        assert cached == self.pool.num_cached
        assert self.tier.num_cached <= len(self.index)


def content(block_hash: BlockHash) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(block_hash * (BLOCK_NBYTES // len(block_hash)), np.uint8).copy())
