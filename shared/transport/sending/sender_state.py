"""The sending half of KVX/1 as a state machine: commands, control messages and ticks in, wire calls and events out.

No sockets and no threads: KVSender drives it over ZeroMQ, the in-memory twin drives it in simulations. Not thread-safe.

A transfer goes to one peer, or to each rank of a tensor-parallel one; then it is one transfer for each of them, and they end together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shared.clock import Clock
from shared.config import Settings
from shared.errors import ConfigurationError, PagewireError, ProtocolError, reason_of
from shared.messages import KVPeer
from shared.transport.connector import BlockMemory, ChunkRead, DataMessage, SenderEvents, SenderWire, StoredBytes
from shared.transport.protocol import control
from shared.transport.protocol.frames import Flags, checksum
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.limits import (
    DEAD_WIRE_S,
    HEARTBEAT_S,
    HELLO_RETRY_S,
    HELLO_TIMEOUT_S,
    LATE_TICK_S,
    MAX_CHUNKS_PER_PEER,
    RENEW_S,
    STALL_S,
)
from shared.transport.protocol.seq_ranges import from_ranges
from shared.transport.protocol.transport_name import allowed
from shared.transport.protocol.wire_plan import WirePlan
from shared.transport.sending.chunk_header import chunk_header, fence_header
from shared.transport.sending.connection import Connection, Lane
from shared.transport.sending.sender_transfer import CommitRequest, Phase, SenderTransfer
from shared.transport.wires.wire_speed import probe_messages

logger = logging.getLogger(__name__)
_GIVEN_BACK = StoredBytes(memoryview(b""))
"""Stands for what was read once and is not needed any more."""
COUNTERS = (
    "bytes_sent",
    "bytes_deduped",
    "chunks_sent",
    "chunks_resent",
    "control_ignored",
    "credits_starved_ms",
    "fences_sent",
    "lanes_given_up",
    "resumes",
    "transfers_offered",
    "transfers_committed",
    "transfers_failed",
)


@dataclass(slots=True)
class _Outgoing:
    """One transfer as its owner knows it: to one peer or to each rank of one."""

    parts: dict[str, SenderTransfer]
    """Those that have not ended, by peer."""
    ending: list[SenderTransfer] = field(default_factory=list)
    """Those that have, but of which a lane still has something to read."""
    num_waiting: int = 0
    """Parts that are not granted yet."""
    failure: str | None = None


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
        network: str = "",
    ) -> None:
        """Raises ConfigurationError when one layer of a block does not fit a chunk. `network`: see transport_name.network_identity."""
        layout.check_chunk(settings.kv_max_chunk_bytes)
        self._layout = layout
        self._memory = memory
        self._incarnation = incarnation
        self._events = events
        self._clock = clock
        self._settings = settings
        self._worker_id = worker_id
        self._wire = wire
        self._network = network
        self._transports = tuple(name for name in allowed(settings.kv_transport) if name != "cuda" or memory.gpu is not None)
        if not self._transports:
            raise ConfigurationError("kv_transport 'cuda': the KV cache is not in a GPU's memory here; leave it at 'auto'")
        self._last_tick_s = 0.0
        self._is_closed = False
        self._connections: dict[str, Connection] = {}
        self._outgoing: dict[str, _Outgoing] = {}
        self._counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
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
        return len(self._outgoing)

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    # Commands of the prefill service

    def offer(
        self,
        transfer_id: str,
        attempt: int,
        peers: Sequence[KVPeer],
        num_prompt_tokens: int,
        block_hashes: Sequence[bytes],
        deadline_s: float,
        traceparent: str,
    ) -> None:
        """Ask `peers`, one worker or the ranks of one, for room. `deadline_s`: seconds from now. Chunks leave only after a GRANT."""
        if transfer_id in self._outgoing:
            self._counters["control_ignored"] += 1
            return
        if self._is_closed:
            _tell(self._events.on_failed, transfer_id, "the prefill worker is shutting down")
            return
        now = self._clock.now_s()
        hashes = b"".join(block_hashes)
        connections = [self._connect(peer, now) for peer in peers]
        parts = {
            connection.key: SenderTransfer(
                transfer_id=transfer_id,
                attempt=attempt,
                peer=connection.key,
                num_prompt_tokens=num_prompt_tokens,
                block_hashes=hashes,
                hash_set_digest=checksum(hashes),
                traceparent=traceparent,
                deadline_s=now + deadline_s,
                started_s=now,
            )
            for connection in connections
        }
        self._outgoing[transfer_id] = _Outgoing(parts, num_waiting=len(parts))
        self._counters["transfers_offered"] += 1
        for connection in connections:
            transfer = parts[connection.key]
            if connection.is_draining:
                self._end(transfer, "the decode worker is draining")
            elif connection.is_ready:
                self._send_offer(transfer)

    def send_blocks(self, transfer_id: str, blocks: Sequence[tuple[int, int]], layers: tuple[int, int] | None = None) -> None:
        """Queue (block_index, block_id) pairs whose KV is complete, in all layers or in those of `layers` (first, count).

        What the receiver has already is skipped, and so is what was handed over before.
        """
        first, count = layers or (0, self._layout.num_layers)
        for transfer in self._parts(transfer_id):
            num_blocks = self._layout.num_blocks(transfer.num_prompt_tokens)
            for block_index, block_id in blocks:
                if not 0 <= block_index < num_blocks:
                    continue
                transfer.ready.extend((block_index, block_id, *fresh) for fresh in transfer.note_queued(block_index, first, count))
            self._pump(transfer)

    def commit(self, transfer_id: str, hidden_state: bytes, num_cached_tokens: int) -> None:
        """Finish after all queued blocks; every block the receiver misses must have been queued."""
        for transfer in self._parts(transfer_id):
            if transfer.commit_request is None:
                transfer.commit_request = CommitRequest(hidden_state, num_cached_tokens)
                self._pump(transfer)

    def abort(self, transfer_id: str, reason: str, *, is_cancelled: bool = False) -> None:
        """End a transfer; on_failed follows. `is_cancelled`: nobody waits for its request any more, which the receiver is told."""
        for transfer in self._parts(transfer_id):
            self._fail(transfer, reason, is_cancelled=is_cancelled)

    def close(self, reason: str = "the prefill worker is shutting down") -> None:
        """Abort everything and say goodbye; what is offered later fails at once. What a lane has not read by now it will not read."""
        self._is_closed = True
        for transfer_id in list(self._outgoing):
            self.abort(transfer_id, reason)
        for connection in list(self._connections.values()):
            self._wire.send_control(connection.key, control.Bye(src_incarnation=self._incarnation, dst_incarnation=connection.incarnation))

    def forget_lanes(self) -> None:
        """All lanes have ended: nothing is read any more."""
        for transfer_id, outgoing in list(self._outgoing.items()):
            for part in outgoing.ending:
                part.num_reading = 0
            self._conclude(transfer_id)

    def _parts(self, transfer_id: str) -> list[SenderTransfer]:
        outgoing = self._outgoing.get(transfer_id)
        return list(outgoing.parts.values()) if outgoing is not None else []

    def _transfers_to(self, peer: str) -> list[SenderTransfer]:
        return [outgoing.parts[peer] for outgoing in list(self._outgoing.values()) if peer in outgoing.parts]

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
        outgoing = self._outgoing.get(message.transfer_id)
        transfer = outgoing.parts.get(peer) if outgoing is not None else None
        handler = self._handlers.get(type(message))
        if transfer is None or transfer.attempt != message.attempt:
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
        self._wire.close_peer(peer)
        for transfer in self._transfers_to(peer):
            self._end(transfer, reason)

    def on_reconnected(self, peer: str) -> None:
        """The control connection broke and is back: whoever answers must prove to be the same process."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._send_hello(connection)

    def on_lane(self, peer: str, lane: int, *, is_connected: bool) -> None:
        """A lane's connection broke, or is there: what was on it may be lost. Who opens lanes says first that they are not."""
        connection = self._connections.get(peer)
        if connection is None or lane >= len(connection.lanes):
            return
        known = connection.lanes[lane]
        if not is_connected:
            known.broken_s = self._clock.now_s() if known.broken_s is None else known.broken_s
        elif not known.was_connected:  # nothing can have been lost on it
            known.was_connected, known.broken_s, known.is_out = True, None, False
        elif known.broken_s is not None:
            known.broken_s = None
            known.is_out = False
            for transfer in self._transfers_to(peer):
                if transfer.sent:
                    self._send_fence(transfer)

    def on_chunk_read(self, peer: str, transfer_id: str, seq: int, read: ChunkRead) -> None:
        """A lane has read a chunk, or never will."""
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            return
        transfer = outgoing.parts.get(peer)
        if transfer is None:
            ended = next((part for part in outgoing.ending if part.peer == peer), None)
            if ended is not None:
                ended.num_reading -= 1
                self._conclude(transfer_id)
            return
        chunk = transfer.sent[seq]
        chunk.num_reading -= 1
        transfer.num_reading -= 1
        if read.failure:
            self._fail(transfer, read.failure)
            return
        if read.stored is not None:
            if chunk.stored is None:
                transfer.num_bytes += read.header.payload_nbytes
                transfer.digest = (transfer.digest + read.header.checksum) & 0xFFFF_FFFF_FFFF_FFFF
                self._counters["bytes_sent"] += read.header.payload_nbytes
            chunk.header = read.header
            # The credit may have come before this report.
            chunk.stored = read.stored if seq in transfer.in_flight else _GIVEN_BACK
        if transfer.commit_request is not None:
            self._pump(transfer)

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
                continue
            if connection.is_out_of_reach(now):
                where = ", ".join(connection.lane_endpoints)
                self.on_peer_lost(connection.key, f"no data lane of the decode worker could be reached: let connections through to {where}")
                continue
            for lane in connection.given_up(now):
                self._give_up_lane(connection, lane)
            transfers = self._transfers_to(connection.key)
            oldest_s = min((transfer.started_s for transfer in transfers), default=now)
            if transfers and now - max(connection.last_heard_s, oldest_s) > timeout:
                self.on_peer_lost(connection.key, f"the decode worker has been silent for {timeout} s")
                continue
            for transfer in transfers:
                if transfer.phase is Phase.ENDED:
                    continue
                if now > transfer.deadline_s:
                    self._fail(transfer, "the request's deadline passed during the KV transfer")
                    continue
                self._keep_alive(transfer, now)
                if transfer.has_unsent:
                    self._pump(transfer)  # it may have waited for room that others have left
            if transfers and now - connection.last_heartbeat_s > HEARTBEAT_S:
                connection.last_heartbeat_s = now
                renewal = control.Renew(src_incarnation=self._incarnation, dst_incarnation=connection.incarnation)
                self._wire.send_control(connection.key, renewal)

    def _keep_alive(self, transfer: SenderTransfer, now: float) -> None:
        is_waiting = bool(transfer.in_flight) or transfer.phase is Phase.COMMIT_SENT
        if is_waiting and now - max(transfer.last_progress_s, transfer.last_fence_s) > STALL_S:
            self._send_fence(transfer)
        if is_waiting and now - transfer.last_progress_s > DEAD_WIRE_S:
            self._fail(transfer, f"the decode worker acknowledged no chunk for {DEAD_WIRE_S:g} s")
        elif now - transfer.last_control_s >= RENEW_S:
            self._repeat(transfer)

    def _repeat(self, transfer: SenderTransfer) -> None:
        """Say again where this transfer stands; the receiver's answer says the same of its end."""
        if transfer.phase is Phase.OFFERED:
            self._send_offer(transfer)
        elif transfer.phase is Phase.COMMIT_SENT:
            self._send_commit(transfer)
        else:
            self._send(transfer, control.Renew(**self._addressed(transfer)))

    # Connections

    def _connect(self, peer: KVPeer, now: float) -> Connection:
        key = f"{peer.ctrl_endpoint}#{peer.incarnation:x}"
        connection = self._connections.get(key)
        if connection is None:
            self._connections[key] = connection = Connection(key, peer.incarnation, opened_s=now, last_hello_s=now, last_heard_s=now)
            self._wire.open_peer(key, peer.ctrl_endpoint, peer.server_key)
            self._send_hello(connection)
        return connection

    def _send_hello(self, connection: Connection) -> None:
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
                transports=self._transports,
                network=self._network,
                segment=self._memory.segment,
                device_memory=self._memory.gpu.offer if self._memory.gpu is not None else None,
                wire_dtype=self._settings.kv_wire_dtype,
            ),
        )

    def _on_connection_message(self, connection: Connection, message: control.AnyControl) -> None:
        if isinstance(message, control.HelloAck):
            if connection.is_ready:
                self._resume(connection)
            else:
                self._on_hello_ack(connection, message)
        elif isinstance(message, control.Deny) and message.field == "hello":
            # It has given us up for our silence. What it had granted has ended there, as it says when we resume; what is new has not.
            if self._clock.now_s() - connection.last_hello_s > HELLO_RETRY_S:
                self._send_hello(connection)
        elif isinstance(message, control.Deny):
            self.on_peer_lost(connection.key, message.reason)
        elif isinstance(message, control.Bye):
            self.on_peer_lost(connection.key, "the decode worker is shutting down")
        elif isinstance(message, control.Drain):
            connection.is_draining = True

    def _resume(self, connection: Connection) -> None:
        """The same process answers again: what was said meanwhile may be lost, so both say where they are."""
        self._counters["resumes"] += 1
        for transfer in self._transfers_to(connection.key):
            self._repeat(transfer)
            if transfer.sent:
                self._send_fence(transfer)

    def _on_hello_ack(self, connection: Connection, message: control.HelloAck) -> None:
        connection.max_chunk_bytes = min(message.max_chunk_bytes, self._settings.kv_max_chunk_bytes)
        endpoints = message.lane_endpoints[: self._settings.kv_lanes]
        if self._settings.kv_lane_security == "curve" and not message.are_lanes_encrypted:
            reason = "the decode worker's lanes are not encrypted; set kv_lane_security=curve there too, or change it here"
            self.on_peer_lost(connection.key, reason)
            return
        try:
            plan = WirePlan.between(self._layout, message.layout, self._settings.kv_wire_dtype)
            probes = probe_messages(plan, connection.max_chunk_bytes, self._incarnation, connection.incarnation)
        except PagewireError as error:
            self.on_peer_lost(connection.key, error.message)
            return
        connection.plan = plan
        connection.transport = message.transport
        connection.lanes, connection.lane_endpoints = [Lane() for _ in endpoints], endpoints
        is_probed = connection.transport in ("ipc", "tcp")
        self._wire.open_lanes(connection.key, endpoints, probes if is_probed else [], message.are_lanes_encrypted)
        for transfer in self._transfers_to(connection.key):
            self._send_offer(transfer)

    def _give_up_lane(self, connection: Connection, lane: int) -> None:
        self._counters["lanes_given_up"] += 1
        logger.warning("KV lane %d to %s is broken; its chunks go over the others", lane, connection.key)
        self._wire.drop_data(connection.key, lane=lane)
        for transfer in self._transfers_to(connection.key):
            lost = list(transfer.on_lane(lane))
            self._release(transfer, lost)
            transfer.ask_again(lost)
            if transfer.sent:
                transfer.is_fence_due = True
                self._pump(transfer)

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
        if not self._connections[transfer.peer].is_ready:
            raise ProtocolError("the decode worker granted what it was not offered: it has not answered HELLO yet")
        plan = self._connections[transfer.peer].agreed
        num_units = plan.num_units(transfer.num_prompt_tokens)
        transfer.missing = frozenset(from_ranges(message.missing, num_units))
        transfer.grant_id, transfer.slot_gen, transfer.credits = message.grant_id, message.slot_gen, message.credits
        transfer.phase = Phase.GRANTED
        transfer.last_progress_s = self._clock.now_s()
        unit_nbytes = plan.layer_nbytes(plan.unit_tokens) * self._layout.num_layers
        self._counters["bytes_deduped"] += (num_units - len(transfer.missing)) * unit_nbytes
        outgoing = self._outgoing[transfer.transfer_id]
        outgoing.num_waiting -= 1
        if outgoing.num_waiting == 0:
            _tell(self._events.on_granted, transfer.transfer_id)
        self._pump(transfer)

    def _on_credit(self, transfer: SenderTransfer, message: control.AnyControl) -> None:
        assert isinstance(message, control.Credit)
        settled = transfer.settled(message.received)
        if settled:
            was_full = self._is_full(self._connections[transfer.peer])
            self._release(transfer, settled)
            self._pump(transfer)
            if was_full:
                self._pump_others(transfer)

    def _on_nack(self, transfer: SenderTransfer, message: control.AnyControl) -> None:
        assert isinstance(message, control.Nack)
        if message.nack_seq <= transfer.nack_seq:
            return
        transfer.nack_seq = message.nack_seq
        chunks = from_ranges(message.chunks, len(transfer.sent))
        self._release(transfer, [seq for seq in chunks if seq in transfer.in_flight])
        transfer.ask_again(chunks)
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

    def _is_full(self, connection: Connection) -> bool:
        """A peer has at most as many chunks on the way as the memory could still hold besides: so slow ones leave room for the others,
        and a lane never waits for it in `read`."""
        max_held = self._memory.max_chunks_held if connection.transport != "cuda" else 0
        if max_held:
            num_held = sum(other.num_in_flight for other in self._connections.values() if other.transport != "cuda")
            if connection.num_in_flight >= max_held - num_held:
                return True
        return connection.num_in_flight >= MAX_CHUNKS_PER_PEER

    def _pump_others(self, than: SenderTransfer) -> None:
        """Those to the same peer that waited for its lanes to have room."""
        for transfer in self._transfers_to(than.peer):
            if transfer is not than and transfer.has_unsent:
                self._pump(transfer)

    def _pump(self, transfer: SenderTransfer) -> None:
        """Send what the credits allow, then the fence and the COMMIT when they are due."""
        if transfer.phase not in (Phase.GRANTED, Phase.COMMIT_SENT):
            return
        connection = self._connections[transfer.peer]
        preferred = connection.preferred_chunk_bytes(self._memory)
        try:
            while len(transfer.in_flight) < transfer.credits and not self._is_full(connection):
                if transfer.resend:
                    self._send_chunk(transfer, connection, transfer.resend.popleft())
                elif transfer.cut_next(connection.agreed, connection.max_chunk_bytes):
                    transfer.sent.append(transfer.next_chunk(connection.agreed, preferred, connection.max_chunk_bytes))
                    self._send_chunk(transfer, connection, len(transfer.sent) - 1)
                else:
                    break
            self._note_starvation(transfer)
            if transfer.is_fence_due and not transfer.resend:
                self._send_fence(transfer)
        except Exception as error:
            logger.exception("KV transfer %s: cannot send", transfer.transfer_id)
            self._fail(transfer, f"the prefill worker cannot send: {reason_of(error)}")
            return
        is_all_read = not (transfer.has_unsent or transfer.num_reading)
        if transfer.commit_request is not None and transfer.commit is None and is_all_read:
            self._make_commit(transfer, transfer.commit_request)

    def _note_starvation(self, transfer: SenderTransfer) -> None:
        """Time in which there was something to send and no credit, or no room at the peer, to send it."""
        now = self._clock.now_s()
        if transfer.starved_s is not None:
            self._counters["credits_starved_ms"] += 1000 * (now - transfer.starved_s)
        transfer.starved_s = now if transfer.has_unsent else None

    def _send_chunk(self, transfer: SenderTransfer, connection: Connection, seq: int) -> None:
        chunk = transfer.sent[seq]
        if chunk.header is None:
            chunk.header = chunk_header(transfer, connection.agreed, chunk, seq, self._incarnation, connection.incarnation)
        else:
            chunk.header = replace(chunk.header, flags=chunk.header.flags | Flags.RETRY)
            self._counters["chunks_resent"] += 1
        if not transfer.in_flight:
            transfer.last_progress_s = self._clock.now_s()  # until now there was nothing to acknowledge
        chunk.lane = connection.least_loaded()
        connection.lanes[chunk.lane].num_in_flight += 1
        transfer.in_flight.add(seq)
        chunk.num_reading += 1
        transfer.num_reading += 1
        self._counters["chunks_sent"] += 1
        plan = connection.agreed
        message = DataMessage(chunk.header, chunk.regions, plan.codec, connection.transport, plan.unit_tokens)
        self._wire.send_data(transfer.peer, chunk.lane, message)

    def _send_fence(self, transfer: SenderTransfer) -> None:
        connection = self._connections[transfer.peer]
        transfer.fence_round += 1
        transfer.is_fence_due = False
        transfer.last_fence_s = self._clock.now_s()
        lanes = connection.live_lanes()
        header = fence_header(transfer, connection.agreed, len(lanes), self._incarnation, connection.incarnation)
        for lane in lanes:
            self._counters["fences_sent"] += 1
            self._wire.send_data(transfer.peer, lane, DataMessage(header))

    def _make_commit(self, transfer: SenderTransfer, request: CommitRequest) -> None:
        unqueued = transfer.unqueued(self._connections[transfer.peer].agreed)
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
            chunk = transfer.sent[seq]
            if chunk.stored is not None:
                chunk.stored = _GIVEN_BACK
            if connection is not None:
                connection.lanes[chunk.lane].num_in_flight -= 1
        transfer.last_progress_s = self._clock.now_s()

    def _fail(self, transfer: SenderTransfer, reason: str, *, is_cancelled: bool = False) -> None:
        """Tell the receiver, then end."""
        if transfer.phase is not Phase.ENDED and transfer.peer in self._connections:
            self._send(transfer, control.Abort(**self._addressed(transfer), reason=reason[:1000], is_cancelled=is_cancelled))
        self._end(transfer, reason)

    def _end(self, transfer: SenderTransfer, reason: str | None) -> None:
        outgoing = self._outgoing.get(transfer.transfer_id)
        if outgoing is None or transfer.phase is Phase.ENDED:
            return
        transfer.phase = Phase.ENDED
        del outgoing.parts[transfer.peer]
        outgoing.ending.append(transfer)
        self._release(transfer, list(transfer.in_flight))
        transfer.ready.clear()
        transfer.pending.clear()
        transfer.resend.clear()
        if transfer.num_reading:
            self._wire.drop_data(transfer.peer, transfer_id=transfer.transfer_id)
        if reason is not None and outgoing.failure is None:
            outgoing.failure = reason
            for other in list(outgoing.parts.values()):
                self._fail(other, f"another rank's part failed: {reason}")
        self._conclude(transfer.transfer_id)

    def _conclude(self, transfer_id: str) -> None:
        """Tell the owner once all parts have ended and no lane has anything of them left to read: then the blocks are his again."""
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None or outgoing.parts or any(part.num_reading for part in outgoing.ending):
            return
        del self._outgoing[transfer_id]
        if outgoing.failure is None:
            self._counters["transfers_committed"] += 1
            _tell(self._events.on_committed, transfer_id)
        else:
            self._counters["transfers_failed"] += 1
            _tell(self._events.on_failed, transfer_id, outgoing.failure)


def _tell(event: Callable[..., None], *args: object) -> None:
    """A listener's fault must not stop the other transfers."""
    try:
        event(*args)
    except Exception:
        logger.exception("a listener of KV transfer events failed")
