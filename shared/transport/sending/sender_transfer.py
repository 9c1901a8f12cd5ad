"""What the sender knows of one transfer: its blocks, its chunks on the wire, its deadlines. Data and small steps, no messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from shared.transport.protocol.control import Commit
from shared.transport.protocol.frames import DataHeader


class Phase(Enum):
    OFFERED = auto()
    GRANTED = auto()
    COMMIT_SENT = auto()


@dataclass(slots=True)
class Chunk:
    """A layer range of one block. `header` is kept for re-sends: its checksum stays that of the first reading."""

    block_index: int
    block_id: int
    layer_start: int
    layer_count: int
    lane: int = 0
    header: DataHeader | None = None


@dataclass(slots=True)
class CommitRequest:
    hidden_state: bytes
    num_cached_tokens: int


@dataclass(slots=True)
class SenderTransfer:
    transfer_id: str
    attempt: int
    peer: str
    num_prompt_tokens: int
    num_blocks: int
    block_hashes: bytes
    hash_set_digest: int
    traceparent: str
    deadline_s: float
    """Clock time at which the transfer has failed."""
    started_s: float
    phase: Phase = Phase.OFFERED
    grant_id: int = 0
    slot_gen: int = 0
    credits: int = 0
    missing: frozenset[int] = frozenset()
    queued: dict[int, int] = field(default_factory=dict)
    """Block index -> block id of everything handed to send_blocks."""
    num_layers_queued: dict[int, int] = field(default_factory=dict)
    """Of the blocks of which only the first layers were handed over."""
    pending: deque[Chunk] = field(default_factory=deque)
    sent: list[Chunk] = field(default_factory=list)
    """Chunks in the order of their chunk_seq."""
    in_flight: set[int] = field(default_factory=set)
    resend: deque[int] = field(default_factory=deque)
    num_bytes: int = 0
    digest: int = 0
    commit_request: CommitRequest | None = None
    commit: Commit | None = None
    last_control_s: float = 0.0
    last_progress_s: float = 0.0
    last_fence_s: float = 0.0
    fence_round: int = 0
    nack_seq: int = 0
    is_fence_due: bool = False

    def take_ranges(self, block_index: int, block_id: int, layer_ranges: Iterable[tuple[int, int]]) -> None:
        """Queue the chunks of one block."""
        self.pending.extend(Chunk(block_index, block_id, start, count) for start, count in layer_ranges)

    def unqueued(self) -> list[int]:
        """Missing blocks that were never handed to send_blocks."""
        return sorted(self.missing - self.queued.keys())
