"""The sending half of KVX/1 as a state machine: commands, control messages and ticks in, wire calls and events out.

No sockets and no threads: KVSender drives it over ZeroMQ, the in-memory twin drives it in simulations. Not thread-safe.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shared.clock import Clock
from shared.config import Settings
from shared.errors import PagewireError
from shared.messages import KVPeer
from shared.transport.connector import BlockMemory, SenderEvents, SenderWire
from shared.transport.protocol import control
from shared.transport.protocol.frames import ChecksumCode, DataHeader, Flags, KVPart, MessageType, checksum
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.limits import DEAD_WIRE_S, HEARTBEAT_S, HELLO_RETRY_S, HELLO_TIMEOUT_S, LATE_TICK_S, RENEW_S, STALL_S
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.protocol.seq_ranges import from_ranges
from shared.transport.protocol.trace_context import split_traceparent
from shared.transport.protocol.transport_name import TransportName, allowed
from shared.transport.sending.sender_transfer import Chunk, CommitRequest, Phase, SenderTransfer
from shared.transport.wires.wire_speed import probe_headers

logger = logging.getLogger(__name__)
COUNTERS = (
    "bytes_sent",
    "bytes_deduped",
    "chunks_sent",
    "chunks_resent",
    "control_ignored",
    "fences_sent",
    "transfers_offered",
    "transfers_committed",
    "transfers_failed",
)


@dataclass(slots=True)
class _Connection:
    """One decode worker, by address and incarnation."""

    key: str
    incarnation: int
    opened_s: float
    last_hello_s: float
    last_heard_s: float
    last_heartbeat_s: float = 0.0
    is_ready: bool = False
    is_draining: bool = False
    num_lanes: int = 0
    lane_load: list[int] = field(default_factory=list)
    """Chunks in flight per lane."""
    layer_ranges: list[tuple[int, int]] = field(default_factory=list)
    max_chunk_bytes: int = 0
    transport: TransportName = "tcp"


class SenderState:
    def __init__(
        self,
        *,
        layout: KVLayout,
        memory: BlockMemory,
        incarnation: int,
        events: SenderEvents,
        clock: Clock,
        settings: Settings,
        worker_id: str,
        wire: SenderWire,
        segment: SegmentOffer | None = None,
        network: str = "",
    ) -> None:
        """Raises ConfigurationError when one layer of a block does not fit a chunk.

        `segment`: where others find `memory`, block after block; `network`: see transport_name.network_identity.
        """
        layout.layer_ranges(settings.kv_max_chunk_bytes)
        self._layout = layout
        self._memory = memory
        self._incarnation = incarnation
        self._events = events
        self._clock = clock
        self._settings = settings
        self._worker_id = worker_id
        self._wire = wire
        self._segment = segment
        self._network = network
        self._last_tick_s = 0.0
        self._connections: dict[str, _Connection] = {}
        self._transfers: dict[str, SenderTransfer] = {}
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._handlers: dict[type[control.ControlMessage], Callable[[SenderTransfer, control.AnyControl], None]] = {
            control.Grant: self._on_grant,
            control.Credit: self._on_credit,
            control.Nack: self._on_nack,
            control.Committed: self._on_committed,
            control.Deny: self._on_deny,
            control.Abort: self._on_abort,
        }

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    # Commands of the prefill service

    def offer(
        self,
        transfer_id: str,
        attempt: int,
        peer: KVPeer,
        num_prompt_tokens: int,
        block_hashes: Sequence[bytes],
        deadline_s: float,
        traceparent: str,
    ) -> None:
        """Ask `peer` for room. `deadline_s`: seconds from now. Chunks leave only after its GRANT."""
        if transfer_id in self._transfers:
            self._counters["control_ignored"] += 1
            return
        now = self._clock.now_s()
        connection = self._connect(peer, now)
        hashes = b"".join(block_hashes)
        self._transfers[transfer_id] = transfer = SenderTransfer(
            transfer_id=transfer_id,
            attempt=attempt,
            peer=connection.key,
            num_prompt_tokens=num_prompt_tokens,
            num_blocks=self._layout.num_blocks(num_prompt_tokens),
            block_hashes=hashes,
            hash_set_digest=checksum(hashes),
            traceparent=traceparent,
            deadline_s=now + deadline_s,
            started_s=now,
        )
        self._counters["transfers_offered"] += 1
        if connection.is_draining:
            self._end(transfer, "the decode worker is draining")
        elif connection.is_ready:
            self._send_offer(transfer)

    def send_blocks(self, transfer_id: str, blocks: Sequence[tuple[int, int]], layers: tuple[int, int] | None = None) -> None:
        """Queue (block_index, block_id) pairs whose KV is complete; those the receiver has already are skipped."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return
        for block_index, block_id in blocks:
            if block_index in transfer.queued or not 0 <= block_index < transfer.num_blocks:
                continue
            if layers is not None and sum(layers) < self._layout.num_layers:
                if transfer.phase is not Phase.OFFERED:  # else they go with the last group, at the latest
                    transfer.num_layers_queued[block_index] = sum(layers)
                    self._enqueue(transfer, block_index, block_id, *layers)
                continue
            transfer.queued[block_index] = block_id
            if transfer.phase is not Phase.OFFERED:
                start = transfer.num_layers_queued.pop(block_index, 0)
                self._enqueue(transfer, block_index, block_id, start, self._layout.num_layers - start)
        self._pump(transfer)

    def commit(self, transfer_id: str, hidden_state: bytes, num_cached_tokens: int) -> None:
        """Finish after all queued blocks; every block the receiver misses must have been queued."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.commit_request is not None:
            return
        transfer.commit_request = CommitRequest(hidden_state, num_cached_tokens)
        self._pump(transfer)

    def abort(self, transfer_id: str, reason: str) -> None:
        """End a transfer; on_failed follows."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            self._fail(transfer, reason)

    def close(self, reason: str = "the prefill worker is shutting down") -> None:
        """Abort everything and say goodbye."""
        for transfer in list(self._transfers.values()):
            self._fail(transfer, reason)
        for connection in list(self._connections.values()):
            self._wire.send_control(connection.key, control.Bye(src_incarnation=self._incarnation, dst_incarnation=connection.incarnation))

    # What the wire reports

    def on_control(self, peer: str, message: control.AnyControl) -> None:
        connection = self._connections.get(peer)
        if connection is None or message.dst_incarnation != self._incarnation:
            self._counters["control_ignored"] += 1
            return
        if message.src_incarnation != connection.incarnation:
            self.on_peer_lost(peer, f"the decode worker restarted: incarnation {message.src_incarnation:x}, not {connection.incarnation:x}")
            return
        connection.last_heard_s = self._clock.now_s()
        if not message.transfer_id:
            self._on_connection_message(connection, message)
            return
        transfer = self._transfers.get(message.transfer_id)
        handler = self._handlers.get(type(message))
        if transfer is None or transfer.attempt != message.attempt or transfer.peer != peer:
            self._answer_stranger(peer, message)
        elif handler is not None:
            try:
                handler(transfer, message)
            except PagewireError as error:
                self._fail(transfer, error.message)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        """The decode worker is gone or is another one now: everything between us has ended."""
        if self._connections.pop(peer, None) is None:
            return
        for transfer in [t for t in self._transfers.values() if t.peer == peer]:
            self._end(transfer, reason)
        self._wire.close_peer(peer)

    def on_reconnected(self, peer: str) -> None:
        """The control connection broke and is back: whoever answers must prove to be the same process."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._send_hello(connection)

    def on_data_failed(self, transfer_id: str, reason: str) -> None:
        """A lane could not send a chunk of this transfer."""
        self.abort(transfer_id, reason)

    def tick(self) -> None:
        """Look at every deadline; call at least every TICK_S while transfers live."""
        now = self._clock.now_s()
        timeout = self._settings.kv_peer_timeout_s
        is_late, self._last_tick_s = now - self._last_tick_s > LATE_TICK_S, now
        for connection in list(self._connections.values()):
            if is_late:
                connection.last_heard_s = now
            if not connection.is_ready:
                if now - connection.opened_s > HELLO_TIMEOUT_S:
                    self.on_peer_lost(connection.key, f"the decode worker did not answer HELLO within {HELLO_TIMEOUT_S} s")
                elif now - connection.last_hello_s > HELLO_RETRY_S:
                    self._send_hello(connection)
        for transfer in list(self._transfers.values()):
            known = self._connections.get(transfer.peer)
            if transfer.transfer_id not in self._transfers or known is None or not known.is_ready:
                continue
            if now > transfer.deadline_s:
                self._fail(transfer, "the request's deadline passed during the KV transfer")
            elif now - max(known.last_heard_s, transfer.started_s) > timeout:
                self.on_peer_lost(known.key, f"the decode worker has been silent for {timeout} s")
            else:
                self._keep_alive(transfer, now)
                if now - known.last_heartbeat_s > HEARTBEAT_S:
                    known.last_heartbeat_s = now
                    self._wire.send_control(known.key, control.Renew(src_incarnation=self._incarnation, dst_incarnation=known.incarnation))

    def _keep_alive(self, transfer: SenderTransfer, now: float) -> None:
        is_waiting = bool(transfer.in_flight) or transfer.phase is Phase.COMMIT_SENT
        if is_waiting and now - max(transfer.last_progress_s, transfer.last_fence_s) > STALL_S:
            self._send_fence(transfer)
        if is_waiting and now - transfer.last_progress_s > DEAD_WIRE_S:
            self._fail(transfer, f"the decode worker acknowledged no chunk for {DEAD_WIRE_S:g} s")
            return
        if now - transfer.last_control_s < RENEW_S:
            return
        if transfer.phase is Phase.OFFERED:
            self._send_offer(transfer)
        elif transfer.phase is Phase.COMMIT_SENT:
            self._send_commit(transfer)
        else:
            self._send(transfer, control.Renew(**self._addressed(transfer)))

    # Connections

    def _connect(self, peer: KVPeer, now: float) -> _Connection:
        key = f"{peer.ctrl_endpoint}#{peer.incarnation:x}"
        connection = self._connections.get(key)
        if connection is None:
            self._connections[key] = connection = _Connection(key, peer.incarnation, opened_s=now, last_hello_s=now, last_heard_s=now)
            self._wire.open_peer(key, peer.ctrl_endpoint, peer.server_key)
            self._send_hello(connection)
        return connection

    def _send_hello(self, connection: _Connection) -> None:
        connection.last_hello_s = self._clock.now_s()
        self._wire.send_control(
            connection.key,
            control.Hello(
                src_incarnation=self._incarnation,
                dst_incarnation=connection.incarnation,
                worker_id=self._worker_id,
                layout=self._layout,
                num_lanes=self._settings.kv_lanes,
                max_chunk_bytes=self._settings.kv_max_chunk_bytes,
                transports=allowed(self._settings.kv_transport),
                network=self._network,
                segment=self._segment,
            ),
        )

    def _on_connection_message(self, connection: _Connection, message: control.AnyControl) -> None:
        if isinstance(message, control.HelloAck):
            if not connection.is_ready:
                self._on_hello_ack(connection, message)
        elif isinstance(message, control.Deny):
            self.on_peer_lost(connection.key, message.reason)
        elif isinstance(message, control.Bye):
            self.on_peer_lost(connection.key, "the decode worker is shutting down")
        elif isinstance(message, control.Drain):
            connection.is_draining = True

    def _on_hello_ack(self, connection: _Connection, message: control.HelloAck) -> None:
        connection.max_chunk_bytes = min(message.max_chunk_bytes, self._settings.kv_max_chunk_bytes)
        endpoints = message.lane_endpoints[: self._settings.kv_lanes]
        try:
            connection.layer_ranges = self._layout.layer_ranges(connection.max_chunk_bytes)
        except PagewireError as error:
            self.on_peer_lost(connection.key, error.message)
            return
        connection.transport = message.transport
        connection.num_lanes = len(endpoints)
        connection.lane_load = [0] * len(endpoints)
        connection.is_ready = True
        probes = self._probes(connection) if connection.transport != "shm" else []
        self._wire.open_lanes(connection.key, endpoints, probes, message.are_lanes_encrypted)
        for transfer in [t for t in self._transfers.values() if t.peer == connection.key]:
            self._send_offer(transfer)

    def _probes(self, connection: _Connection) -> list[tuple[DataHeader, memoryview]]:
        layout = self._layout
        start, count = connection.layer_ranges[0]
        view = self._memory.block_view(0)[start * layout.layer_nbytes : (start + count) * layout.layer_nbytes]
        return [(header, view) for header in probe_headers(layout, count, self._incarnation, connection.incarnation)]

    def _answer_stranger(self, peer: str, message: control.AnyControl) -> None:
        self._counters["control_ignored"] += 1
        if isinstance(message, control.Abort):
            reply: control.ControlMessage = control.AbortAck(**self._returned(message))
        elif isinstance(message, control.Grant | control.Nack | control.Credit):
            # The receiver still holds blocks for something that has ended here.
            reply = control.Abort(**self._returned(message), reason="this transfer has ended at the prefill worker")
        else:
            return
        self._wire.send_control(peer, reply)

    # Messages about one transfer

    def _on_grant(self, transfer: SenderTransfer, message: control.AnyControl) -> None:
        assert isinstance(message, control.Grant)
        if transfer.phase is not Phase.OFFERED:
            return
        transfer.missing = frozenset(from_ranges(message.missing, transfer.num_blocks))
        transfer.grant_id, transfer.slot_gen, transfer.credits = message.grant_id, message.slot_gen, message.credits
        transfer.phase = Phase.GRANTED
        transfer.last_progress_s = self._clock.now_s()
        self._counters["bytes_deduped"] += (transfer.num_blocks - len(transfer.missing)) * self._layout.block_nbytes
        for block_index, block_id in transfer.queued.items():
            self._enqueue(transfer, block_index, block_id, 0, self._layout.num_layers)
        _tell(self._events.on_granted, transfer.transfer_id)
        self._pump(transfer)

    def _on_credit(self, transfer: SenderTransfer, message: control.AnyControl) -> None:
        assert isinstance(message, control.Credit)
        settled = [seq for seq in transfer.in_flight if any(start <= seq < start + count for start, count in message.received)]
        if not settled:
            return
        self._release(transfer, settled)
        self._pump(transfer)

    def _on_nack(self, transfer: SenderTransfer, message: control.AnyControl) -> None:
        assert isinstance(message, control.Nack)
        if message.nack_seq <= transfer.nack_seq:
            return
        transfer.nack_seq = message.nack_seq
        chunks = from_ranges(message.chunks, len(transfer.sent))
        self._release(transfer, [seq for seq in chunks if seq in transfer.in_flight])
        transfer.resend.extend(seq for seq in chunks if seq not in transfer.resend)
        transfer.is_fence_due = True
        self._pump(transfer)

    def _on_committed(self, transfer: SenderTransfer, message: control.AnyControl) -> None:
        if transfer.phase is Phase.COMMIT_SENT:
            self._end(transfer, None)

    def _on_deny(self, transfer: SenderTransfer, message: control.AnyControl) -> None:
        assert isinstance(message, control.Deny)
        hint = f" (retry in {message.retry_ms} ms)" if message.retry_ms else ""
        self._end(transfer, f"denied by the decode worker: {message.reason}{hint}")

    def _on_abort(self, transfer: SenderTransfer, message: control.AnyControl) -> None:
        assert isinstance(message, control.Abort)
        self._send(transfer, control.AbortAck(**self._addressed(transfer)))
        self._end(transfer, f"aborted by the decode worker: {message.reason}")

    # Sending

    def _enqueue(self, transfer: SenderTransfer, block_index: int, block_id: int, layer_start: int, layer_count: int) -> None:
        if block_index in transfer.missing:
            size, end = self._connections[transfer.peer].layer_ranges[0][1], layer_start + layer_count
            ranges = [(start, min(size, end - start)) for start in range(layer_start, end, size)]
            transfer.take_ranges(block_index, block_id, ranges)

    def _pump(self, transfer: SenderTransfer) -> None:
        """Send what the credits allow, then the fence and the COMMIT when they are due."""
        if transfer.phase is Phase.OFFERED:
            return
        try:
            while len(transfer.in_flight) < transfer.credits:
                if transfer.resend:
                    self._send_chunk(transfer, transfer.resend.popleft())
                elif transfer.pending:
                    transfer.sent.append(transfer.pending.popleft())
                    self._send_chunk(transfer, len(transfer.sent) - 1)
                else:
                    break
            if transfer.is_fence_due and not transfer.resend:
                self._send_fence(transfer)
        except Exception as error:
            logger.exception("KV transfer %s: cannot send", transfer.transfer_id)
            self._fail(transfer, f"the prefill worker cannot send: {error}")
            return
        if transfer.commit_request is not None and transfer.commit is None and not transfer.pending and not transfer.resend:
            self._make_commit(transfer, transfer.commit_request)

    def _send_chunk(self, transfer: SenderTransfer, seq: int) -> None:
        connection = self._connections[transfer.peer]
        chunk = transfer.sent[seq]
        start = chunk.layer_start * self._layout.layer_nbytes
        view = self._memory.block_view(chunk.block_id)[start : start + chunk.layer_count * self._layout.layer_nbytes]
        if chunk.header is None:
            chunk.header = self._chunk_header(transfer, connection, chunk, seq, view)
            transfer.num_bytes += view.nbytes
            transfer.digest = (transfer.digest + chunk.header.checksum) & 0xFFFF_FFFF_FFFF_FFFF
        else:
            chunk.header = replace(chunk.header, flags=chunk.header.flags | Flags.RETRY)
            self._counters["chunks_resent"] += 1
        chunk.lane = min(range(connection.num_lanes), key=lambda lane: connection.lane_load[lane])
        connection.lane_load[chunk.lane] += 1
        transfer.in_flight.add(seq)
        self._counters["chunks_sent"] += 1
        self._counters["bytes_sent"] += view.nbytes
        # A notice is enough where the receiver can read this memory itself.
        self._wire.send_data(transfer.peer, chunk.lane, chunk.header, view if connection.transport != "shm" else memoryview(b""))

    def _chunk_header(self, transfer: SenderTransfer, connection: _Connection, chunk: Chunk, seq: int, view: memoryview) -> DataHeader:
        # The checksum is taken here, while the block is owned by the transfer, not on the lane's thread: should the block be
        # reused after a failure, bytes still on their way no longer match it and can never complete a transfer.
        layout = self._layout
        return self._header(
            transfer,
            connection,
            msg_type=MessageType.CHUNK,
            seq=seq,
            payload_nbytes=view.nbytes,
            digest=checksum(view),
            block=chunk,
            valid_tokens=layout.valid_tokens(chunk.block_index, transfer.num_prompt_tokens),
        )

    def _header(
        self,
        transfer: SenderTransfer,
        connection: _Connection,
        *,
        msg_type: MessageType,
        seq: int,
        payload_nbytes: int = 0,
        digest: int = 0,
        block: Chunk | None = None,
        valid_tokens: int = 0,
    ) -> DataHeader:
        layout = self._layout
        trace_id, span_id, trace_flags = split_traceparent(transfer.traceparent)
        is_fence = block is None
        return DataHeader(
            msg_type=msg_type,
            flags=Flags.SHARED_MEMORY if block is not None and connection.transport == "shm" else Flags.NONE,
            transfer_id=bytes.fromhex(transfer.transfer_id),
            attempt=transfer.attempt,
            src_incarnation=self._incarnation,
            dst_incarnation=connection.incarnation,
            grant_id=transfer.grant_id,
            slot=transfer.nack_seq if block is None else block.block_id if connection.transport == "shm" else 0,
            slot_gen=transfer.slot_gen,
            chunk_seq=seq,
            chunk_total=len(transfer.sent) if is_fence else 0,
            payload_nbytes=payload_nbytes,
            checksum_algo=ChecksumCode.NONE if is_fence else ChecksumCode.XXH3_64,
            checksum=digest,
            hash_set_digest=transfer.hash_set_digest,
            layer_start=block.layer_start if block else 0,
            layer_count=block.layer_count if block else 0,
            block_index=block.block_index if block else 0,
            block_count=1 if block else 0,
            block_tokens=layout.block_size if block else 0,
            valid_tokens=valid_tokens,
            kv_part=KVPart.KV,
            dtype=layout.dtype,
            layout=layout.layout,
            head_count=layout.num_kv_heads if block else 0,
            head_dim=layout.head_dim if block else 0,
            trace_id=trace_id,
            span_id=span_id,
            trace_flags=trace_flags,
        )

    def _send_fence(self, transfer: SenderTransfer) -> None:
        connection = self._connections[transfer.peer]
        transfer.fence_round += 1
        transfer.is_fence_due = False
        transfer.last_fence_s = self._clock.now_s()
        header = self._header(transfer, connection, msg_type=MessageType.FENCE, seq=transfer.fence_round)
        for lane in range(connection.num_lanes):
            self._counters["fences_sent"] += 1
            self._wire.send_data(transfer.peer, lane, header, memoryview(b""))

    def _make_commit(self, transfer: SenderTransfer, request: CommitRequest) -> None:
        unqueued = transfer.unqueued()
        if unqueued:
            self._fail(transfer, f"commit without the missing blocks {unqueued[:8]} (of {len(unqueued)}): queue them first")
            return
        transfer.commit = control.Commit(
            **self._addressed(transfer),
            num_cached_tokens=request.num_cached_tokens,
            chunk_total=len(transfer.sent),
            num_bytes=transfer.num_bytes,
            digest=transfer.digest,
            hidden_nbytes=len(request.hidden_state),
            hidden_checksum=checksum(request.hidden_state),
        )
        transfer.phase = Phase.COMMIT_SENT
        transfer.last_progress_s = self._clock.now_s()
        if transfer.sent:
            self._send_fence(transfer)
        self._send_commit(transfer)

    def _send_commit(self, transfer: SenderTransfer) -> None:
        assert transfer.commit is not None and transfer.commit_request is not None
        self._send(transfer, transfer.commit, transfer.commit_request.hidden_state)

    def _send_offer(self, transfer: SenderTransfer) -> None:
        now = self._clock.now_s()
        self._send(
            transfer,
            control.Offer(
                **self._addressed(transfer),
                num_prompt_tokens=transfer.num_prompt_tokens,
                block_hashes=transfer.block_hashes.hex(),
                deadline_s=max(0.0, transfer.deadline_s - now),
            ),
        )

    def _send(self, transfer: SenderTransfer, message: control.ControlMessage, blob: bytes = b"") -> None:
        transfer.last_control_s = self._clock.now_s()
        self._wire.send_control(transfer.peer, message, blob)

    def _addressed(self, transfer: SenderTransfer) -> control.Address:
        return {
            "transfer_id": transfer.transfer_id,
            "attempt": transfer.attempt,
            "src_incarnation": self._incarnation,
            "dst_incarnation": self._connections[transfer.peer].incarnation,
            "traceparent": transfer.traceparent,
        }

    def _returned(self, message: control.ControlMessage) -> control.Address:
        return {
            "transfer_id": message.transfer_id,
            "attempt": message.attempt,
            "src_incarnation": self._incarnation,
            "dst_incarnation": message.src_incarnation,
            "traceparent": message.traceparent,
        }

    # Ends

    def _release(self, transfer: SenderTransfer, seqs: Sequence[int]) -> None:
        connection = self._connections.get(transfer.peer)
        for seq in seqs:
            transfer.in_flight.discard(seq)
            if connection is not None:
                connection.lane_load[transfer.sent[seq].lane] -= 1
        transfer.last_progress_s = self._clock.now_s()

    def _fail(self, transfer: SenderTransfer, reason: str) -> None:
        """Tell the receiver, then end."""
        if transfer.transfer_id in self._transfers and transfer.peer in self._connections:
            self._send(transfer, control.Abort(**self._addressed(transfer), reason=reason[:1000]))
        self._end(transfer, reason)

    def _end(self, transfer: SenderTransfer, reason: str | None) -> None:
        if self._transfers.pop(transfer.transfer_id, None) is None:
            return
        self._release(transfer, list(transfer.in_flight))
        transfer.pending.clear()
        transfer.resend.clear()
        if reason is None:
            self._counters["transfers_committed"] += 1
            _tell(self._events.on_committed, transfer.transfer_id)
        else:
            self._counters["transfers_failed"] += 1
            _tell(self._events.on_failed, transfer.transfer_id, reason)


def _tell(event: Callable[..., None], *args: object) -> None:
    """A listener's fault must not stop the other transfers."""
    try:
        event(*args)
    except Exception:
        logger.exception("a listener of KV transfer events failed")
