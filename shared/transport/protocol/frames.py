"""The fixed header of a KVX/1 data message: 192 bytes, little-endian, followed by one contiguous payload frame.

A CHUNK carries a range of layers and of KV heads of consecutive units (see wire_plan) of one prompt: [unit][layer][K|V][head][token][dim],
then the scales where there are any. A FENCE (no payload) travels behind the chunks of a lane and tells the receiver that everything before
it has been put on the wire, so that what is missing then is lost, not late. FENCE fields: chunk_seq = round, chunk_total = chunks sent so
far, nack_seq = number of the last NACK acted upon, block_count = number of lanes this round goes over.

A PROBE belongs to no transfer: its bytes are timed and dropped. A CHUNK with the flag SHARED_MEMORY is a notice: its payload frame is
empty, and its bytes stand in the sender's segment, from `segment_offset` on. Where its units stand apart (flag SCATTERED), and always in a
GPU's memory (flag DEVICE_MEMORY), the payload frame says where each does: an offset of eight bytes, little-endian; and `segment_offset` is
that frame's checksum.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from operator import attrgetter

import xxhash

from shared.errors import ProtocolError

MAGIC = b"KVX1"
VERSION = 2
HEADER_NBYTES = 192
MAX_NOTICE_BYTES = 16 << 20
"""A chunk that stands in shared memory may be larger than one that is a message: only its notice travels."""
MAX_UNITS_PER_CHUNK = 1024
MAX_DEVICE_NOTICE_BYTES = 64 << 20
"""As above, in the memory of the sender's GPU."""
_CRC_OFFSET = HEADER_NBYTES - 4
_RESERVED = bytes(36)
_STRUCT = struct.Struct("<4sHHBB16sHQQQIIIIQBQQHHIHHBBBBHHHHHQ16s8sB36sI")
assert _STRUCT.size == HEADER_NBYTES


class MessageType(IntEnum):
    CHUNK = 1
    FENCE = 2
    PROBE = 3


class Flags(IntFlag):
    NONE = 0
    LAST = 1
    RETRY = 2
    SHARED_MEMORY = 4
    DEVICE_MEMORY = 8
    SCATTERED = 16


class KVDtype(IntEnum):
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT8_E4M3 = 4
    FLOAT8_E5M2 = 5

    @property
    def itemsize(self) -> int:
        return {KVDtype.FLOAT32: 4, KVDtype.FLOAT16: 2, KVDtype.BFLOAT16: 2}.get(self, 1)


class ScaleCode(IntEnum):
    NONE = 0
    PER_UNIT_LAYER_KV = 1
    """One fp32 factor for K and one for V of each layer of each unit, behind the data, in its order."""


class LayoutCode(IntEnum):
    LAYER_BLOCK_KV_HEAD_TOKEN_DIM = 1
    """[layer][block][K|V][kv_head][token][head_dim]"""


class KVPart(IntEnum):
    K = 1
    V = 2
    KV = 3

    @property
    def count(self) -> int:
        return 2 if self is KVPart.KV else 1


class ChecksumCode(IntEnum):
    NONE = 0
    XXH3_64 = 1
    """See chunk_checksum."""


def checksum(payload: bytes | memoryview) -> int:
    """xxh3_64."""
    return xxhash.xxh3_64_intdigest(payload)


def chunk_checksum(payload: memoryview, num_parts: int, checksum: Callable[[memoryview], int] = checksum) -> int:
    """Of a chunk of `num_parts` units: the xxh3_64 of one, or of the xxh3_64s of several (eight bytes each, little-endian), their bytes
    being equal parts of the payload. That of all bytes in a row would be one long chain, which a GPU computes slowly. `checksum`: of one
    part."""
    if num_parts == 1:
        return checksum(payload)
    part_nbytes = len(payload) // num_parts
    return join_checksums([checksum(payload[index * part_nbytes : (index + 1) * part_nbytes]) for index in range(num_parts)])


def join_checksums(checksums: Sequence[int]) -> int:
    """That of a chunk from those of its units."""
    return checksums[0] if len(checksums) == 1 else checksum(struct.pack(f"<{len(checksums)}Q", *checksums))


