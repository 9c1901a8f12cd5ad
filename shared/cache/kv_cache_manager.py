"""Which blocks each request holds: prefix hits, reservation, growth, forks, publication of full blocks, and giving back.

The engine thread and the control thread (which reserves blocks for incoming transfers) both call in; one lock serves them.

Blocks that host memory has (see host_tier.py) are hits like others, but that their bytes are still to be copied: from their reservation on
they are in the prefix cache, and whoever holds one of them is not ready until the copy has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shared.block_hash import BlockHash
from shared.cache.block_pool import BlockPool, KVCacheBlock
from shared.cache.host_loads import HostLoad, HostLoads
from shared.cache.host_tier import HostTier
from shared.request import Request


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True)
class Reservation:
    """What `reserve` gave: all block ids in order; the first `num_cached_blocks` of them hold valid KV already, or will when the request is
    ready."""

    block_ids: list[int]
    num_cached_blocks: int


class KVCacheManager:
    """`copy_block(source, target)` copies the KV of one block over another's before it returns. `is_worth_loading(num_blocks)`: copying as
    many from host memory costs less than computing them. `on_loaded`, on any thread: some holder may have become ready."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        root: BlockHash,
        enable_prefix_caching: bool = True,
        copy_block: Callable[[int, int], None] = lambda _source, _target: None,
        host_tier: HostTier | None = None,
        is_worth_loading: Callable[[int], bool] = lambda _num_blocks: True,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.root = root
        self.lock = threading.RLock()
        self._enable_prefix_caching = enable_prefix_caching
        self._copy_block = copy_block
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        self._num_published: dict[str, int] = {}
        self.host_tier = host_tier
        self._is_worth_loading = is_worth_loading
        self._on_loaded = on_loaded
        self._loads = HostLoads()
        self._num_loads = 0
        self._changed_from: dict[str, int] = {}
        """By holder: the first of its blocks that is another than when `take_changes` was last called."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_host_hit_tokens = 0

    def block_ids(self, request_id: str) -> list[int]:
        with self.lock:
            return [block.block_id for block in self._blocks.get(request_id, ())]

    def holds(self, request_id: str) -> bool:
        return request_id in self._blocks

    def num_used(self) -> int:
        return self.pool.num_used

    def reserve(self, request: Request, num_headroom_blocks: int = 0) -> Reservation | None:
        """Blocks for all tokens known of `request`, which must hold none: hits first (touched before anything is evicted),
        the rest fresh. Tokens whose hidden state is needed, the last one at least, are left to compute. Sets num_computed_tokens and, the
        first time, num_cached_tokens. None, and nothing taken, if the pool would be left with fewer than `num_headroom_blocks`.
        What host memory has counts as computed, and is when the request `is_ready`.
        """
        with self.lock:
            assert request.request_id not in self._blocks, "request holds blocks already"
            request.update_block_hashes(self.root, self.block_size)
            wanted = self._cacheable(request)
            hits = self._leading_run(wanted)
            num_blocks = cdiv(request.num_tokens, self.block_size)
            num_free_hits = sum(block.ref_cnt == 0 for block in hits)
            if self.pool.num_free - num_free_hits - (num_blocks - len(hits)) < num_headroom_blocks:
                return None
            num_loaded = self._take(request.request_id, wanted, hits, num_blocks - len(hits), self._is_worth_loading)
            num_cached = len(hits) + num_loaded
            self._num_published[request.request_id] = num_cached
            request.num_computed_tokens = num_cached * self.block_size
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed_tokens
                self.num_queried_tokens += request.num_tokens
                self.num_hit_tokens += request.num_computed_tokens
                self.num_host_hit_tokens += num_loaded * self.block_size
            reservation = Reservation(self.block_ids(request.request_id), num_cached)
            self._start_load(request.request_id)
            return reservation

    def pin(self, holder_id: str, block_hashes: Sequence[BlockHash], num_headroom_blocks: int = 0) -> list[int]:
        """Blocks that are cached under the leading ones of `block_hashes`. They belong to `holder_id`, which holds nothing yet, until
        `free`, and none of them is evicted meanwhile. Their bytes are there when it `is_ready`: those that host memory has are copied, as
        far as the pool is left with `num_headroom_blocks`."""
        with self.lock:
            assert holder_id not in self._blocks, "holds blocks already"
            hits = self._leading_run(block_hashes)
            num_free = self.pool.num_free - sum(block.ref_cnt == 0 for block in hits) - num_headroom_blocks
            num_fresh = min(len(self._host_run(block_hashes[len(hits) :])), max(0, num_free))
            num_loaded = self._take(holder_id, block_hashes, hits, num_fresh)
            self.pool.free(self._blocks[holder_id][len(hits) + num_loaded :])
            del self._blocks[holder_id][len(hits) + num_loaded :]
            block_ids = self.block_ids(holder_id)
            self._start_load(holder_id)
            return block_ids

    # ---- blocks that come from host memory ----------------------------------------------------------------------------
    def is_ready(self, holder_id: str) -> bool:
        """The bytes of every cached block it holds are there."""
        return self._loads.is_ready(holder_id)

    def has_failed(self, holder_id: str) -> bool:
        """Bytes of blocks it holds will not come: it has to give all of them back."""
        return self._loads.has_failed(holder_id)

    def when_ready(self, holder_id: str, then: Callable[[], None]) -> None:
        """`then` runs, here and now or on another thread, when nothing is awaited any more for `holder_id`; not if it gives its blocks back
        before."""
        with self.lock:
            is_awaiting = self._loads.when_ready(holder_id, then)
        if not is_awaiting:
            then()

    def take_load(self, holder_id: str) -> HostLoad | None:
        """What was copied for this holder, told once."""
        return self._loads.take(holder_id)

    def begin_step(self) -> None:
        """Evicted blocks may go to host memory again, as many as a step allows."""
        if self.host_tier is not None:
            self.host_tier.begin_step()

    def close(self) -> None:
        """Copies under way are finished first; nothing is to be reserved any more."""
        if self.host_tier is not None:
            self.host_tier.close()

    def _take(
        self,
        holder_id: str,
        block_hashes: Sequence[BlockHash],
        hits: list[KVCacheBlock],
        num_fresh: int,
        is_worth_loading: Callable[[int], bool] = lambda _num_blocks: True,
    ) -> int:
        """Give `holder_id` the blocks `hits`, cached under the first of `block_hashes`, and `num_fresh` more, which there must be. As many
        of these as are returned, the first ones, are to be filled by `_start_load`."""
        self.pool.touch(hits)
        # Held before anything is evicted: what comes to host memory must not take the place of what is about to leave it.
        held: list[BlockHash] = []
        on_host = self._host_run(block_hashes[len(hits) :])[:num_fresh]
        if on_host and is_worth_loading(len(on_host)):
            assert self.host_tier is not None
            held = self.host_tier.hold(on_host)
        fresh = self.pool.allocate(num_fresh)
        assert fresh is not None
        self._blocks[holder_id] = hits + fresh
        self._changed_from[holder_id] = 0
        self._loads.wait_for(holder_id, hits)
        if held:
            self._prepare_load(holder_id, held, len(hits))
        return len(held)

    def _prepare_load(self, holder_id: str, held: list[BlockHash], first: int) -> None:
        blocks = self._blocks[holder_id][: first + len(held)]
        self._num_loads += 1
        load = HostLoad(f"load {self._num_loads}", held, blocks[first:], time.monotonic())
        self.pool.touch(blocks)
        self._blocks[load.name] = blocks
        self._loads.wait_for(load.name, blocks[:first])
        self._loads.add(load, holder_id)
        parent = blocks[first - 1].block_hash if first else self.root
        for block, block_hash in zip(load.blocks, held, strict=True):
            assert parent is not None
            entered = self.pool.cache(block, block_hash, parent)
            assert entered is block, "a block in the cache had no parent there"
            parent = block_hash

    def _start_load(self, holder_id: str) -> None:
        """Last: where the executor is this very thread, the load has ended when this returns."""
        load = self._loads.started_for(holder_id)
        if load is not None:
            assert self.host_tier is not None
            self.host_tier.load(load.block_hashes, [block.block_id for block in load.blocks], partial(self._end_load, load))

    def _end_load(self, load: HostLoad, is_there: bool) -> None:
        with self.lock:
            assert self.host_tier is not None
            load.wait_s = time.monotonic() - load.started_s
            useless, calls = self._loads.end(load, is_there)
            for other in useless:
                # Leaves first, so that no block is ever cached without its parent.
                for block in reversed(other.blocks):
                    self.pool.uncache(block)
            self.free(load.name)
            self.host_tier.end_load(load.block_hashes, load.wait_s, is_there)
        for call in calls:
            call()
        self._on_loaded()

    # ---- blocks of holders --------------------------------------------------------------------------------------------
    def keep(self, holder_id: str, request_id: str, first: int, end: int) -> list[int]:
        """The ids of blocks [first, end) of a request, which are `holder_id`'s as well from now on, until `free`: also where publishing
        exchanges the request's own for another's."""
        with self.lock:
            blocks = self._blocks[request_id][first:end]
            self.pool.touch(blocks)
            self._blocks.setdefault(holder_id, []).extend(blocks)
            return [block.block_id for block in blocks]

    def missing_hashes(self, request: Request) -> list[BlockHash]:
        """Of the blocks that `request` could take from the cache, from the first that is not there on."""
        wanted = self._cacheable(request)
        with self.lock:
            num_hits = len(self._leading_run(wanted))
            num_hits += len(self._host_run(wanted[num_hits:]))
        return wanted[num_hits:]

    def fork(self, request_id: str, child_id: str) -> None:
        """Give `child_id`, which holds nothing, every block that `request_id` holds, by reference. Costs no block: the partly filled
        tail is copied in `grow`, by whoever writes to it while another still holds it, so the last one keeps the original."""
        with self.lock:
            assert child_id not in self._blocks, "request holds blocks already"
            blocks = self._blocks[request_id]
            self.pool.touch(blocks)
            self._blocks[child_id] = list(blocks)
            self._changed_from[child_id] = 0
            self._num_published[child_id] = self._num_published[request_id]
            self._loads.fork(request_id, child_id)

    def grow(self, request: Request, num_ahead: int = 0) -> bool:
        """Make room for all tokens known of a request that holds blocks and `num_ahead` more, and make the block it will write to its own;
        False, and no change, when the pool is out of blocks."""
        with self.lock:
            blocks = self._blocks[request.request_id]
            missing = max(0, cdiv(request.num_tokens + num_ahead, self.block_size) - len(blocks))
            first_written = request.num_computed_tokens // self.block_size
            shared = [index for index in range(first_written, len(blocks)) if blocks[index].ref_cnt > 1]
            fresh = self.pool.allocate(missing + len(shared))
            if fresh is None:
                return False
            for index in shared:
                original, blocks[index] = blocks[index], fresh.pop()
                self._note_change(request.request_id, index)
                self._copy_block(original.block_id, blocks[index].block_id)
                self.pool.free([original])
            if fresh:
                self._note_change(request.request_id, len(blocks))
                blocks.extend(fresh)
            return True

    def publish_full_blocks(self, request: Request) -> None:
        """Enter the blocks that are full and computed by now into the prefix cache (and through it into the global index).

        A block whose hash another request entered first is exchanged for that one; the request's block table changes with it.
        A request that is not ready publishes later: its blocks hang on some that may not come. So does one whose block would be exchanged
        for one that is still being filled from host memory: it has the bytes, and that one has not.
        """
        num_full = request.num_computed_tokens // self.block_size
        # Asked for every token of every request; one thread publishes for a request, so what it published needs no lock.
        if not self._enable_prefix_caching or num_full <= self._num_published[request.request_id]:
            return
        with self.lock:
            if not self.is_ready(request.request_id):
                return
            first = self._num_published[request.request_id]
            request.update_block_hashes(self.root, self.block_size)
            blocks = self._blocks[request.request_id]
            for index in range(first, num_full):
                entered = self.pool.get_cached(request.block_hashes[index])
                if entered is not None and self._loads.is_filling(entered):
                    return
                parent = request.block_hashes[index - 1] if index else self.root
                own, blocks[index] = blocks[index], self.pool.cache(blocks[index], request.block_hashes[index], parent)
                if blocks[index] is not own:
                    self._note_change(request.request_id, index)
                self._num_published[request.request_id] = index + 1

    def free(self, request_id: str) -> None:
        """Give everything back, last block first; a request that holds nothing is fine."""
        with self.lock:
            blocks = self._blocks.pop(request_id, None)
            self._num_published.pop(request_id, None)
            self._changed_from.pop(request_id, None)
            self._loads.release(request_id)
            if blocks:
                self.pool.free(blocks[::-1])

    # ---- steps that run while others are prepared ---------------------------------------------------------------------
    def step_launched(self) -> None:
        """A step runs from now on: blocks given back meanwhile are free when it has ended."""
        with self.lock:
            self.pool.step_launched()

    def step_completed(self) -> None:
        """The oldest step that was launched has ended."""
        with self.lock:
            self.pool.step_completed()

    def take_changes(self) -> dict[str, tuple[int, list[int]]]:
        """By holder, for those whose blocks are others than at the last call: from which index on, and the ids from there on."""
        with self.lock:
            changed, self._changed_from = self._changed_from, {}
            return {
                holder: (first, [block.block_id for block in self._blocks[holder][first:]])
                for holder, first in changed.items()
                if holder in self._blocks
            }

    def _note_change(self, holder_id: str, index: int) -> None:
        self._changed_from[holder_id] = min(index, self._changed_from.get(holder_id, index))

    def _cacheable(self, request: Request) -> list[BlockHash]:
        """Of the blocks that it could take from a cache."""
        if not self._enable_prefix_caching:
            return []
        return request.block_hashes[: request.num_cacheable_tokens // self.block_size]

    def _host_run(self, block_hashes: Sequence[BlockHash]) -> list[BlockHash]:
        return self.host_tier.leading_run(block_hashes) if self.host_tier is not None else []

    def _leading_run(self, block_hashes: Sequence[BlockHash]) -> list[KVCacheBlock]:
        hits: list[KVCacheBlock] = []
        for block_hash in block_hashes:
            block = self.pool.get_cached(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def check_invariants(self) -> None:
        """AssertionError if the pool is inconsistent or its reference counts are not exactly what the requests hold."""
        with self.lock:
            if self.host_tier is not None:
                self.host_tier.check_invariants()
            self.pool.check_invariants(self.root)
            held: dict[int, int] = {}
            for blocks in self._blocks.values():
                for block in blocks:
                    held[block.block_id] = held.get(block.block_id, 0) + 1
            for block in self.pool.retired:
                held[block.block_id] = held.get(block.block_id, 0) + 1
            for block in self.pool.blocks:
                assert block.ref_cnt == held.get(block.block_id, 0), f"{block} has {held.get(block.block_id, 0)} holders"
