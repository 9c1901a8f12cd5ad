"""Blocks of which a transfer is on the way: a request that needs the same ones waits for them instead of having them sent again.

Only for a transfer of which it needs half or more: behind a long prompt of which it shares the beginning it would wait until all of that is
computed, to save little.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from shared.block_hash import BlockHash


class AwaitedBlocks:
    """Not thread-safe: the worker's lock holds."""

    def __init__(self) -> None:
        self._owners: dict[BlockHash, str] = {}
        self._hashes: dict[str, list[BlockHash]] = {}

    def add(self, request_id: str, block_hashes: Sequence[BlockHash]) -> None:
        """The transfer of `request_id` brings these; until `remove`."""
        fresh = [block_hash for block_hash in block_hashes if block_hash not in self._owners]
        self._owners.update(dict.fromkeys(fresh, request_id))
        self._hashes[request_id] = fresh

    def remove(self, request_id: str) -> None:
        """They are here, or will not come. Safe to call again."""
        for block_hash in self._hashes.pop(request_id, ()):
            del self._owners[block_hash]

    def __bool__(self) -> bool:
        return bool(self._owners)

    def are_worth_waiting_for(self, missing: Sequence[BlockHash]) -> bool:
        """`missing`: what a request lacks, in chain order."""
        owner = self._owners.get(missing[0]) if missing else None
        if owner is None:
            return False
        num_shared = sum(1 for _ in takewhile(lambda block_hash: self._owners.get(block_hash) == owner, missing))
        return 2 * num_shared >= len(self._hashes[owner])
