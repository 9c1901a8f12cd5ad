"""Ports of the KV transfer: what the engine lends (memory), what it is told (events), what carries the messages (wires)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.transport.protocol.control import ControlMessage
from shared.transport.protocol.device_memory_offer import DeviceMemoryOffer
from shared.transport.protocol.frames import DataHeader, KVDtype
from shared.transport.protocol.region import Region
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.protocol.transport_name import TransportName
from shared.transport.protocol.wire_dtype import WireCodec


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """What a memory gave to be sent; it stays as it is for as long as `view` is referenced, or until its blocks are given back."""

    view: memoryview
    """The bytes of the regions, one after the other, each [layer][K|V][head][token][head_dim]."""
    segment_offset: int | None = None
    """Where they stand in the memory's segment, if they do."""
    checksum: int | None = None
    """The chunk's (see frames.chunk_checksum), of the bytes as they stood in the blocks, where the memory has formed it: then nobody else
    need to."""


Landed = int | None
"""What a memory says of bytes that it was given: the chunk's checksum, formed of what is in the blocks now, or nothing."""


@dataclass(frozen=True, slots=True)
class LocatedBytes:
    """Bytes where they stand: a place in GPU memory for each region, and the checksum of the chunk that they make up."""

    offsets: tuple[int, ...]
    checksum: int


class GpuMemory(Protocol):
    """Blocks in a GPU's memory, for copies from GPU to GPU. Regions are whole layers of blocks."""

    @property
    def offer(self) -> DeviceMemoryOffer: ...

    def open(self, offer: DeviceMemoryOffer) -> tuple[object, float]:
        """Another worker's, to be given to write_from, and how many bytes a second a copy out of it makes. Raises TransferError where it
        cannot be reached from here. Closed when nobody refers to it."""
        ...

    def locate(self, regions: Sequence[Region]) -> LocatedBytes:
        """The bytes are not touched."""
        ...

    def write_from(self, peer: object, offsets: Sequence[int], regions: Sequence[Region]) -> int:
        """Copy the bytes of region i from offsets[i] of `peer`; the checksum of what landed. Raises TransferError when they are not within
        it."""
        ...


class BlockMemory(Protocol):
    """The KV cache of one worker as the transfer sees it. Called on the threads of the lanes, several at a time."""

    preferred_chunk_bytes: int
    """Blocks are put together into chunks of up to this size; 0: each goes by itself."""
    preferred_notice_bytes: int
    """The same where chunks are not sent, but notices of where they stand."""
    max_chunks_held: int
    """What was read may be referenced for this many chunks at a time, or `read` waits; 0: for any number."""

    @property
    def gpu(self) -> GpuMemory | None:
        """The same blocks, if they are in a GPU's memory that others of the host can open."""
        ...

    @property
    def segment(self) -> SegmentOffer | None:
        """Memory of this process that others of the host may read, if there is any."""
        ...

    def checksum(self, data: memoryview) -> int:
        """As `frames.checksum`, of any memory, contiguous."""
        ...

    def read(self, regions: Sequence[Region]) -> StoredBytes:
        """May block while the bytes are on their way."""
        ...

    def read_apart(self, regions: Sequence[Region]) -> list[StoredBytes] | None:
        """Each region where it stands in the segment. None where that is not possible, or not better than `read`."""
        ...

    def write(self, regions: Sequence[Region], data: memoryview) -> Landed:
        """On return the bytes have landed."""
        ...

    def adopt(self, segment: memoryview) -> None:
        """`write` will be called with parts of this, which another process wrote. It may vanish when nobody refers to it."""
        ...


class SenderEvents(Protocol):
    """Told on the transport's thread; must not block. Exactly one of on_committed and on_failed ends each offered transfer.

    Until then the blocks handed to send_blocks stay owned by the transfer, also after abort().
    """

    def on_granted(self, transfer_id: str) -> None: ...

    def on_committed(self, transfer_id: str) -> None: ...

    def on_failed(self, transfer_id: str, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """What a completed transfer was. Times are Clock.now_s() of the receiver; chunk times are None when nothing was missing."""

    transport: TransportName
    src_dtype: KVDtype
    """The number format of the sender's KV, and but for FP8 of its hidden state."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that prefill had cached."""
    num_blocks_missing: int
    num_bytes: int
    num_chunks: int
    num_chunks_failed: int
    """Chunks that had to be sent again."""
    expected_s: float
    granted_s: float
    first_chunk_s: float | None
    last_chunk_s: float | None
    committed_s: float

    @property
    def wire_s(self) -> float:
        """Seconds from the first chunk to the last."""
        return (self.last_chunk_s or 0.0) - (self.first_chunk_s or 0.0)


class ReceiverEvents(Protocol):
    """Told on the transport's thread; must not block. Exactly one of the two ends each expected transfer, unless abort() did.

    When either is called, nothing writes into the transfer's blocks any more. `is_cancelled`: the sender knows that nobody waits for it.
    """

    def on_committed(self, transfer_id: str, hidden_state: bytes, info: CommitInfo) -> None: ...

    def on_failed(self, transfer_id: str, reason: str, is_cancelled: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class DataMessage:
    """What a lane is to send: a header, and where the bytes are. Its checksum is taken when they are read, unless it is known already."""

    header: DataHeader
    regions: tuple[Region, ...] = ()
    codec: WireCodec | None = None
    transport: TransportName = "tcp"
    """shm, cuda: where the receiver can reach the bytes by itself, it is told where they are instead of sent them."""
    unit_tokens: int = 0
    """Of a whole unit: fewer are not in one piece."""


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A lane has done with a chunk: nothing of it will be read again for this message."""

    header: DataHeader
    stored: StoredBytes | None = None
    """None: it was not read."""
    failure: str = ""
    """Why it could not be, or was not tried."""


class ReceiverWire(Protocol):
    """How the receiver's state machine speaks. Must not block; may be called with the state's lock held."""

    def send_control(self, peer: str, message: ControlMessage, blob: bytes = b"") -> None: ...


class SenderWire(ReceiverWire, Protocol):
    """How the sender's state machine speaks. Must not block. `peer` is a connection's key."""

    def open_peer(self, peer: str, ctrl_endpoint: str, server_key: str) -> None:
        """`server_key`: the public CURVE key of whoever must answer."""
        ...

    def open_lanes(self, peer: str, endpoints: tuple[str, ...], probes: Sequence[DataMessage], are_encrypted: bool) -> None:
        """`probes` go over each lane first, by which the receiver measures it."""
        ...

    def close_peer(self, peer: str) -> None: ...

    def send_data(self, peer: str, lane: int, message: DataMessage) -> None:
        """A CHUNK is answered by exactly one SenderState.on_chunk_read, also when the lane is closed before its turn."""
        ...

    def drop_data(self, peer: str, *, lane: int | None = None, transfer_id: str | None = None) -> None:
        """Of what was given to send_data, that which no lane has begun to read is not sent: on `lane`, of `transfer_id`, or all of it."""
        ...


FrameTap = Callable[[DataHeader, memoryview], memoryview | None]
"""Fault hook for tests, called with each data message on its way to the socket: returns the payload to send, None to lose the
message, or raises to fail the transfer."""
