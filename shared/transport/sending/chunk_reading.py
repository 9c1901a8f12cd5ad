"""From where a chunk is to what travels: read, encode, take the checksum."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

from shared.transport.connector import BlockMemory, ChunkRead, DataMessage, StoredBytes
from shared.transport.protocol.frames import ChecksumCode, DataHeader, Flags, MessageType, checksum, chunk_checksum, join_checksums


def read_message(memory: BlockMemory, message: DataMessage) -> tuple[DataHeader, memoryview, ChunkRead]:
    """(header, payload, report). The payload is empty where a notice is enough. Blocks until the bytes are there."""
    header = message.header
    if message.codec is None:
        return header, memoryview(b""), ChunkRead(header)
    if message.transport == "cuda" and memory.gpu is not None and header.block_tokens == message.unit_tokens:
        located = memory.gpu.locate(message.regions)
        if header.checksum_algo is ChecksumCode.NONE:
            header = replace(header, checksum_algo=ChecksumCode.XXH3_64, checksum=located.checksum)
        header = replace(header, flags=header.flags | Flags.DEVICE_MEMORY)
        return _notice(header, located.offsets)
    if message.transport == "shm" and len(message.regions) > 1 and message.codec.is_plain:
        apart = memory.read_apart(message.regions)
        if apart is not None:
            return _scattered(memory, header, apart)
    stored = memory.read(message.regions)
    payload = message.codec.encode(stored.view, 2 * header.layer_count * header.block_count)
    if header.checksum_algo is ChecksumCode.NONE and header.msg_type is MessageType.CHUNK:
        digest = stored.checksum if payload is stored.view else None
        if digest is None:
            digest = chunk_checksum(payload, header.block_count, memory.checksum)
        header = replace(header, checksum_algo=ChecksumCode.XXH3_64, checksum=digest)
    if message.transport == "shm" and stored.segment_offset is not None and payload is stored.view:
        header = replace(header, flags=header.flags | Flags.SHARED_MEMORY, segment_offset=stored.segment_offset)
        return header, memoryview(b""), ChunkRead(header, stored)
    return header, payload, ChunkRead(header, stored)


def _scattered(memory: BlockMemory, header: DataHeader, apart: Sequence[StoredBytes]) -> tuple[DataHeader, memoryview, ChunkRead]:
    if header.checksum_algo is ChecksumCode.NONE:
        digest = join_checksums([memory.checksum(stored.view) for stored in apart])
        header = replace(header, checksum_algo=ChecksumCode.XXH3_64, checksum=digest)
    header = replace(header, flags=header.flags | Flags.SHARED_MEMORY | Flags.SCATTERED)
    return _notice(header, [stored.segment_offset or 0 for stored in apart])


def _notice(header: DataHeader, offsets: Sequence[int]) -> tuple[DataHeader, memoryview, ChunkRead]:
    places = memoryview(struct.pack(f"<{len(offsets)}Q", *offsets))
    return replace(header, segment_offset=checksum(places)), places, ChunkRead(header, StoredBytes(places))
