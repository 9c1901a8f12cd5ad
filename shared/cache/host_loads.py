"""Blocks on their way from host memory into the KV cache, and the holders that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared.block_hash import BlockHash
from shared.cache.block_pool import KVCacheBlock


@dataclass(eq=False)
class HostLoad:
    """One copy of several blocks of a chain."""

    name: str
    """Under which it holds these blocks and those before them, so that nobody gets them while they are written."""
    block_hashes: list[BlockHash]
    blocks: list[KVCacheBlock]
    started_s: float
    wait_s: float | None = None
    """What it took, once it has ended."""


class HostLoads:
    """Not thread-safe: KVCacheManager holds the lock; but `is_ready`, `has_failed` and `take` may be called by any thread without it.

    A load is itself a holder, of the blocks before its own: where one of those does not come, its own are of no use.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, HostLoad] = {}  # by name, in the order in which they end
        self._by_block: dict[int, HostLoad] = {}
        self._awaited: dict[str, set[HostLoad]] = {}  # by holder
        self._failed: set[str] = set()  # holders
        self._when_ready: dict[str, Callable[[], None]] = {}  # by holder
        self._own: dict[str, HostLoad] = {}  # by the holder for which it was started

    def is_ready(self, holder_id: str) -> bool:
        """The bytes of all its blocks are there."""
        return holder_id not in self._awaited and holder_id not in self._failed

    def has_failed(self, holder_id: str) -> bool:
        """Some of them will not come."""
        return holder_id in self._failed

    def take(self, holder_id: str) -> HostLoad | None:
        """What was started for it, told once."""
        return self._own.pop(holder_id, None)

    def started_for(self, holder_id: str) -> HostLoad | None:
        return self._own.get(holder_id)

    def add(self, load: HostLoad, holder_id: str) -> None:
        """About to be started for `holder_id`, which waits for it."""
        self._under_way[load.name] = load
        self._own[holder_id] = load
        self._by_block.update(dict.fromkeys((block.block_id for block in load.blocks), load))
        self._awaited.setdefault(holder_id, set()).add(load)

    def is_filling(self, block: KVCacheBlock) -> bool:
        """Its bytes are still on their way."""
        return block.block_id in self._by_block

    def wait_for(self, holder_id: str, blocks: Iterable[KVCacheBlock]) -> None:
        """`holder_id` has taken these, of which some may be under way."""
        loads = {load for block in blocks if (load := self._by_block.get(block.block_id)) is not None} if self._by_block else set()
        if loads:
            self._awaited.setdefault(holder_id, set()).update(loads)

    def fork(self, holder_id: str, child_id: str) -> None:
        """`child_id` has taken all that `holder_id` has."""
        if holder_id in self._awaited:
            self._awaited[child_id] = set(self._awaited[holder_id])
        if holder_id in self._failed:
            self._failed.add(child_id)

    def when_ready(self, holder_id: str, then: Callable[[], None]) -> bool:
        """True: `end` will give `then`, unless the holder is released before. False: nothing is awaited."""
        if holder_id not in self._awaited:
            return False
        self._when_ready[holder_id] = then
        return True

    def release(self, holder_id: str) -> None:
        """It gives its blocks back."""
        self._awaited.pop(holder_id, None)
        self._when_ready.pop(holder_id, None)
        self._own.pop(holder_id, None)
        self._failed.discard(holder_id)

    def end(self, load: HostLoad, is_there: bool) -> tuple[list[HostLoad], list[Callable[[], None]]]:
        """Gives the loads whose blocks are of no use now, later ones first, and what was to be called."""
        del self._under_way[load.name]
        for block in load.blocks:
            del self._by_block[block.block_id]
        useless = [] if is_there else [load]
        calls = []
        for holder_id in [holder_id for holder_id, awaited in self._awaited.items() if load in awaited]:
            if not is_there:
                self._failed.add(holder_id)  # before it is no longer awaited: see is_ready
                if holder_id in self._under_way:
                    useless.append(self._under_way[holder_id])
            self._awaited[holder_id].remove(load)
            if not self._awaited[holder_id]:
                del self._awaited[holder_id]
                if (then := self._when_ready.pop(holder_id, None)) is not None:
                    calls.append(then)
        order = list(self._under_way)
        useless.sort(key=lambda other: order.index(other.name) if other is not load else -1, reverse=True)
        return useless, calls
