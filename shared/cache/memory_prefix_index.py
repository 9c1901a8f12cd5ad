"""The in-memory twin of the Redis prefix index: same behaviour, one process, applied at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.block_hash import BlockHash
from shared.cache.prefix_index import Holder, Overlap, Tier, leading_overlap


class MemoryPrefixIndex:
    """What all workers hold; also the reader."""

    def __init__(self) -> None:
        self._held: dict[Holder, dict[BlockHash, Tier]] = {}

    async def match(self, holders: Sequence[Holder], hashes: Sequence[BlockHash]) -> dict[Holder, Overlap]:
        return {holder: leading_overlap(map(self._held.get(holder, {}).get, hashes)) for holder in holders}

    def writer(self, holder: Holder) -> MemoryPrefixIndexWriter:
        return MemoryPrefixIndexWriter(self._held.setdefault(holder, {}))

    def forget(self, holder: Holder) -> None:
        self._held.pop(holder, None)


class MemoryPrefixIndexWriter:
    """One worker's side."""

    def __init__(self, held: dict[BlockHash, Tier]) -> None:
        self._held = held

    def publish(self, hashes: Iterable[BlockHash], tier: Tier = Tier.DEVICE) -> None:
        self._held.update(dict.fromkeys(hashes, tier))

    def withdraw(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._held.pop(block_hash, None)
