"""How fast a wire is, measured when it is opened."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from shared.transport.connector import DataMessage
from shared.transport.protocol.frames import ChecksumCode, DataHeader, Flags, MessageType
from shared.transport.protocol.wire_plan import WirePlan
from shared.transport.wires.shared_segment import SegmentReader

PROBE_BYTES = 8 << 20
"""Sent over each lane: a few milliseconds."""


def probe_segment(segment: SegmentReader) -> float:
    """Bytes a second of a copy out of it; the second of two, so that its pages are there."""
    size_bytes = min(PROBE_BYTES // 4, segment.size_bytes)  # the receiver does nothing else meanwhile
    source, target = np.frombuffer(segment.read(0, size_bytes), np.uint8), np.empty(size_bytes, np.uint8)
    np.copyto(target, source)
    start_s = time.perf_counter()
    np.copyto(target, source)
    return size_bytes / max(1e-9, time.perf_counter() - start_s)


def probe_messages(plan: WirePlan, max_chunk_bytes: int, src_incarnation: int, dst_incarnation: int) -> list[DataMessage]:
    """They carry block 0 again and again, PROBE_BYTES in all, but at least two of them and at most sixteen."""
    layout = plan.src
    layer_count = plan.layers_per_chunk(max_chunk_bytes)
    region = plan.source_region(0, 0, plan.unit_tokens, 0, layer_count)
    payload_nbytes = layer_count * plan.layer_nbytes(plan.unit_tokens)
    num_probes = max(2, min(16, PROBE_BYTES // payload_nbytes))
    return [
        DataMessage(
            DataHeader(
                msg_type=MessageType.PROBE,
                flags=Flags.LAST if number == num_probes - 1 else Flags.NONE,
                transfer_id=bytes(16),
                attempt=0,
                src_incarnation=src_incarnation,
                dst_incarnation=dst_incarnation,
                grant_id=0,
                nack_seq=0,
                slot_gen=0,
                chunk_seq=number,
                chunk_total=num_probes,
                payload_nbytes=payload_nbytes,
                checksum_algo=ChecksumCode.NONE,
                checksum=0,
                hash_set_digest=0,
                layer_count=layer_count,
                block_count=1,
                block_tokens=plan.unit_tokens,
                dtype=plan.codec.wire,
                scale=plan.codec.scale,
                layout=layout.layout,
                head_start=plan.head_start,
                head_count=plan.head_count,
                head_dim=layout.head_dim,
                src_tp_rank=layout.tp_rank,
                src_tp_size=layout.tp_size,
            ),
            (region,),
            plan.codec,
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
