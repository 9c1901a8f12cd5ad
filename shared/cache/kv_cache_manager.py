"""Which blocks each request holds: prefix hits, reservation, growth, forks, publication of full blocks, and giving back.

The engine thread and the control thread (which reserves blocks for incoming transfers) both call in; one lock serves them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.block_hash import BlockHash
from shared.cache.block_pool import BlockPool, KVCacheBlock
from shared.request import Request


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True)
class Reservation:
    """What `reserve` gave: all block ids in order; the first `num_cached_blocks` of them hold valid KV already."""

    block_ids: list[int]
    num_cached_blocks: int


class KVCacheManager:
    """`copy_block(source, target)` copies the KV of one block over another's before it returns."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        root: BlockHash,
        enable_prefix_caching: bool = True,
        copy_block: Callable[[int, int], None] = lambda _source, _target: None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.root = root
        self.lock = threading.RLock()
        self._enable_prefix_caching = enable_prefix_caching
        self._copy_block = copy_block
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        self._num_published: dict[str, int] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

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
        """
        with self.lock:
            assert request.request_id not in self._blocks, "request holds blocks already"
            request.update_block_hashes(self.root, self.block_size)
            hits = self._match(request)
            num_blocks = cdiv(request.num_tokens, self.block_size)
            num_free_hits = sum(block.ref_cnt == 0 for block in hits)
            if self.pool.num_free - num_free_hits - (num_blocks - len(hits)) < num_headroom_blocks:
                return None
            self.pool.touch(hits)
            fresh = self.pool.allocate(num_blocks - len(hits))
            assert fresh is not None
            self._blocks[request.request_id] = hits + fresh
            self._num_published[request.request_id] = len(hits)
            request.num_computed_tokens = len(hits) * self.block_size
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed_tokens
                self.num_queried_tokens += request.num_tokens
                self.num_hit_tokens += request.num_computed_tokens
            return Reservation([block.block_id for block in hits + fresh], len(hits))

    def pin(self, holder_id: str, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Blocks that are cached under the leading ones of `block_hashes`. They belong to `holder_id`, which holds nothing yet, until
        `free`, and none of them is evicted meanwhile."""
        with self.lock:
            assert holder_id not in self._blocks, "holds blocks already"
            blocks = self._leading_run(block_hashes)
            self.pool.touch(blocks)
            self._blocks[holder_id] = blocks
            return [block.block_id for block in blocks]

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
        if not self._enable_prefix_caching:
            return []
        wanted = request.block_hashes[: request.num_cacheable_tokens // self.block_size]
        with self.lock:
            num_hits = len(self._leading_run(wanted))
        return wanted[num_hits:]

    def fork(self, request_id: str, child_id: str) -> None:
        """Give `child_id`, which holds nothing, every block that `request_id` holds, by reference. Costs no block: the partly filled
        tail is copied in `grow`, by whoever writes to it while another still holds it, so the last one keeps the original."""
        with self.lock:
            assert child_id not in self._blocks, "request holds blocks already"
            blocks = self._blocks[request_id]
            self.pool.touch(blocks)
            self._blocks[child_id] = list(blocks)
            self._num_published[child_id] = self._num_published[request_id]

    def grow(self, request: Request) -> bool:
        """Make room for all tokens known of a request that holds blocks, and make the block it will write to its own; False, and no
        change, when the pool is out of blocks."""
        with self.lock:
            blocks = self._blocks[request.request_id]
            missing = max(0, cdiv(request.num_tokens, self.block_size) - len(blocks))
            first_written = request.num_computed_tokens // self.block_size
            shared = [index for index in range(first_written, len(blocks)) if blocks[index].ref_cnt > 1]
            fresh = self.pool.allocate(missing + len(shared))
            if fresh is None:
                return False
            for index in shared:
                original, blocks[index] = blocks[index], fresh.pop()
                self._copy_block(original.block_id, blocks[index].block_id)
                self.pool.free([original])
            blocks.extend(fresh)
            return True

    def publish_full_blocks(self, request: Request) -> None:
        """Enter the blocks that are full and computed by now into the prefix cache (and through it into the global index).

        A block whose hash another request entered first is exchanged for that one; the request's block table changes with it.
        """
        if not self._enable_prefix_caching:
            return
        with self.lock:
            num_full = request.num_computed_tokens // self.block_size
            first = self._num_published[request.request_id]
            if num_full <= first:
                return
            request.update_block_hashes(self.root, self.block_size)
            blocks = self._blocks[request.request_id]
            for index in range(first, num_full):
                parent = request.block_hashes[index - 1] if index else self.root
                blocks[index] = self.pool.cache(blocks[index], request.block_hashes[index], parent)
            self._num_published[request.request_id] = num_full

    def free(self, request_id: str) -> None:
        """Give everything back, last block first; a request that holds nothing is fine."""
        with self.lock:
            blocks = self._blocks.pop(request_id, None)
            self._num_published.pop(request_id, None)
            if blocks:
                self.pool.free(blocks[::-1])

    def _match(self, request: Request) -> list[KVCacheBlock]:
        if not self._enable_prefix_caching:
            return []
        return self._leading_run(request.block_hashes[: request.num_cacheable_tokens // self.block_size])

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
            self.pool.check_invariants(self.root)
            held: dict[int, int] = {}
            for blocks in self._blocks.values():
                for block in blocks:
                    held[block.block_id] = held.get(block.block_id, 0) + 1
            for block in self.pool.blocks:
                assert block.ref_cnt == held.get(block.block_id, 0), f"{block} has {held.get(block.block_id, 0)} holders"
