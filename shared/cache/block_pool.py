"""The pool of KV blocks of one worker: reference counts, the LRU free queue and the map from hash to cached block.

A block is in exactly one of two states: referenced (ref_cnt > 0) or in the free queue (ref_cnt == 0). A block in the free queue
may still be cached: a later hit takes it back (`touch`); it is evicted only when it is taken for new use, and its hash forgotten, unless
there is host memory that keeps a copy (see host_tier.py).
Not thread-safe: KVCacheManager holds the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from shared.block_hash import BlockHash
from shared.cache.host_tier import HostTier
from shared.cache.prefix_index import Tier


class KVCacheBlock:
    """One block. `prev` and `next` link the free queue; both None outside it."""

    __slots__ = ("block_hash", "block_id", "next", "parent_hash", "prev", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: BlockHash | None = None
        self.parent_hash: BlockHash | None = None
        self.prev: KVCacheBlock | None = None
        self.next: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, cached={self.block_hash is not None})"


class FreeBlockQueue:
    """Doubly linked list in LRU order: `popleft` takes the least recently freed block; `remove` is O(1) for `touch`."""

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVCacheBlock) -> None:
        last = self._tail.prev
        assert last is not None and block.next is None
        last.next, block.prev = block, last
        block.next, self._tail.prev = self._tail, block
        self.num_blocks += 1

    def remove(self, block: KVCacheBlock) -> None:
        assert block.prev is not None and block.next is not None, "block is not in the free queue"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.num_blocks -= 1

    def popleft(self) -> KVCacheBlock:
        first = self._head.next
        assert first is not None and first is not self._tail, "free queue is empty"
        self.remove(first)
        return first

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next


class BlockPool:
    """`on_cached` and `on_evicted` are told of every hash that comes to a tier or leaves the last one (the global index listens)."""

    def __init__(
        self,
        num_blocks: int,
        on_cached: Callable[[BlockHash, Tier], None] = lambda _hash, _tier: None,
        on_evicted: Callable[[BlockHash], None] = lambda _: None,
        host_tier: HostTier | None = None,
    ) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlockQueue(self.blocks)
        self._cached: dict[BlockHash, KVCacheBlock] = {}
        self._children: dict[BlockHash, set[BlockHash]] = {}
        """Of what is cached: those whose parent it is."""
        self._num_launched = self._num_completed = 0
        self._retired: deque[tuple[int, KVCacheBlock]] = deque()
        """References given back while a step ran, with the last step that may still use the block."""
        self._on_cached = on_cached
        self._on_evicted = on_evicted
        self._host_tier = host_tier
        if host_tier is not None:
            host_tier.listen(self._announce)

    @property
    def num_free(self) -> int:
        return self._free.num_blocks

    @property
    def num_used(self) -> int:
        """Blocks referenced by some request."""
        return len(self.blocks) - self._free.num_blocks

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def get_cached(self, block_hash: BlockHash) -> KVCacheBlock | None:
        return self._cached.get(block_hash)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take a reference on each; a block nobody referenced leaves the free queue and can no longer be evicted."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def allocate(self, num_blocks: int) -> list[KVCacheBlock] | None:
        """Blocks for new use with ref_cnt 1, evicting the least recently freed; None (and no change) when too few are free."""
        if num_blocks > self._free.num_blocks:
            return None
        taken = [self._free.popleft() for _ in range(num_blocks)]
        self._evict(taken)
        for block in taken:
            block.ref_cnt = 1
        return taken

    def cache(self, block: KVCacheBlock, block_hash: BlockHash, parent_hash: BlockHash) -> KVCacheBlock:
        """Enter a full, computed, referenced block under its hash.

        Returns the block that holds this hash: `block` itself, or the one that was entered first, with a reference moved from
        `block` to it (`block` is then free). So one hash means one block, and the cached set stays prefix-closed.
        """
        assert block.ref_cnt > 0, "only a referenced block can be entered"
        first = self._cached.get(block_hash)
        if first is block:
            return block
        if first is not None:
            self.touch([first])
            self.free([block])
            return first
        assert block.block_hash is None, "block already holds another hash"
        block.block_hash, block.parent_hash = block_hash, parent_hash
        self._cached[block_hash] = block
        self._children.setdefault(parent_hash, set()).add(block_hash)
        self._announce(block_hash)
        return block

    def uncache(self, block: KVCacheBlock) -> None:
        """Its bytes are not what its hash says, so nobody else may take it, nor what continues it."""
        for block_hash, _ in self._forget(block):
            self._announce(block_hash)

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give back one reference on each. Pass a request's blocks last block first, so that leaves are evicted before parents. While a
        step runs that was launched and is not known to have ended, a block stays referenced: the step may read and write it."""
        if self._num_launched > self._num_completed:
            self._retired.extend((self._num_launched, block) for block in blocks)
        else:
            self._release(blocks)

    def step_launched(self) -> None:
        """A step runs from now on beside what else happens here."""
        self._num_launched += 1

    def step_completed(self) -> None:
        """The oldest step that was launched has ended: what was given back before the next one was launched is free."""
        assert self._num_completed < self._num_launched, "no step was launched"
        self._num_completed += 1
        while self._retired and self._retired[0][0] <= self._num_completed:
            self._release([self._retired.popleft()[1]])

    @property
    def retired(self) -> list[KVCacheBlock]:
        """Blocks, one for each reference, that are free when the steps that run have ended."""
        return [block for _, block in self._retired]

    def _release(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "block was freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free.append(block)

    def _evict(self, blocks: Iterable[KVCacheBlock]) -> None:
        evicted = [forgotten for block in blocks for forgotten in self._forget(block)]
        if self._host_tier is not None and evicted:
            self._host_tier.put(evicted)
        for block_hash, _ in evicted:
            self._announce(block_hash)

    def _forget(self, block: KVCacheBlock) -> list[tuple[BlockHash, int]]:
        """Take a block out of the cache, and what continues it, which no lookup would come to: (hash, block id), leaves before parents.

        Blocks that continue it may be referenced still: a transfer that holds its own copy of a block does not hold the one in the cache,
        which another request entered first.
        """
        if block.block_hash is None:
            return []
        forgotten = [block]
        for parent in forgotten:
            assert parent.block_hash is not None
            forgotten += [self._cached[block_hash] for block_hash in self._children.pop(parent.block_hash, ())]
        result = []
        for each in reversed(forgotten):
            assert each.block_hash is not None and each.parent_hash is not None
            del self._cached[each.block_hash]
            siblings = self._children.get(each.parent_hash, set())
            siblings.discard(each.block_hash)
            if not siblings:
                self._children.pop(each.parent_hash, None)
            result.append((each.block_hash, each.block_id))
            each.block_hash = each.parent_hash = None
        return result

    def _announce(self, block_hash: BlockHash) -> None:
        """Where it is now."""
        if block_hash in self._cached:
            self._on_cached(block_hash, Tier.DEVICE)
        elif self._host_tier is not None and block_hash in self._host_tier:
            self._on_cached(block_hash, Tier.HOST)
        else:
            self._on_evicted(block_hash)

    def check_invariants(self, root: BlockHash | None = None) -> None:
        """Recompute from scratch; AssertionError names what broke. With `root`, also that the cached set is prefix-closed."""
        in_queue = list(self._free)
        assert len(in_queue) == self._free.num_blocks, "free count differs from the queue"
        assert len({block.block_id for block in in_queue}) == len(in_queue), "a block is queued twice"
        queued = {block.block_id for block in in_queue}
        for block in self.blocks:
            assert (block.ref_cnt == 0) == (block.block_id in queued), f"{block} is in the wrong state"
            if block.block_hash is not None:
                assert self._cached.get(block.block_hash) is block, f"{block} has a stale hash"
        assert sum(map(len, self._children.values())) == len(self._cached), "a child is not cached"
        for block_hash, block in self._cached.items():
            assert block.block_hash == block_hash, "the map leads to a block with another hash"
            assert block.parent_hash is not None and block_hash in self._children[block.parent_hash], f"{block} is not known as a child"
            if root is not None:
                assert block.parent_hash == root or block.parent_hash in self._cached, f"{block} is cached without its parent"
