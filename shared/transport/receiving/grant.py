"""One reservation on the receiver: which blocks may be written, which layers of them have come, what is missing at a fence.

Data and small steps under the lock of ReceiverState; no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shared.errors import ProtocolError, TransferError
from shared.transport.protocol.control import Commit
from shared.transport.protocol.frames import DataHeader
from shared.transport.protocol.limits import MAX_CHUNK_DAMAGES, MAX_CHUNK_LOSSES
from shared.transport.protocol.seq_ranges import SeqSet


class GrantPhase(Enum):
    EXPECTED = auto()
    """Blocks are reserved; the offer has not come."""
    GRANTED = auto()
    ENDED = auto()


@dataclass(slots=True)
class _Fence:
    round: int = 0
    chunk_total: int = 0
    nack_seq: int = 0


@dataclass(slots=True)
class _Failure:
    num_damaged: int = 0
    num_lost: int = 0
    nack_seq: int = 0


@dataclass(slots=True, eq=False)
class Grant:
    transfer_id: str
    attempt: int
    block_ids: Sequence[int]
    """Block id by index in the chain, for all blocks of the prompt."""
    missing: frozenset[int]
    num_layers: int
    num_prompt_tokens: int
    deadline_s: float
    traceparent: str
    grant_id: int
    slot_gen: int
    expected_s: float
    block_hashes: bytes | None
    is_prefix: bool = False
    """The sender may offer fewer blocks than are wanted, the first ones."""
    phase: GrantPhase = GrantPhase.EXPECTED
    peer: str = ""
    src_incarnation: int = 0
    hash_set_digest: int = 0
    num_lanes: int = 1
    last_progress_s: float = 0.0
    granted_s: float = 0.0
    first_chunk_s: float | None = None
    last_chunk_s: float | None = None
    num_bytes: int = 0
    num_failed: int = 0
    digest: int = 0
    num_writing: int = 0
    """Lanes copying into a block right now; the blocks may be freed only at 0."""
    num_uncredited: int = 0
    commit: Commit | None = None
    hidden_state: bytes = b""
    nack_seq: int = 0
    received: SeqSet = field(default_factory=SeqSet)
    _writing: set[int] = field(default_factory=set)
    _claimed: dict[int, int] = field(default_factory=dict)
    """Block index -> bit mask of layers that are written or being written."""
    _num_layers_left: int = 0
    _fences: dict[int, _Fence] = field(default_factory=dict)
    _failures: dict[int, _Failure] = field(default_factory=dict)
    _last_round: int = 0

    def __post_init__(self) -> None:
        self._num_layers_left = len(self.missing) * self.num_layers

    @property
    def is_covered(self) -> bool:
        """Every layer of every missing block has been verified and written."""
        return self._num_layers_left == 0

    def shorten(self, num_prompt_tokens: int, num_blocks: int, block_hashes: bytes) -> bool:
        """Be content with what the sender of a prefix has; before it is granted. False: that is not the beginning of what is wanted."""
        ours = self.block_hashes or b""
        # Full blocks only, so that the hashes and the tokens of a prefix are the same share of the whole.
        if not ours.startswith(block_hashes) or len(block_hashes) * self.num_prompt_tokens != len(ours) * num_prompt_tokens:
            return False
        self.num_prompt_tokens, self.block_hashes = num_prompt_tokens, block_hashes
        self.missing = frozenset(index for index in self.missing if index < num_blocks)
        self._num_layers_left = len(self.missing) * self.num_layers
        return True

    def has(self, seq: int) -> bool:
        return seq in self.received or seq in self._writing

    def claim(self, header: DataHeader) -> None:
        """Reserve the chunk's bytes for one lane. ProtocolError when they are not asked for, or another chunk's."""
        if header.block_index not in self.missing:
            raise ProtocolError(f"block {header.block_index} is not among the missing blocks of this grant")
        if header.chunk_seq >= len(self.missing) * self.num_layers:
            raise ProtocolError(f"chunk number {header.chunk_seq} is beyond what this grant can need")
        mask = _mask(header)
        if self._claimed.get(header.block_index, 0) & mask:
            raise ProtocolError(f"two chunks cover the same layers of block {header.block_index}")
        self._claimed[header.block_index] = self._claimed.get(header.block_index, 0) | mask
        self._writing.add(header.chunk_seq)
        self.num_writing += 1

    def settle(self, header: DataHeader, is_sound: bool, now: float) -> None:
        """The lane has finished with the chunk it claimed."""
        self.num_writing -= 1
        self._writing.discard(header.chunk_seq)
        if not is_sound:
            self._claimed[header.block_index] &= ~_mask(header)
            return
        self.received.add(header.chunk_seq)
        self._num_layers_left -= header.layer_count
        self.num_bytes += header.payload_nbytes
        self.digest = (self.digest + header.checksum) & 0xFFFF_FFFF_FFFF_FFFF
        self.first_chunk_s = now if self.first_chunk_s is None else self.first_chunk_s
        self.last_chunk_s = now

    def record_failure(self, seqs: Sequence[int], *, is_damaged: bool) -> None:
        """Chunks to be asked for again with the next NACK. TransferError when one of them has failed too often."""
        self.nack_seq += 1
        self.num_failed += len(seqs)
        for seq in seqs:
            failure = self._failures.setdefault(seq, _Failure())
            failure.nack_seq = self.nack_seq
            if is_damaged:
                failure.num_damaged += 1
            else:
                failure.num_lost += 1
            if failure.num_damaged >= MAX_CHUNK_DAMAGES or failure.num_lost >= MAX_CHUNK_LOSSES:
                raise TransferError(f"chunk {seq} came damaged {failure.num_damaged} times and was lost {failure.num_lost} times")

    def pass_fence(self, lane: int, header: DataHeader) -> tuple[list[int], list[int]]:
        """Record a fence. When all lanes have passed one: (chunks lost, chunks whose NACK the sender had not seen), else empty."""
        known = self._fences.setdefault(lane, _Fence())
        if header.chunk_seq > known.round:
            known.round, known.chunk_total, known.nack_seq = header.chunk_seq, header.chunk_total, header.slot
        if len(self._fences) < self.num_lanes:
            return [], []
        oldest = min(self._fences.values(), key=lambda fence: fence.round)
        if oldest.round <= self._last_round:
            return [], []
        self._last_round = oldest.round
        end = min(oldest.chunk_total, len(self.missing) * self.num_layers)
        holes = [seq for seq in self.received.missing_below(end) if seq not in self._writing]
        unseen = [seq for seq in holes if seq in self._failures and self._failures[seq].nack_seq > oldest.nack_seq]
        return [seq for seq in holes if seq not in set(unseen)], unseen

    def repeat_nack(self, seqs: Sequence[int]) -> None:
        """Number a NACK that repeats one which the sender had not acted upon: no new failure."""
        self.nack_seq += 1
        for seq in seqs:
            self._failures[seq].nack_seq = self.nack_seq

    def check_commit(self, commit: Commit) -> None:
        """TransferError when the sender's account of a fully covered transfer is not ours."""
        ours = (len(self.received), self.num_bytes, self.digest)
        theirs = (commit.chunk_total, commit.num_bytes, commit.digest)
        if ours != theirs:
            raise TransferError(f"the two ends count differently: (chunks, bytes, digest) {ours} here, {theirs} there")


def _mask(header: DataHeader) -> int:
    return ((1 << header.layer_count) - 1) << header.layer_start
