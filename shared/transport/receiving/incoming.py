"""One reservation on the receiver: which blocks may be written, what of them has come, what is missing at a fence.

Data and small steps under the lock of ReceiverState; no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.errors import ProtocolError, TransferError
from shared.transport.protocol.control import Commit
from shared.transport.protocol.frames import DataHeader
from shared.transport.protocol.limits import MAX_CHUNK_DAMAGES, MAX_CHUNK_LOSSES
from shared.transport.protocol.seq_ranges import SeqSet
from shared.transport.protocol.wire_plan import WirePlan

_FENCES_KEPT = 8
"""Rounds of fences that may be open at a time; older ones have been overtaken."""


@dataclass(slots=True, eq=False)
class Incoming:
    """What the decode service expects: one transfer, from one prefill worker or from each rank of one."""

    transfer_id: str
    attempt: int
    block_ids: Sequence[int]
    """Block id by index in the chain, for all blocks of the prompt."""
    missing: frozenset[int]
    """Indices of blocks."""
    num_prompt_tokens: int
    deadline_s: float
    traceparent: str
    slot_gen: int
    expected_s: float
    block_hashes: bytes | None
    ranks: Sequence[int]
    """Those of the sender that have something for this worker."""
    src_tp_size: int
    is_prefix: bool = False
    """The sender may offer fewer blocks than are wanted, the first ones."""
    streams: dict[int, Stream] = field(default_factory=dict)
    """What was granted, by the sender's rank."""
    last_progress_s: float = 0.0
    num_writing: int = 0
    """Lanes copying into a block right now; the blocks may be freed only at 0."""
    has_ended: bool = False

    def shorten(self, num_prompt_tokens: int, num_blocks: int, block_hashes: bytes) -> bool:
        """Be content with what the sender of a prefix has; before it is granted. False: that is not the beginning of what is wanted."""
        ours = self.block_hashes or b""
        # Full blocks only, so that the hashes and the tokens of a prefix are the same share of the whole.
        if not ours.startswith(block_hashes) or len(block_hashes) * self.num_prompt_tokens != len(ours) * num_prompt_tokens:
            return False
        self.num_prompt_tokens, self.block_hashes = num_prompt_tokens, block_hashes
        self.missing = frozenset(index for index in self.missing if index < num_blocks)
        return True

    @property
    def is_granted(self) -> bool:
        return len(self.streams) == len(self.ranks)

    @property
    def last_granted_s(self) -> float:
        """When the last of its ranks was granted its part, or when it was first expected."""
        return max((stream.granted_s for stream in self.streams.values()), default=self.expected_s)

    @property
    def is_complete(self) -> bool:
        """Everything from every rank is here, verified and written, and each rank has said that this was all."""
        return self.is_granted and all(stream.commit is not None and stream.is_covered for stream in self.streams.values())


@dataclass(slots=True)
class _Fence:
    chunk_total: int
    nack_seq: int
    lanes: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Failure:
    num_damaged: int = 0
    num_lost: int = 0
    nack_seq: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """The grant to one prefill worker, of its part of the heads."""

    incoming: Incoming
    peer: str
    src_incarnation: int
    plan: WirePlan
    grant_id: int
    hash_set_digest: int
    granted_s: float
    missing: frozenset[int]
    """Units."""
    device: object = None
    """The sender's GPU memory, if it was opened."""
    first_chunk_s: float | None = None
    last_chunk_s: float | None = None
    num_bytes: int = 0
    num_failed: int = 0
    digest: int = 0
    num_uncredited: int = 0
    commit: Commit | None = None
    hidden_state: bytes = b""
    nack_seq: int = 0
    received: SeqSet = field(default_factory=SeqSet)
    _writing: set[int] = field(default_factory=set)
    _claimed: dict[int, int] = field(default_factory=dict)
    """Unit -> bit mask of layers that are written or being written."""
    _num_layers_left: int = 0
    _fences: dict[int, _Fence] = field(default_factory=dict)
    """By round."""
    _failures: dict[int, _Failure] = field(default_factory=dict)
    _last_round: int = 0

    def __post_init__(self) -> None:
        self._num_layers_left = self._max_chunks

    @property
    def _max_chunks(self) -> int:
        return len(self.missing) * self.plan.dst.num_layers

    @property
    def is_covered(self) -> bool:
        """Every layer of every missing unit has been verified and written."""
        return self._num_layers_left == 0

    def has(self, seq: int) -> bool:
        return seq in self.received or seq in self._writing

    def claim(self, header: DataHeader) -> None:
        """Reserve the chunk's bytes for one lane. ProtocolError when they are not asked for, or another chunk's."""
        units = _units(header)
        if not self.missing.issuperset(units):
            raise ProtocolError(f"units {units.start} to {units.stop} are not all among the missing ones of this grant")
        if any(header.block_tokens != self.plan.tokens_of(unit, self.incoming.num_prompt_tokens) for unit in units):
            raise ProtocolError(f"a chunk of {header.block_tokens} tokens a unit does not fit units {units.start} to {units.stop}")
        if header.chunk_seq >= self._max_chunks:
            raise ProtocolError(f"chunk number {header.chunk_seq} is beyond what this grant can need")
        mask = _mask(header)
        if any(self._claimed.get(unit, 0) & mask for unit in units):
            raise ProtocolError(f"two chunks cover the same layers of units {units.start} to {units.stop}")
        for unit in units:
            self._claimed[unit] = self._claimed.get(unit, 0) | mask
        self._writing.add(header.chunk_seq)
        self.incoming.num_writing += 1

    def settle(self, header: DataHeader, is_sound: bool, now: float) -> None:
        """The lane has finished with the chunk it claimed."""
        self.incoming.num_writing -= 1
        self._writing.discard(header.chunk_seq)
        if not is_sound:
            for unit in _units(header):
                self._claimed[unit] &= ~_mask(header)
            return
        self.received.add(header.chunk_seq)
        self._num_layers_left -= header.block_count * header.layer_count
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
        """Record a fence. When all lanes it goes over have passed it: (chunks lost, chunks whose NACK the sender had not seen)."""
        if header.chunk_seq <= self._last_round:
            return [], []
        fence = self._fences.setdefault(header.chunk_seq, _Fence(header.chunk_total, header.nack_seq))
        fence.lanes.add(lane)
        if len(self._fences) > _FENCES_KEPT:
            del self._fences[min(self._fences)]
        if len(fence.lanes) < header.block_count:
            return [], []
        self._last_round = header.chunk_seq
        self._fences = {number: other for number, other in self._fences.items() if number > self._last_round}
        holes = [seq for seq in self.received.missing_below(min(fence.chunk_total, self._max_chunks)) if seq not in self._writing]
        unseen = {seq for seq in holes if seq in self._failures and self._failures[seq].nack_seq > fence.nack_seq}
        return [seq for seq in holes if seq not in unseen], sorted(unseen)

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
        if commit.num_cached_tokens > self.incoming.num_prompt_tokens:
            num_tokens = self.incoming.num_prompt_tokens
            raise TransferError(f"the prefill worker had {commit.num_cached_tokens} tokens cached of a prompt of {num_tokens}")


def _units(header: DataHeader) -> range:
    return range(header.block_index, header.block_index + header.block_count)


def _mask(header: DataHeader) -> int:
    return ((1 << header.layer_count) - 1) << header.layer_start
