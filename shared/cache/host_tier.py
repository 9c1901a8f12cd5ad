"""The second tier of the prefix cache: copies in host memory of blocks that the KV cache has evicted, found by the same hashes.

A block comes here when its place in the KV cache is given to another use; where room is needed here, the least recently used go. From
here it is copied back into a free block of the KV cache; the copy here remains, so that its next eviction costs nothing. A tier is a cache:
where storing would keep a step waiting, blocks are dropped instead.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from shared.block_hash import BlockHash

logger = logging.getLogger(__name__)

COUNTERS = (
    "kv_host_stored_blocks",
    "kv_host_stored_bytes",
    "kv_host_store_seconds",
    "kv_host_dropped_blocks",
    "kv_host_evicted_blocks",
    "kv_host_loaded_blocks",
    "kv_host_loaded_bytes",
    "kv_host_load_seconds",
    "kv_host_load_failures",
    "kv_host_corrupt_blocks",
)


class HostBlockStore(Protocol):
    """The memory of the tier, `num_slots` slots of `block_nbytes`, and the copies between it and the KV cache."""

    num_slots: int
    block_nbytes: int

    def num_storable(self) -> int:
        """How many blocks `store` can take now without waiting for those it took before."""
        ...

    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks of the KV cache to slots. On return the blocks may be overwritten."""
        ...

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots to blocks of the KV cache. On return the bytes are there. Any thread, beside the others."""
        ...

    def checksum(self, slot: int) -> int:
        """Of what stands in a slot."""
        ...


@dataclass
class _Entry:
    slot: int
    checksum: int | None
    num_readers: int = 0


class HostTier:
    """Not thread-safe: KVCacheManager holds the lock. Copies back are made by `executor`."""

    def __init__(self, store: HostBlockStore, executor: Executor, max_blocks_per_step: int, checks_contents: bool = False) -> None:
        """At most `max_blocks_per_step` blocks are stored between two calls of `begin_step`. `checks_contents`: what is taken from here is
        compared with the checksum of what was put here."""
        self.num_slots = store.num_slots
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._store = store
        self._executor = executor
        self._max_blocks_per_step = self._num_left_in_step = max_blocks_per_step
        self._checks_contents = checks_contents
        self._entries: OrderedDict[BlockHash, _Entry] = OrderedDict()
        """Least recently used first."""
        self._free = list(range(store.num_slots))
        self._on_dropped: Callable[[BlockHash], None] = lambda _: None

    def listen(self, on_dropped: Callable[[BlockHash], None]) -> None:
        """Tell of every hash that leaves."""
        self._on_dropped = on_dropped

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    @property
    def num_cached(self) -> int:
        return len(self._entries)

    def begin_step(self) -> None:
        """Blocks may be stored again."""
        self._num_left_in_step = self._max_blocks_per_step

    def put(self, evicted: Sequence[tuple[BlockHash, int]]) -> None:
        """The KV cache is about to reuse these blocks (hash, block id), in the order of eviction, leaves before parents. Those that are not
        here yet are copied as far as the step allows: parents rather than leaves, which are of no use without them."""
        missing = []
        for block_hash, block_id in evicted:
            if block_hash in self._entries:
                self._entries.move_to_end(block_hash)
            else:
                missing.append((block_hash, block_id))
        slots = self._take_slots(min(len(missing), self._num_left_in_step, self._store.num_storable()))
        chosen = missing[len(missing) - len(slots) :]
        self.counters["kv_host_dropped_blocks"] += len(missing) - len(chosen)
        if not chosen:
            return
        start_s = time.perf_counter()
        try:
            self._store.store([block_id for _, block_id in chosen], slots)
            checksums = [self._store.checksum(slot) if self._checks_contents else None for slot in slots]
        except Exception:
            logger.exception("%d blocks could not be copied to host memory", len(chosen))
            self._free += slots
            self.counters["kv_host_dropped_blocks"] += len(chosen)
            return
        self._num_left_in_step -= len(chosen)
        for (block_hash, _), slot, checksum in zip(chosen, slots, checksums, strict=True):
            self._entries[block_hash] = _Entry(slot, checksum)
        self.counters["kv_host_stored_blocks"] += len(chosen)
        self.counters["kv_host_stored_bytes"] += len(chosen) * self._store.block_nbytes
        self.counters["kv_host_store_seconds"] += time.perf_counter() - start_s

    def leading_run(self, block_hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Of a chain, what is here from its first block on."""
        return list(takewhile(self._entries.__contains__, block_hashes))

    def hold(self, block_hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Like `leading_run`; these stay until `end_load`. Where contents are checked, the run ends at one that is not
        what was put here, which is dropped."""
        held = []
        for block_hash in block_hashes:
            entry = self._entries.get(block_hash)
            if entry is None:
                break
            if entry.checksum is not None and self._store.checksum(entry.slot) != entry.checksum:
                logger.error("block %s in host memory is not what was put there; it is computed again", block_hash.hex())
                self.counters["kv_host_corrupt_blocks"] += 1
                if entry.num_readers == 0:
                    self._drop(block_hash)
                break
            entry.num_readers += 1
            held.append(block_hash)
        for block_hash in reversed(held):
            self._entries.move_to_end(block_hash)
        return held

    def load(self, held: Sequence[BlockHash], block_ids: Sequence[int], then: Callable[[bool], None]) -> None:
        """Copy what is held here into blocks of the KV cache; `then`, on the executor's thread, is told whether the bytes are there.
        `end_load` has to follow."""
        slots = [self._entries[block_hash].slot for block_hash in held]
        self._executor.submit(self._load, slots, list(block_ids), then)

    def end_load(self, held: Sequence[BlockHash], seconds: float, is_there: bool) -> None:
        """It took `seconds`; what is held here may go. What could not be copied is dropped: it would be tried again for ever."""
        for block_hash in held:
            entry = self._entries[block_hash]
            entry.num_readers -= 1
            if not is_there and entry.num_readers == 0:
                self._drop(block_hash)
        if not is_there:
            self.counters["kv_host_load_failures"] += 1
            return
        self.counters["kv_host_loaded_blocks"] += len(held)
        self.counters["kv_host_loaded_bytes"] += len(held) * self._store.block_nbytes
        self.counters["kv_host_load_seconds"] += seconds

    def close(self) -> None:
        """What is under way is finished first."""
        self._executor.shutdown()

    def _load(self, slots: Sequence[int], block_ids: Sequence[int], then: Callable[[bool], None]) -> None:
        is_there = False
        try:
            self._store.load(slots, block_ids)
            is_there = True
        except Exception:
            logger.exception("%d blocks could not be copied from host memory; they are computed again", len(slots))
        try:
            then(is_there)
        except Exception:  # which nobody would hear of: no one asks the executor how it went
            logger.exception("the end of a copy from host memory failed")

    def _take_slots(self, num_slots: int) -> list[int]:
        """As many as there are: free ones, then those of the least recently used that nobody reads."""
        num_victims = num_slots - len(self._free)
        victims: list[BlockHash] = []
        for block_hash, entry in self._entries.items():
            if len(victims) >= num_victims:
                break
            if entry.num_readers == 0:
                victims.append(block_hash)
        for block_hash in victims:
            self._drop(block_hash)
        self.counters["kv_host_evicted_blocks"] += len(victims)
        return [self._free.pop() for _ in range(min(num_slots, len(self._free)))]

    def _drop(self, block_hash: BlockHash) -> None:
        self._free.append(self._entries.pop(block_hash).slot)
        self._on_dropped(block_hash)

    def check_invariants(self) -> None:
        """AssertionError names what broke."""
        slots = [*self._free, *(entry.slot for entry in self._entries.values())]
        assert sorted(slots) == list(range(self.num_slots)), "a slot of host memory is lost or used twice"
        assert all(entry.num_readers >= 0 for entry in self._entries.values()), "a block in host memory was released twice"
