"""Control messages of KVX/1: JSON of strict frozen models behind a magic and a CRC, one frame each; COMMIT has a second frame.

Every message names the transfer (empty for messages about the connection itself), the attempt, both incarnations and the trace.
All of them may be repeated: the receiver of a repeated message answers it again and changes nothing.
"""

from __future__ import annotations

import struct
import zlib
from typing import Annotated, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shared.errors import ProtocolError
from shared.transport.protocol.device_memory_offer import DeviceMemoryOffer
from shared.transport.protocol.frames import ChecksumCode
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.limits import MAX_CONTROL_BYTES
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.protocol.seq_ranges import Ranges
from shared.transport.protocol.transport_name import TransportName
from shared.transport.protocol.wire_dtype import WireDtypeName

PROTOCOL_VERSION = 3
_PREFIX = struct.Struct("<4sI")
_MAGIC = b"KVXC"

U64 = Annotated[int, Field(ge=0, lt=1 << 64)]
U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
U16 = Annotated[int, Field(ge=0, lt=1 << 16)]
Reason = Annotated[str, Field(max_length=1000)]


class Address(TypedDict):
    """The fields of every message about one transfer."""

    transfer_id: str
    attempt: int
    src_incarnation: int
    dst_incarnation: int
    traceparent: str


class ControlMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    transfer_id: str = Field("", pattern=r"^([0-9a-f]{32})?$")
    attempt: U16 = 0
    src_incarnation: U64
    dst_incarnation: U64
    traceparent: str = Field("", max_length=64)


class Hello(ControlMessage):
    """Prefill -> decode, first message of a connection."""

    kind: Literal["HELLO"] = "HELLO"
    worker_id: str = Field(max_length=256)
    protocol_min: U16 = PROTOCOL_VERSION
    protocol_max: U16 = PROTOCOL_VERSION
    layout: KVLayout
    num_lanes: Annotated[int, Field(ge=1, le=16)]
    max_chunk_bytes: U32
    checksums: tuple[int, ...] = (ChecksumCode.XXH3_64.value,)
    transports: tuple[TransportName, ...] = Field(("tcp",), min_length=1, max_length=4)
    """What the prefill worker can use, the best first."""
    network: str = Field("", max_length=64)
    """See transport_name.network_identity."""
    segment: SegmentOffer | None = None
    device_memory: DeviceMemoryOffer | None = None
    wire_dtype: WireDtypeName = "auto"


class HelloAck(ControlMessage):
    """Decode -> prefill: compatible; this transport, these lanes, chunks of at most this size. `layout`: decode's (see wire_plan)."""

    kind: Literal["HELLO_ACK"] = "HELLO_ACK"
    layout: KVLayout
    lane_endpoints: tuple[Annotated[str, Field(max_length=512)], ...] = Field(min_length=1, max_length=16)
    max_chunk_bytes: U32
    transport: TransportName = "tcp"
    are_lanes_encrypted: bool = False


class Offer(ControlMessage):
    """Prefill -> decode: I shall compute these blocks; nothing is sent before GRANT."""

    kind: Literal["OFFER"] = "OFFER"
    num_prompt_tokens: U32
    block_hashes: str = Field(pattern=r"^([0-9a-f]{2})*$")
    """Hashes of the full blocks in chain order, hex, one after the other."""
    deadline_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Grant(ControlMessage):
    """Decode -> prefill: room is reserved; send the missing units (see wire_plan)."""

    kind: Literal["GRANT"] = "GRANT"
    grant_id: U64
    slot_gen: U32
    missing: Ranges
    credits: Annotated[int, Field(ge=1, le=1 << 16)]


class Deny(ControlMessage):
    """Decode -> prefill: no. `field` names what is incompatible; retry_ms > 0 when waiting helps."""

    kind: Literal["DENY"] = "DENY"
    reason: Reason
    field: str | None = None
    retry_ms: U32 = 0


class Credit(ControlMessage):
    """Decode -> prefill: all chunk numbers settled so far (cumulative)."""

    kind: Literal["CREDIT"] = "CREDIT"
    received: Ranges