@dataclass(frozen=True, slots=True)
class DataHeader:
    """Field order is wire order. Integers are unsigned; `transfer_id` is 16 raw bytes."""

    msg_type: MessageType
    flags: Flags
    transfer_id: bytes
    attempt: int
    src_incarnation: int
    dst_incarnation: int
    grant_id: int
    nack_seq: int
    slot_gen: int
    chunk_seq: int
    chunk_total: int
    """0 = not known yet."""
    payload_nbytes: int
    checksum_algo: ChecksumCode
    checksum: int
    hash_set_digest: int
    """xxh3_64 of the offered block hashes, one after the other."""
    layer_start: int = 0
    layer_count: int = 0
    block_index: int = 0
    """Index of the first unit in the chain of the prompt, never a block id."""
    block_count: int = 0
    block_tokens: int = 0
    """Tokens of each unit: those that mean something, so fewer in the prompt's last one."""
    kv_part: KVPart = KVPart.KV
    dtype: KVDtype = KVDtype.FLOAT32
    scale: ScaleCode = ScaleCode.NONE
    layout: LayoutCode = LayoutCode.LAYER_BLOCK_KV_HEAD_TOKEN_DIM
    head_start: int = 0
    head_count: int = 0
    head_dim: int = 0
    src_tp_rank: int = 0
    src_tp_size: int = 1
    segment_offset: int = 0
    trace_id: bytes = bytes(16)
    span_id: bytes = bytes(8)
    trace_flags: int = 0

    @property
    def has_places(self) -> bool:
        """The payload frame says where the units stand."""
        return bool((Flags.DEVICE_MEMORY | Flags.SCATTERED) & self.flags)

    @property
    def frame_nbytes(self) -> int:
        """Of the payload frame."""
        if self.has_places:
            return 8 * self.block_count
        return 0 if Flags.SHARED_MEMORY in self.flags else self.payload_nbytes

    @property
    def shape_nbytes(self) -> int:
        """Bytes that the shape fields describe."""
        parts = self.layer_count * self.block_count * self.kv_part.count
        scale_nbytes = 4 if self.scale is ScaleCode.PER_UNIT_LAYER_KV else 0
        return parts * (self.head_count * self.block_tokens * self.head_dim * self.dtype.itemsize + scale_nbytes)

    def pack(self) -> bytes:
        body = _STRUCT.pack(MAGIC, VERSION, HEADER_NBYTES, *_in_wire_order(self), _RESERVED, 0)[:_CRC_OFFSET]
        return body + struct.pack("<I", zlib.crc32(body))

    @classmethod
    def unpack(cls, frame: bytes | memoryview, max_chunk_bytes: int) -> DataHeader:
        """Raises ProtocolError for anything but a sound header whose payload size equals its shape and fits a chunk."""
        if len(frame) != HEADER_NBYTES:
            raise ProtocolError(f"data header has {len(frame)} bytes instead of {HEADER_NBYTES}")
        magic, version, header_nbytes, *values, reserved, crc = _STRUCT.unpack(frame)
        if magic != MAGIC or version != VERSION or header_nbytes != HEADER_NBYTES:
            raise ProtocolError(f"data header of another protocol: {magic!r} version {version}; this is KVX/{VERSION}")
        if zlib.crc32(frame[:_CRC_OFFSET]) != crc:
            raise ProtocolError("data header is damaged: its CRC does not match")
        if reserved != _RESERVED:
            raise ProtocolError("data header: reserved bytes are not zero; the peer speaks another version")
        named = dict(zip(_FIELD_NAMES, values, strict=True))
        for field, kind in _CODES.items():
            try:
                named[field] = kind(named[field])
            except ValueError:
                raise ProtocolError(f"data header: {field} {named[field]} is not of KVX/1; the peer speaks another version") from None
        if named["flags"] & ~0x1F:
            raise ProtocolError(f"data header: flags {named['flags']:#x} are not of KVX/1; the peer speaks another version")
        named["flags"] = Flags(named["flags"])
        header = cls(**named)
        header.check(max_chunk_bytes)
        return header

    def check(self, max_chunk_bytes: int) -> None:
        """Raises ProtocolError when sizes contradict each other."""
        if self.payload_nbytes != self.shape_nbytes:
            raise ProtocolError(f"data header: payload of {self.payload_nbytes} bytes, but its shape needs {self.shape_nbytes}")
        is_shared, is_on_device = Flags.SHARED_MEMORY in self.flags, Flags.DEVICE_MEMORY in self.flags
        limit = max(max_chunk_bytes, MAX_NOTICE_BYTES if is_shared else MAX_DEVICE_NOTICE_BYTES if is_on_device else 0)
        if self.payload_nbytes > limit:
            raise ProtocolError(f"data header: payload of {self.payload_nbytes} bytes is over the agreed {limit}")
        if self.block_count > MAX_UNITS_PER_CHUNK:
            raise ProtocolError(f"data header: {self.block_count} units in one message are over the limit of {MAX_UNITS_PER_CHUNK}")
        if (self.payload_nbytes == 0) != (self.msg_type is MessageType.FENCE):
            raise ProtocolError("data header: a chunk has a payload and a fence has none")
        if (is_shared or is_on_device) and (self.msg_type is not MessageType.CHUNK or (is_shared and is_on_device)):
            raise ProtocolError("data header: only a chunk can stand in the sender's memory, and in one kind of it")
        if Flags.SCATTERED in self.flags and not is_shared:
            raise ProtocolError("data header: only in shared memory can units stand apart")


_FIELD_NAMES = tuple(field.name for field in fields(DataHeader))
_in_wire_order = attrgetter(*_FIELD_NAMES)
_CODES: dict[str, type[IntEnum]] = {
    "msg_type": MessageType,
    "checksum_algo": ChecksumCode,
    "kv_part": KVPart,
    "dtype": KVDtype,
    "scale": ScaleCode,
    "layout": LayoutCode,
}
