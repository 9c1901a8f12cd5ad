"""The global prefix index as a port: which worker holds which block hashes. Redis behind it in production, a dict in tests.

A worker's entries are tied to its incarnation: a restarted worker starts with an empty set, whatever its predecessor held.
The cached set of a worker is prefix-closed, so the overlap of a prompt is the length of the leading run of hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from shared.block_hash import BlockHash


class Holder(NamedTuple):
    worker_id: str
    incarnation: int


class PrefixIndexReader(Protocol):
    """The router's side."""

    async def match(self, holders: Sequence[Holder], hashes: Sequence[BlockHash]) -> dict[Holder, int]:
        """Overlap in blocks for each holder (0 if unknown), in one round trip. Raises nothing for a lost index: all zeros."""
        ...


class PrefixIndexWriter(Protocol):
    """A worker's side. Calls return at once; a thread of the writer applies them in order."""

    def publish(self, hashes: Iterable[BlockHash]) -> None: ...

    def withdraw(self, hashes: Iterable[BlockHash]) -> None: ...


def leading_hits(present: Iterable[object]) -> int:
    """Length of the leading run of truthy entries."""
    count = 0
    for hit in present:
        if not hit:
            break
        count += 1
    return count
