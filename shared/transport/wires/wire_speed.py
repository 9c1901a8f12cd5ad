"""How fast a wire is, measured when it is opened."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from shared.transport.protocol.frames import ChecksumCode, DataHeader, Flags, MessageType
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.wires.shared_segment import SegmentReader

PROBE_BYTES = 8 << 20
"""Sent over each lane: a few milliseconds."""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    # numpy rather than a slice assignment: it lets go of the interpreter lock while it copies.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def probe_segment(segment: SegmentReader) -> float:
    """Bytes a second of a copy out of it; the second of two, so that its pages are there."""
    size_bytes = min(PROBE_BYTES // 4, segment.size_bytes)  # the receiver does nothing else meanwhile
    source, target = segment.read(0, size_bytes), memoryview(bytearray(size_bytes))
    copy_bytes(target, source)
    start_s = time.perf_counter()
    copy_bytes(target, source)
    return size_bytes / max(1e-9, time.perf_counter() - start_s)


def probe_headers(layout: KVLayout, layer_count: int, src_incarnation: int, dst_incarnation: int) -> list[DataHeader]:
    """Of messages that each carry `layer_count` layers of a block, PROBE_BYTES in all, but at least two and at most sixteen."""
    payload_nbytes = layer_count * layout.layer_nbytes
    num_probes = max(2, min(16, PROBE_BYTES // payload_nbytes))
    return [
        DataHeader(
            msg_type=MessageType.PROBE,
            flags=Flags.LAST if number == num_probes - 1 else Flags.NONE,
            transfer_id=bytes(16),
            attempt=0,
            src_incarnation=src_incarnation,
            dst_incarnation=dst_incarnation,
            grant_id=0,
            slot=0,
            slot_gen=0,
            chunk_seq=number,
            chunk_total=num_probes,
            payload_nbytes=payload_nbytes,
            checksum_algo=ChecksumCode.NONE,
            checksum=0,
            hash_set_digest=0,
            layer_count=layer_count,
            block_count=1,
            block_tokens=layout.block_size,
            dtype=layout.dtype,
            layout=layout.layout,
            head_count=layout.num_kv_heads,
            head_dim=layout.head_dim,
        )
        for number in range(num_probes)
    ]


@dataclass(slots=True)
class Probe:
    """The PROBE messages of one lane as they arrive. The first starts the clock, so its bytes do not count."""

    first_s: float | None = None
    last_s: float = 0.0
    num_bytes: int = 0
    is_complete: bool = False

    def take(self, size_bytes: int, now_s: float, *, is_last: bool) -> None:
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.num_bytes += size_bytes
        self.last_s = now_s
        self.is_complete = is_last

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / max(1e-9, self.last_s - (self.first_s or 0.0))
