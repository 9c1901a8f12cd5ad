"""Which part of a KV block is meant: the unit in which memory is read and written by the transfer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """A box of one block: layers x heads x tokens, K and V. Heads are counted from the first that this memory holds."""

    block_id: int
    layer_start: int
    layer_count: int
    head_start: int
    head_count: int
    token_start: int
    token_count: int