class Nack(ControlMessage):
    """Decode -> prefill: these chunks came damaged or not at all; send them again."""

    kind: Literal["NACK"] = "NACK"
    nack_seq: U32
    chunks: Ranges


class Commit(ControlMessage):
    """Prefill -> decode: everything has been sent. Second frame: the last token's final hidden state, raw."""

    kind: Literal["COMMIT"] = "COMMIT"
    num_cached_tokens: U32
    """Prompt tokens that prefill did not compute either."""
    chunk_total: U32
    num_bytes: U64
    digest: U64
    """Sum of the chunks' checksums modulo 2^64."""
    hidden_nbytes: U32
    hidden_checksum: U64


class Committed(ControlMessage):
    """Decode -> prefill: complete and verified; the blocks may go."""

    kind: Literal["COMMITTED"] = "COMMITTED"


class Abort(ControlMessage):
    """Either way: the transfer has ended without success."""

    kind: Literal["ABORT"] = "ABORT"
    reason: Reason
    is_cancelled: bool = False
    """Nobody waits for the request any more: there is nothing to make good."""


class AbortAck(ControlMessage):
    """Answer to ABORT: nothing more will be sent, or written, for this transfer."""

    kind: Literal["ABORT_ACK"] = "ABORT_ACK"


class Renew(ControlMessage):
    """Either way: still alive. From prefill about a transfer; from decode that an offer still waits; empty id: the connection."""

    kind: Literal["RENEW"] = "RENEW"


class Drain(ControlMessage):
    """Decode -> prefill: what is granted will be finished, nothing new will be granted."""

    kind: Literal["DRAIN"] = "DRAIN"


class Bye(ControlMessage):
    """Either way: I am leaving now; everything between us has ended."""

    kind: Literal["BYE"] = "BYE"


AnyControl = Hello | HelloAck | Offer | Grant | Deny | Credit | Nack | Commit | Committed | Abort | AbortAck | Renew | Drain | Bye
_adapter: TypeAdapter[AnyControl] = TypeAdapter(Annotated[AnyControl, Field(discriminator="kind")])


def encode(message: ControlMessage) -> bytes:
    """Raises ProtocolError when the message is too large for the peer to take."""
    body = message.model_dump_json().encode()
    if len(body) + _PREFIX.size > MAX_CONTROL_BYTES:
        raise ProtocolError(f"a control message of {len(body)} bytes is over the limit of {MAX_CONTROL_BYTES}; shorten the prompt")
    return _PREFIX.pack(_MAGIC, zlib.crc32(body)) + body


class OtherVersionError(ProtocolError):
    """A HELLO of versions that are not ours: the peer can be told so."""

    def __init__(self, hello: _AnyHello) -> None:
        theirs = f"{hello.protocol_min} to {hello.protocol_max}"
        super().__init__(f"incompatible peer: protocol is {PROTOCOL_VERSION} here and {theirs} there")
        self.src_incarnation = hello.src_incarnation


class _AnyHello(BaseModel):
    """What stays the same in every version."""

    model_config = ConfigDict(extra="ignore", strict=True)
    kind: Literal["HELLO"]
    src_incarnation: U64
    protocol_min: U16
    protocol_max: U16


def _check_version(body: bytes) -> None:
    """Raises OtherVersionError where that is why a message was not understood."""
    try:
        hello = _AnyHello.model_validate_json(body)
    except ValidationError:
        return
    if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
        raise OtherVersionError(hello)


def decode(frame: bytes) -> AnyControl:
    """Raises ProtocolError on anything that is not a sound message of this version, OtherVersionError for a HELLO of another one."""
    if not _PREFIX.size <= len(frame) <= MAX_CONTROL_BYTES:
        raise ProtocolError(f"a control frame of {len(frame)} bytes is not within {_PREFIX.size}..{MAX_CONTROL_BYTES}")
    magic, crc = _PREFIX.unpack_from(frame)
    body = frame[_PREFIX.size :]
    if magic != _MAGIC or zlib.crc32(body) != crc:
        raise ProtocolError("a control frame is damaged or of another protocol")
    try:
        return _adapter.validate_json(body)
    except ValidationError as error:
        _check_version(body)
        first = error.errors()[0]
        raise ProtocolError(f"invalid control message: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
