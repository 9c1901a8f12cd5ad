"""The in-memory twin of the Redis prefix index: same behaviour, one process, applied at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.block_hash import BlockHash
from shared.cache.prefix_index import Holder, leading_hits


class MemoryPrefixIndex:
    """What all workers hold; also the reader."""

    def __init__(self) -> None:
        self._held: dict[Holder, set[BlockHash]] = {}

    async def match(self, holders: Sequence[Holder], hashes: Sequence[BlockHash]) -> dict[Holder, int]:
        return {holder: leading_hits(item in self._held.get(holder, ()) for item in hashes) for holder in holders}

    def writer(self, holder: Holder) -> MemoryPrefixIndexWriter:
        return MemoryPrefixIndexWriter(self._held.setdefault(holder, set()))

    def forget(self, holder: Holder) -> None:
        self._held.pop(holder, None)


class MemoryPrefixIndexWriter:
    """One worker's side."""

    def __init__(self, held: set[BlockHash]) -> None:
        self._held = held

    def publish(self, hashes: Iterable[BlockHash]) -> None:
        self._held.update(hashes)

    def withdraw(self, hashes: Iterable[BlockHash]) -> None:
        self._held.difference_update(hashes)
