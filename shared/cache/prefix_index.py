"""The global prefix index as a port: which worker holds which block hashes. Redis behind it in production, a dict in tests.

A worker's entries are tied to its incarnation: a restarted worker starts with none, whatever its predecessor held.
The overlap of a prompt is the length of the leading run of hits: what a worker has in its cache is prefix-closed, and what goes on from
there in its host memory can be brought back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from shared.block_hash import BlockHash


class Holder(NamedTuple):
    worker_id: str
    incarnation: int


class Tier(Enum):
    """Where a worker has a block, as the value is written to the index; in both counts as DEVICE."""

    DEVICE = b"d"
    """In its KV cache: of use at once."""
    HOST = b"h"
    """In its host memory alone: it has to be copied first (see host_tier.py)."""


class Overlap(NamedTuple):
    """Of a prompt, the leading blocks that a worker has."""

    num_blocks: int = 0
    num_host_blocks: int = 0
    """Of these, in host memory alone."""


class PrefixIndexReader(Protocol):
    """The router's side."""

    async def match(self, holders: Sequence[Holder], hashes: Sequence[BlockHash]) -> dict[Holder, Overlap]:
        """Overlap for each holder (none if unknown), in one round trip. Raises nothing for a lost index: no overlap anywhere."""
        ...


class PrefixIndexWriter(Protocol):
    """A worker's side. Calls return at once; a thread of the writer applies them in order."""

    def publish(self, hashes: Iterable[BlockHash], tier: Tier = Tier.DEVICE) -> None:
        """The worker has these there, wherever it had them before."""
        ...

    def withdraw(self, hashes: Iterable[BlockHash]) -> None:
        """It has them nowhere."""
        ...


def leading_overlap(tiers: Iterable[Tier | None]) -> Overlap:
    """Of a prompt's blocks in order, where each is; None: not there."""
    num_blocks = num_host_blocks = 0
    for tier in tiers:
        if tier is None:
            break
        num_blocks += 1
        num_host_blocks += tier is Tier.HOST
    return Overlap(num_blocks, num_host_blocks)
