"""What the sender knows of one transfer to one peer: its blocks, its chunks on the wire, its deadlines. No messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shared.transport.connector import StoredBytes
from shared.transport.protocol.control import Commit
from shared.transport.protocol.frames import MAX_UNITS_PER_CHUNK, DataHeader
from shared.transport.protocol.region import Region
from shared.transport.protocol.wire_plan import WirePlan

_MAX_SKIPPED = 256


class Phase(Enum):
    OFFERED = auto()
    GRANTED = auto()
    COMMIT_SENT = auto()
    ENDED = auto()


@dataclass(slots=True)
class Chunk:
    """A range of layers of consecutive units. `header` is kept for re-sends: its checksum stays that of the first reading."""

    unit_start: int
    num_tokens: int
    """Of each unit."""
    layer_start: int
    layer_count: int
    regions: tuple[Region, ...]
    lane: int = 0
    header: DataHeader | None = None
    stored: StoredBytes | None = None
    """Kept until the receiver has the chunk: what was read may be staging memory."""
    num_reading: int = 0
    """Messages of it that a lane has not read yet."""


@dataclass(slots=True)
class CommitRequest:
    hidden_state: bytes
    num_cached_tokens: int


@dataclass(slots=True, eq=False)
class SenderTransfer:
    transfer_id: str
    attempt: int
    peer: str
    num_prompt_tokens: int
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
    """Units."""
    queued: dict[int, int] = field(default_factory=dict)
    """Block index -> bit mask of the layers handed to send_blocks."""
    ready: deque[tuple[int, int, int, int]] = field(default_factory=deque)
    """(block index, block id, first layer, layers) handed over and not cut into chunks: that happens as they are sent, since many blocks at
    once would keep the control thread from its peers."""
    pending: deque[Chunk] = field(default_factory=deque)
    sent: list[Chunk] = field(default_factory=list)
    """Chunks in the order of their chunk_seq."""
    in_flight: set[int] = field(default_factory=set)
    resend: deque[int] = field(default_factory=deque)
    num_reading: int = 0
    """Messages that a lane has not read yet: until none is left, the blocks are needed."""
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
    starved_s: float | None = None
    """Since when it has had something to send and may not."""

    def note_queued(self, block_index: int, layer_start: int, layer_count: int) -> list[tuple[int, int]]:
        """The layer ranges of these that were not handed over before."""
        mask, wanted = self.queued.get(block_index, 0), ((1 << layer_count) - 1) << layer_start
        self.queued[block_index] = mask | wanted
        if not mask & wanted:
            return [(layer_start, layer_count)]
        fresh: list[tuple[int, int]] = []
        for layer in range(layer_start, layer_start + layer_count):
            if mask >> layer & 1:
                continue
            if fresh and sum(fresh[-1]) == layer:
                fresh[-1] = (fresh[-1][0], fresh[-1][1] + 1)
            else:
                fresh.append((layer, 1))
        return fresh

    def cut_next(self, plan: WirePlan, max_chunk_bytes: int) -> bool:
        """See that a chunk is pending, from the blocks that are ready and missing. False: there is nothing left to send."""
        while not self.pending and self.ready:
            self._cut_block(plan, *self.ready.popleft(), max_chunk_bytes)
        return bool(self.pending)

    def _cut_block(self, plan: WirePlan, block_index: int, block_id: int, first: int, count: int, max_chunk_bytes: int) -> None:
        per_chunk = plan.layers_per_chunk(max_chunk_bytes)
        for unit in plan.units_of(block_index, plan.src.block_size, self.num_prompt_tokens):
            if unit not in self.missing:
                continue
            num_tokens = plan.tokens_of(unit, self.num_prompt_tokens)
            for start in range(first, first + count, per_chunk):
                size = min(per_chunk, first + count - start)
                region = plan.source_region(block_id, unit, num_tokens, start, size)
                self.pending.append(Chunk(unit, num_tokens, start, size, (region,)))

    def next_chunk(self, plan: WirePlan, preferred_chunk_bytes: int, max_chunk_bytes: int) -> Chunk:
        """The next of the pending ones, of which there is one, and with it those after it that fit into a chunk of the preferred size."""
        chunk = self.pending.popleft()
        unit_nbytes = plan.layer_nbytes(chunk.num_tokens) * chunk.layer_count
        regions = list(chunk.regions)
        skipped: list[Chunk] = []
        max_units = min(MAX_UNITS_PER_CHUNK, preferred_chunk_bytes // unit_nbytes)
        while len(regions) < max_units and self.cut_next(plan, max_chunk_bytes):
            other = self.pending[0]
            if (other.layer_start, other.layer_count) != (chunk.layer_start, chunk.layer_count):
                if len(skipped) >= _MAX_SKIPPED:
                    break
                skipped.append(self.pending.popleft())  # another layer range of the same units: the next chunk
                continue
            if (other.unit_start, other.num_tokens) != (chunk.unit_start + len(regions), chunk.num_tokens):
                break
            regions += self.pending.popleft().regions
        self.pending.extendleft(reversed(skipped))
        chunk.regions = tuple(regions)
        return chunk

    @property
    def has_unsent(self) -> bool:
        return bool(self.resend or self.pending or self.ready)

    def unqueued(self, plan: WirePlan) -> list[int]:
        """Blocks that are missing, in part at least, and were never handed over whole."""
        whole = (1 << plan.src.num_layers) - 1
        per_block = plan.src.block_size // plan.unit_tokens
        return sorted({index for unit in self.missing if self.queued.get(index := unit // per_block, 0) != whole})

    def ask_again(self, seqs: Sequence[int]) -> None:
        """Send these once more, those that do not wait for it already."""
        waiting = set(self.resend)
        self.resend.extend(seq for seq in seqs if seq not in waiting)

    def settled(self, received: Sequence[tuple[int, int]]) -> list[int]:
        """Those in flight that `received` names."""
        return [seq for seq in self.in_flight if any(start <= seq < start + count for start, count in received)]

    def on_lane(self, lane: int) -> Iterable[int]:
        return [seq for seq in self.in_flight if self.sent[seq].lane == lane]
