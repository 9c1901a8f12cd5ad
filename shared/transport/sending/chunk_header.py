"""The headers of what a transfer sends."""

from __future__ import annotations

from shared.transport.protocol.frames import ChecksumCode, DataHeader, Flags, KVPart, MessageType
from shared.transport.protocol.trace_context import split_traceparent
from shared.transport.protocol.wire_plan import WirePlan
from shared.transport.sending.sender_transfer import Chunk, SenderTransfer


def chunk_header(
    transfer: SenderTransfer, plan: WirePlan, chunk: Chunk, seq: int, src_incarnation: int, dst_incarnation: int
) -> DataHeader:
    """Without its checksum, which the lane takes when it reads the bytes."""
    trace_id, span_id, trace_flags = split_traceparent(transfer.traceparent)
    return DataHeader(
        msg_type=MessageType.CHUNK,
        flags=Flags.NONE,
        transfer_id=bytes.fromhex(transfer.transfer_id),
        attempt=transfer.attempt,
        src_incarnation=src_incarnation,
        dst_incarnation=dst_incarnation,
        grant_id=transfer.grant_id,
        nack_seq=0,
        slot_gen=transfer.slot_gen,
        chunk_seq=seq,
        chunk_total=0,
        payload_nbytes=len(chunk.regions) * chunk.layer_count * plan.layer_nbytes(chunk.num_tokens),
        checksum_algo=ChecksumCode.NONE,
        checksum=0,
        hash_set_digest=transfer.hash_set_digest,
        layer_start=chunk.layer_start,
        layer_count=chunk.layer_count,
        block_index=chunk.unit_start,
        block_count=len(chunk.regions),
        block_tokens=chunk.num_tokens,
        kv_part=KVPart.KV,
        dtype=plan.codec.wire,
        scale=plan.codec.scale,
        layout=plan.src.layout,
        head_start=plan.head_start,
        head_count=plan.head_count,
        head_dim=plan.src.head_dim,
        src_tp_rank=plan.src.tp_rank,
        src_tp_size=plan.src.tp_size,
        trace_id=trace_id,
        span_id=span_id,
        trace_flags=trace_flags,
    )


def fence_header(transfer: SenderTransfer, plan: WirePlan, num_lanes: int, src_incarnation: int, dst_incarnation: int) -> DataHeader:
    """Of the transfer's current round, over `num_lanes` lanes."""
    trace_id, span_id, trace_flags = split_traceparent(transfer.traceparent)
    return DataHeader(
        msg_type=MessageType.FENCE,
        flags=Flags.NONE,
        transfer_id=bytes.fromhex(transfer.transfer_id),
        attempt=transfer.attempt,
        src_incarnation=src_incarnation,
        dst_incarnation=dst_incarnation,
        grant_id=transfer.grant_id,
        nack_seq=transfer.nack_seq,
        slot_gen=transfer.slot_gen,
        chunk_seq=transfer.fence_round,
        chunk_total=len(transfer.sent),
        payload_nbytes=0,
        checksum_algo=ChecksumCode.NONE,
        checksum=0,
        hash_set_digest=transfer.hash_set_digest,
        block_count=num_lanes,
        dtype=plan.codec.wire,
        layout=plan.src.layout,
        src_tp_rank=plan.src.tp_rank,
        src_tp_size=plan.src.tp_size,
        trace_id=trace_id,
        span_id=span_id,
        trace_flags=trace_flags,
    )
