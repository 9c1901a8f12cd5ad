"""The receiving half of KVX/1 as a state machine: reservations, control messages, data messages and ticks in; answers and events out.

The receiver decides where bytes land: a data message is accepted only for a live grant whose every identity it names, so a late
or foreign message can never touch a block. Thread-safe: one short lock; hashing and copying run outside it, counted as writers,
and a grant's blocks are handed back (abort returns, an event is delivered) only when it has no writer.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.clock import Clock
from shared.config import Settings
from shared.errors import PagewireError, ProtocolError, TransferError
from shared.ids import new_grant_id
from shared.transport.connector import BlockMemory, CommitInfo, ReceiverEvents, ReceiverWire
from shared.transport.protocol import control
from shared.transport.protocol.frames import ChecksumCode, DataHeader, Flags, MessageType, checksum
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.limits import LATE_TICK_S, MAX_TOMBSTONES, MAX_WAITING_OFFERS, OFFER_WAIT_S
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.protocol.seq_ranges import to_ranges
from shared.transport.protocol.transport_name import TransportName, allowed
from shared.transport.receiving.grant import Grant, GrantPhase
from shared.transport.wires.shared_segment import SegmentReader
from shared.transport.wires.wire_speed import Probe, copy_bytes, probe_segment

logger = logging.getLogger(__name__)
COUNTERS = (
    "bytes_received",
    "bytes_deduped",
    "chunks_received",
    "chunks_duplicate",
    "chunks_nacked",
    "stale_frames",
    "bad_headers",
    "bad_checksums",
    "control_ignored",
    "malformed_messages",
    "offers_denied",
    "transfers_expected",
    "transfers_committed",
    "transfers_failed",
)


@dataclass(slots=True)
class _Peer:
    name: str
    incarnation: int
    num_lanes: int
    transport: TransportName
    last_heard_s: float
    offer: SegmentOffer | None = None
    segment: SegmentReader | None = None
    probes: dict[int, Probe] = field(default_factory=dict)
    """By lane."""


@dataclass(slots=True)
class _WaitingOffer:
    peer: str
    offer: control.Offer
    deadline_s: float


@dataclass(slots=True)
class _Event:
    """The end of a transfer, to be told when its grant has no writer. `info` is set on success."""

    grant: Grant
    info: CommitInfo | None
    reason: str


@dataclass(slots=True, frozen=True)
class _Tombstone:
    is_committed: bool
    reason: str


class ReceiverState:
    def __init__(
        self,
        *,
        layout: KVLayout,
        memory: BlockMemory,
        incarnation: int,
        events: ReceiverEvents,
        clock: Clock,
        settings: Settings,
        worker_id: str,
        wire: ReceiverWire,
        lane_endpoints: tuple[str, ...],
        ipc_endpoints: tuple[str, ...] = (),
        network: str = "",
        are_lanes_encrypted: bool = False,
    ) -> None:
        """Raises ConfigurationError when one layer of a block does not fit a chunk.

        `ipc_endpoints`: the same lanes, for those whose `network` (see transport_name.network_identity) is this one.
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
        self._lane_endpoints = lane_endpoints
        self._ipc_endpoints = ipc_endpoints
        self._network = network
        self._are_lanes_encrypted = are_lanes_encrypted
        self._lock = threading.Condition()
        self._peers: dict[str, _Peer] = {}
        self._grants: dict[str, Grant] = {}
        self._offers: dict[str, _WaitingOffer] = {}
        self._announced: dict[str, float] = {}
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()
        self._outbox: deque[_Event] = deque()
        self._slot_gen = 0
        self._last_tick_s = 0.0
        self._is_draining = False
        self._credit_batch = max(1, settings.kv_credits // 4)
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    def counters(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counters)

    @property
    def num_transfers(self) -> int:
        with self._lock:
            return len(self._grants) + len(self._offers)

    def peers(self) -> list[tuple[str, int]]:
        """(peer, incarnation) of every open connection."""
        with self._lock:
            return [(key, peer.incarnation) for key, peer in self._peers.items()]

    # Commands of the decode service, from any thread

    def announce(self, transfer_id: str, deadline_s: float) -> None:
        """The request is known and will reserve blocks later: let its offer wait this long (seconds) instead of OFFER_WAIT_S."""
        with self._lock:
            deadline = self._clock.now_s() + deadline_s
            self._announced[transfer_id] = deadline
            if transfer_id in self._offers:
                self._offers[transfer_id].deadline_s = deadline

    def expect(
        self,
        transfer_id: str,
        attempt: int,
        block_ids: Sequence[int],
        missing: Sequence[int],
        num_prompt_tokens: int,
        deadline_s: float,
        traceparent: str = "",
        block_hashes: Sequence[bytes] | None = None,
        is_prefix: bool = False,
    ) -> None:
        """Blocks are reserved: grant the offer, now or when it comes.

        `block_ids`: the block of every index of the prompt's chain, held or reserved; `missing`: the indices to be sent.
        `deadline_s`: seconds from now for the whole transfer. `block_hashes`: compared with the offer's when given.
        `is_prefix`: full blocks, of which the first ones alone may be offered, or none; the commit then tells how many came.
        Raises TransferError when the arguments contradict each other or the transfer is expected already.
        """
        num_blocks = self._layout.num_blocks(num_prompt_tokens)
        if len(block_ids) < num_blocks:
            raise TransferError(f"{num_prompt_tokens} prompt tokens need {num_blocks} blocks; block_ids has {len(block_ids)}")
        if any(not 0 <= index < num_blocks for index in missing):
            raise TransferError(f"missing must be indices of the prompt's {num_blocks} blocks, not block ids: {list(missing)[:8]}")
        with self._lock:
            if transfer_id in self._grants:
                raise TransferError(f"transfer {transfer_id} is expected already")
            now = self._clock.now_s()
            self._slot_gen = (self._slot_gen + 1) & 0xFFFF_FFFF
            grant = Grant(
                transfer_id=transfer_id,
                attempt=attempt,
                block_ids=tuple(block_ids),
                missing=frozenset(missing),
                num_layers=self._layout.num_layers,
                num_prompt_tokens=num_prompt_tokens,
                deadline_s=now + deadline_s,
                traceparent=traceparent,
                grant_id=new_grant_id(),
                slot_gen=self._slot_gen,
                expected_s=now,
                block_hashes=None if block_hashes is None else b"".join(block_hashes),
                is_prefix=is_prefix,
                last_progress_s=now,
            )
            self._announced.pop(transfer_id, None)
            self._grants[transfer_id] = grant
            self._counters["transfers_expected"] += 1
            tombstone = self._tombstones.get(transfer_id)
            waiting = self._offers.pop(transfer_id, None)
            if tombstone is not None:
                self._end(grant, tombstone.reason or "this transfer has ended already")
            elif waiting is not None:
                self._grant_offer(grant, waiting.peer, waiting.offer)

    def deny(self, transfer_id: str, reason: str, retry_ms: int = 0) -> None:
        """No room, or not wanted: refuse the offer, now or when it comes."""
        with self._lock:
            waiting = self._offers.pop(transfer_id, None)
            self._announced.pop(transfer_id, None)
            if transfer_id not in self._grants:
                self._bury(transfer_id, _Tombstone(False, reason))
            if waiting is not None:
                self._deny(waiting.peer, waiting.offer, reason, retry_ms=retry_ms)

    def abort(self, transfer_id: str, reason: str) -> bool:
        """End a transfer here; on return nothing writes into its blocks, or ever will.

        True: ended by this call, no event will follow. False: it had ended before, or was never expected; an event may have
        been delivered. Waits only for copies in progress.
        """
        with self._lock:
            waiting = self._offers.pop(transfer_id, None)
            if waiting is not None:
                self._deny(waiting.peer, waiting.offer, reason)
            self._announced.pop(transfer_id, None)
            grant = self._grants.get(transfer_id)
            if grant is not None:
                self._send_abort(grant, reason)
                self._end(grant, reason)
            event = next((event for event in self._outbox if event.grant.transfer_id == transfer_id), None)
            if event is None:
                if transfer_id not in self._tombstones:
                    self._bury(transfer_id, _Tombstone(False, reason))
                return False
            self._outbox.remove(event)
            while event.grant.num_writing:
                self._lock.wait()
            return True

    def drain(self) -> None:
        """Finish what is granted, refuse everything new."""
        with self._lock:
            self._is_draining = True
            for key, peer in self._peers.items():
                self._wire.send_control(key, control.Drain(src_incarnation=self._incarnation, dst_incarnation=peer.incarnation))
            for transfer_id, waiting in list(self._offers.items()):
                del self._offers[transfer_id]
                self._deny(waiting.peer, waiting.offer, "the decode worker is draining")

    def close(self, reason: str = "the decode worker is shutting down") -> None:
        """Abort everything and say goodbye; events follow through deliver_events."""
        with self._lock:
            self._is_draining = True
            for grant in list(self._grants.values()):
                self._fail(grant, reason)
            for key, peer in self._peers.items():
                self._wire.send_control(key, control.Bye(src_incarnation=self._incarnation, dst_incarnation=peer.incarnation))
            self._offers.clear()
            self._peers.clear()

    # What the wire reports

    def on_control(self, peer: str, message: control.AnyControl, blob: bytes = b"") -> None:
        with self._lock:
            if peer in self._peers and message.src_incarnation == self._peers[peer].incarnation:
                self._peers[peer].last_heard_s = self._clock.now_s()
            if message.dst_incarnation != self._incarnation:
                self._counters["control_ignored"] += 1
                self._refuse_connection(peer, message, "this is another process than the one you look for; it restarted")
            elif isinstance(message, control.Hello):
                self._on_hello(peer, message)
            elif peer not in self._peers or self._peers[peer].incarnation != message.src_incarnation:
                self._counters["control_ignored"] += 1
                self._refuse_connection(peer, message, "say HELLO first")
            elif isinstance(message, control.Bye):
                self._lose_peer(peer, "the prefill worker is shutting down")
            elif isinstance(message, control.Offer):
                self._on_offer(peer, message)
            else:
                self._on_transfer_message(peer, message, blob)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        """The prefill worker is gone."""
        with self._lock:
            self._lose_peer(peer, reason)

    def on_data(self, lane: int, header_frame: bytes | memoryview, payload: memoryview) -> None:
        """One data message, on the thread of its lane. Never raises for what a peer sent."""
        try:
            header = DataHeader.unpack(header_frame, self._settings.kv_max_chunk_bytes)
        except ProtocolError:
            with self._lock:
                self._counters["bad_headers"] += 1
            return
        with self._lock:
            if header.msg_type is MessageType.PROBE:
                self._on_probe(lane, header)
                return
            grant = self._admit(header, payload)
            if grant is None:
                return
            if header.msg_type is MessageType.FENCE:
                self._on_fence(grant, lane, header)
                return
            source = self._source(grant, header, payload)
            if source is None or not self._claim(grant, header):
                return
        is_sound, fault = False, ""
        try:
            start = header.layer_start * self._layout.layer_nbytes
            block = self._memory.block_view(grant.block_ids[header.block_index])[start : start + header.payload_nbytes]
            # The sender's memory may change while it is read: what is checked is what has landed. It counts for nothing until then.
            is_shared = Flags.SHARED_MEMORY in header.flags
            if is_shared:
                copy_bytes(block, source)
            is_sound = checksum(block if is_shared else source) == header.checksum
            if is_sound and not is_shared:
                copy_bytes(block, source)
        except Exception as error:
            logger.exception("KV transfer %s: cannot write a block", grant.transfer_id)
            is_sound, fault = False, f"the decode worker cannot write a block: {error}"
        with self._lock:
            self._settle(grant, header, is_sound, fault)

    def count_malformed(self) -> None:
        """The wire refused or could not pass on a message."""
        with self._lock:
            self._counters["malformed_messages"] += 1

    def flush_credits(self) -> None:
        """Acknowledge what has not been yet; call when a lane runs dry."""
        with self._lock:
            for grant in self._grants.values():
                if grant.num_uncredited:
                    self._send_credit(grant)

    def tick(self) -> None:
        """Look at every deadline; call at least every TICK_S while transfers live."""
        with self._lock:
            now = self._clock.now_s()
            timeout = self._settings.kv_progress_timeout_s
            is_late, self._last_tick_s = now - self._last_tick_s > LATE_TICK_S, now
            granting = {grant.peer for grant in self._grants.values()}
            for key, peer in list(self._peers.items()):
                if is_late:
                    peer.last_heard_s = now
                elif key in granting and now - peer.last_heard_s > self._settings.kv_peer_timeout_s:
                    self._lose_peer(key, f"the prefill worker has been silent for {self._settings.kv_peer_timeout_s} s")
            for grant in list(self._grants.values()):
                if now > grant.deadline_s:
                    self._fail(grant, "the request's deadline passed during the KV transfer")
                elif now - grant.last_progress_s > timeout:
                    what = "offered nothing" if grant.phase is GrantPhase.EXPECTED else "neither sent a chunk nor renewed"
                    self._fail(grant, f"the prefill worker {what} for {timeout} s")
            for transfer_id, waiting in list(self._offers.items()):
                if now > waiting.deadline_s:
                    del self._offers[transfer_id]
                    self._deny(waiting.peer, waiting.offer, "the decode worker did not reserve blocks in time")
            for transfer_id, deadline in list(self._announced.items()):
                if now > deadline:
                    del self._announced[transfer_id]

    @property
    def has_events(self) -> bool:
        with self._lock:
            return any(event.grant.num_writing == 0 for event in self._outbox)

    def deliver_events(self) -> None:
        """Tell the listener what has ended; call from one thread only, without locks."""
        while True:
            with self._lock:
                event = next((event for event in self._outbox if event.grant.num_writing == 0), None)
                if event is None:
                    return
                self._outbox.remove(event)
            try:
                if event.info is not None:
                    self._events.on_committed(event.grant.transfer_id, event.grant.hidden_state, event.info)
                else:
                    self._events.on_failed(event.grant.transfer_id, event.reason)
            except Exception:
                logger.exception("a listener of KV transfer events failed")

    # Below here the lock is held. Connections

    def _on_hello(self, peer: str, message: control.Hello) -> None:
        if not message.protocol_min <= control.PROTOCOL_VERSION <= message.protocol_max:
            ours, theirs = control.PROTOCOL_VERSION, (message.protocol_min, message.protocol_max)
            self._refuse_connection(peer, message, f"incompatible peer: protocol is {ours} here and {theirs} there", "protocol")
            return
        difference = self._layout.first_difference(message.layout)
        if difference is None and (message.tp_size, ChecksumCode.XXH3_64.value in message.checksums) != (1, True):
            difference = ("tp_size", 1, message.tp_size) if message.tp_size != 1 else ("checksums", (1,), message.checksums)
        if difference is not None:
            field, ours_, theirs_ = difference
            self._refuse_connection(peer, message, f"incompatible peer: {field} is {ours_!r} here and {theirs_!r} there", field)
            return
        chosen = self._choose_transport(peer, message)
        if chosen is None:
            ours_, theirs_ = allowed(self._settings.kv_transport), message.transports
            self._refuse_connection(peer, message, f"no transport in common: {ours_} here and {theirs_} there", "transports")
            return
        is_near = message.network == self._network != "" and chosen.transport != "tcp" and bool(self._ipc_endpoints)
        endpoints = (self._ipc_endpoints if is_near else self._lane_endpoints)[: message.num_lanes]
        chosen.num_lanes = len(endpoints)
        self._peers[peer] = chosen
        self._wire.send_control(
            peer,
            control.HelloAck(
                src_incarnation=self._incarnation,
                dst_incarnation=message.src_incarnation,
                lane_endpoints=endpoints,
                max_chunk_bytes=min(message.max_chunk_bytes, self._settings.kv_max_chunk_bytes),
                transport=chosen.transport,
                are_lanes_encrypted=self._are_lanes_encrypted,
            ),
        )

    def _choose_transport(self, peer: str, message: control.Hello) -> _Peer | None:
        """The peer with the best transport that both ends allow and that works; None: there is none."""
        known = self._peers.get(peer)
        if known is not None and (known.incarnation, known.offer) == (message.src_incarnation, message.segment):
            return known
        for name in allowed(self._settings.kv_transport):
            chosen = _Peer(message.worker_id, message.src_incarnation, 0, name, self._clock.now_s(), message.segment)
            if name not in message.transports or (name == "ipc" and not (self._ipc_endpoints and message.network == self._network != "")):
                continue
            if name == "shm":
                try:
                    if message.segment is None:
                        continue
                    chosen.segment = SegmentReader(message.segment)
                except TransferError as error:
                    logger.info("no shared memory with %s: %s", message.worker_id, error.message)
                    continue
                self._report(chosen, probe_segment(chosen.segment))
            return chosen
        return None

    def _on_probe(self, lane: int, header: DataHeader) -> None:
        peer = next((peer for peer in self._peers.values() if peer.incarnation == header.src_incarnation), None)
        if peer is None or header.dst_incarnation != self._incarnation or not 0 <= lane < peer.num_lanes:
            self._counters["stale_frames"] += 1
            return
        # A lane opened again is measured anew: the time between two connections is not the wire's.
        probe = peer.probes[lane] = Probe() if header.chunk_seq == 0 else peer.probes.get(lane, Probe())
        probe.take(header.payload_nbytes, self._clock.now_s(), is_last=Flags.LAST in header.flags)
        if len(peer.probes) == peer.num_lanes and all(other.is_complete for other in peer.probes.values()):
            self._report(peer, sum(other.bytes_per_s for other in peer.probes.values()))
            peer.probes.clear()

    def _report(self, peer: _Peer, bytes_per_s: float) -> None:
        gb_per_s = bytes_per_s / 1e9
        logger.info("KV wire from %s: %s, %.2f GB/s", peer.name, peer.transport, gb_per_s)
        if gb_per_s < self._settings.kv_min_gb_per_s:
            logger.warning(
                "the KV wire from %s is slow: %s carries %.3f GB/s, less than kv_min_gb_per_s = %g",
                peer.name, peer.transport, gb_per_s, self._settings.kv_min_gb_per_s,
            )  # fmt: skip

    def _refuse_connection(self, peer: str, message: control.ControlMessage, reason: str, field: str | None = None) -> None:
        self._wire.send_control(
            peer,
            control.Deny(src_incarnation=self._incarnation, dst_incarnation=message.src_incarnation, reason=reason[:1000], field=field),
        )

    def _lose_peer(self, peer: str, reason: str) -> None:
        self._peers.pop(peer, None)
        for transfer_id in [transfer_id for transfer_id, waiting in self._offers.items() if waiting.peer == peer]:
            del self._offers[transfer_id]
            self._bury(transfer_id, _Tombstone(False, reason))
        for grant in [grant for grant in self._grants.values() if grant.peer == peer]:
            self._end(grant, reason)

    # Messages about one transfer

    def _on_offer(self, peer: str, offer: control.Offer) -> None:
        transfer_id = offer.transfer_id
        grant = self._grants.get(transfer_id)
        tombstone = self._tombstones.get(transfer_id)
        if grant is not None:
            self._grant_offer(grant, peer, offer)
        elif tombstone is not None:
            self._deny(peer, offer, tombstone.reason or "this transfer has ended already")
        elif self._is_draining:
            self._deny(peer, offer, "the decode worker is draining")
        elif transfer_id in self._offers:
            self._offers[transfer_id].peer = peer
            self._answer(peer, control.Renew(**self._returned(offer)))
        elif len(self._offers) >= MAX_WAITING_OFFERS:
            self._deny(peer, offer, f"{MAX_WAITING_OFFERS} offers wait already", retry_ms=100)
        else:
            now = self._clock.now_s()
            deadline = min(now + offer.deadline_s, self._announced.get(transfer_id, now + OFFER_WAIT_S))
            self._offers[transfer_id] = _WaitingOffer(peer, offer, deadline)

    def _grant_offer(self, grant: Grant, peer: str, offer: control.Offer) -> None:
        hashes = bytes.fromhex(offer.block_hashes)
        difference = ""
        if offer.attempt != grant.attempt:
            difference = f"attempt: {grant.attempt} here and {offer.attempt} there"
        elif grant.is_prefix and grant.phase is GrantPhase.EXPECTED:
            num_blocks = self._layout.num_blocks(offer.num_prompt_tokens)
            if not grant.shorten(offer.num_prompt_tokens, num_blocks, hashes):
                difference = "block_hashes: not the beginning of what is wanted"
        elif offer.num_prompt_tokens != grant.num_prompt_tokens:
            difference = f"num_prompt_tokens: {grant.num_prompt_tokens} here and {offer.num_prompt_tokens} there"
        elif grant.block_hashes not in (None, hashes):
            difference = "block_hashes: they differ"
        if difference:
            self._deny(peer, offer, f"the offer does not match the request: {difference}", field=difference.partition(":")[0])
            if offer.attempt >= grant.attempt:
                self._end(grant, f"the prefill worker offered something else: {difference}")
            return
        if grant.phase is GrantPhase.GRANTED and offer.src_incarnation != grant.src_incarnation:
            self._deny(peer, offer, "this transfer belongs to another prefill worker")
            return
        now = self._clock.now_s()
        grant.last_progress_s = now
        grant.peer = peer
        if grant.phase is GrantPhase.EXPECTED:
            grant.phase = GrantPhase.GRANTED
            grant.granted_s = now
            grant.src_incarnation = offer.src_incarnation
            grant.hash_set_digest = checksum(hashes)
            grant.num_lanes = self._peers[peer].num_lanes
            num_held = self._layout.num_blocks(grant.num_prompt_tokens) - len(grant.missing)
            self._counters["bytes_deduped"] += num_held * self._layout.block_nbytes
        self._answer(
            peer,
            control.Grant(
                **self._addressed(grant),
                grant_id=grant.grant_id,
                slot_gen=grant.slot_gen,
                missing=to_ranges(grant.missing),
                credits=self._settings.kv_credits,
            ),
        )

    def _on_transfer_message(self, peer: str, message: control.AnyControl, blob: bytes) -> None:
        transfer_id = message.transfer_id
        grant = self._grants.get(transfer_id)
        if not transfer_id or isinstance(message, control.AbortAck):
            return
        if grant is not None and (grant.attempt, grant.src_incarnation) == (message.attempt, message.src_incarnation):
            grant.last_progress_s = self._clock.now_s()
            grant.peer = peer
            if isinstance(message, control.Commit):
                self._on_commit(grant, message, blob)
            elif isinstance(message, control.Renew):
                self._send_credit(grant)
            elif isinstance(message, control.Abort):
                self._answer(peer, control.AbortAck(**self._returned(message)))
                self._end(grant, f"aborted by the prefill worker: {message.reason}")
            return
        if isinstance(message, control.Abort):
            self._offers.pop(transfer_id, None)
            if grant is None and transfer_id not in self._tombstones:
                self._bury(transfer_id, _Tombstone(False, f"aborted by the prefill worker: {message.reason}"))
            elif grant is not None and grant.phase is GrantPhase.EXPECTED and grant.attempt == message.attempt:
                self._end(grant, f"aborted by the prefill worker: {message.reason}")
            self._answer(peer, control.AbortAck(**self._returned(message)))
        elif isinstance(message, control.Commit | control.Renew) and transfer_id not in self._offers:
            self._answer_ended(peer, message)

    def _answer_ended(self, peer: str, message: control.AnyControl) -> None:
        tombstone = self._tombstones.get(message.transfer_id)
        if tombstone is not None and tombstone.is_committed:
            self._answer(peer, control.Committed(**self._returned(message)))
        else:
            reason = tombstone.reason if tombstone is not None else "the decode worker does not know this transfer"
            self._answer(peer, control.Abort(**self._returned(message), reason=reason[:1000]))

    def _on_commit(self, grant: Grant, message: control.Commit, blob: bytes) -> None:
        if len(blob) != message.hidden_nbytes or checksum(blob) != message.hidden_checksum:
            # Not kept: the sender repeats COMMIT until it is answered.
            self._counters["bad_checksums"] += 1
        elif grant.commit is None:
            grant.commit, grant.hidden_state = message, blob
        if not self._complete(grant):
            self._send_credit(grant)

    # Data

    def _admit(self, header: DataHeader, payload: memoryview) -> Grant | None:
        grant = self._grants.get(header.transfer_id.hex())
        if grant is None or grant.phase is not GrantPhase.GRANTED:
            # A fence brings no bytes, and one is always behind the last chunk: it often meets a transfer that is complete already.
            if header.msg_type is not MessageType.FENCE:
                self._counters["stale_frames"] += 1
            return None
        ours = (grant.attempt, grant.src_incarnation, self._incarnation, grant.grant_id, grant.slot_gen, grant.hash_set_digest)
        if ours != (
            header.attempt,
            header.src_incarnation,
            header.dst_incarnation,
            header.grant_id,
            header.slot_gen,
            header.hash_set_digest,
        ):
            self._counters["stale_frames"] += 1
            return None
        expected_nbytes = 0 if Flags.SHARED_MEMORY in header.flags else header.payload_nbytes
        if payload.nbytes != expected_nbytes:
            self._counters["bad_headers"] += 1
            return None
        return grant

    def _source(self, grant: Grant, header: DataHeader, payload: memoryview) -> memoryview | None:
        """Where a chunk's bytes are: in the message, or in the sender's segment. None: nowhere."""
        if Flags.SHARED_MEMORY not in header.flags:
            return payload
        peer = self._peers.get(grant.peer)
        try:
            if peer is None or peer.segment is None:
                raise TransferError("the sender has shown no segment")
            start = header.slot * self._layout.block_nbytes + header.layer_start * self._layout.layer_nbytes
            return peer.segment.read(start, header.payload_nbytes)
        except TransferError as error:
            self._counters["bad_headers"] += 1
            self._fail(grant, error.message)
            return None

    def _claim(self, grant: Grant, header: DataHeader) -> bool:
        if grant.has(header.chunk_seq):
            self._counters["chunks_duplicate"] += 1
            self._credit(grant)
            return False
        layout = self._layout
        ours = (layout.dtype, layout.layout, layout.num_kv_heads, layout.head_dim, layout.block_size, 1, ChecksumCode.XXH3_64)
        theirs = (header.dtype, header.layout, header.head_count, header.head_dim, header.block_tokens, header.block_count)
        try:
            if ours != (*theirs, header.checksum_algo) or header.layer_start + header.layer_count > layout.num_layers:
                raise ProtocolError("a chunk has another shape than agreed at HELLO")
            grant.claim(header)
        except ProtocolError as error:
            self._counters["bad_headers"] += 1
            self._fail(grant, error.message)
            return False
        return True

    def _settle(self, grant: Grant, header: DataHeader, is_sound: bool, fault: str) -> None:
        now = self._clock.now_s()
        grant.settle(header, is_sound, now)
        if grant.phase is GrantPhase.ENDED:
            self._lock.notify_all()
            return
        grant.last_progress_s = now
        if fault:
            self._fail(grant, fault)
        elif not is_sound:
            self._counters["bad_checksums"] += 1
            self._nack(grant, [header.chunk_seq], is_damaged=True)
        else:
            self._counters["chunks_received"] += 1
            self._counters["bytes_received"] += header.payload_nbytes
            self._credit(grant)
            self._complete(grant)

    def _on_fence(self, grant: Grant, lane: int, header: DataHeader) -> None:
        grant.last_progress_s = self._clock.now_s()
        lost, unseen = grant.pass_fence(lane, header)
        self._send_credit(grant)
        if unseen:
            grant.repeat_nack(unseen)
            self._send_nack(grant, unseen)
        if lost:
            self._nack(grant, lost, is_damaged=False)

    def _nack(self, grant: Grant, seqs: Sequence[int], *, is_damaged: bool) -> None:
        self._counters["chunks_nacked"] += len(seqs)
        try:
            grant.record_failure(seqs, is_damaged=is_damaged)
        except TransferError as error:
            self._fail(grant, error.message)
            return
        self._send_nack(grant, seqs)

    def _send_nack(self, grant: Grant, seqs: Sequence[int]) -> None:
        self._answer(grant.peer, control.Nack(**self._addressed(grant), nack_seq=grant.nack_seq, chunks=to_ranges(seqs)))

    def _credit(self, grant: Grant) -> None:
        grant.num_uncredited += 1
        if grant.num_uncredited >= self._credit_batch:
            self._send_credit(grant)

    def _send_credit(self, grant: Grant) -> None:
        grant.num_uncredited = 0
        self._answer(grant.peer, control.Credit(**self._addressed(grant), received=grant.received.ranges()))

    def _complete(self, grant: Grant) -> bool:
        """COMMITTED once the commit is here and every byte of every missing block is. True when the transfer has ended."""
        if grant.commit is None or not grant.is_covered:
            return False
        try:
            grant.check_commit(grant.commit)
        except PagewireError as error:
            self._fail(grant, error.message)
            return True
        self._answer(grant.peer, control.Committed(**self._addressed(grant)))
        info = CommitInfo(
            transport=self._peers[grant.peer].transport,
            num_prompt_tokens=grant.num_prompt_tokens,
            num_cached_tokens=grant.commit.num_cached_tokens,
            num_blocks_missing=len(grant.missing),
            num_bytes=grant.num_bytes,
            num_chunks=len(grant.received),
            num_chunks_failed=grant.num_failed,
            expected_s=grant.expected_s,
            granted_s=grant.granted_s,
            first_chunk_s=grant.first_chunk_s,
            last_chunk_s=grant.last_chunk_s,
            committed_s=self._clock.now_s(),
        )
        self._end(grant, "", info)
        return True

    # Ends and answers

    def _fail(self, grant: Grant, reason: str) -> None:
        self._send_abort(grant, reason)
        self._end(grant, reason)

    def _send_abort(self, grant: Grant, reason: str) -> None:
        if grant.peer:
            self._answer(grant.peer, control.Abort(**self._addressed(grant), reason=reason[:1000]))

    def _end(self, grant: Grant, reason: str, info: CommitInfo | None = None) -> None:
        if self._grants.pop(grant.transfer_id, None) is None:
            return
        grant.phase = GrantPhase.ENDED
        self._bury(grant.transfer_id, _Tombstone(info is not None, reason))
        self._outbox.append(_Event(grant, info, reason))
        self._counters["transfers_committed" if info is not None else "transfers_failed"] += 1

    def _bury(self, transfer_id: str, tombstone: _Tombstone) -> None:
        self._tombstones[transfer_id] = tombstone
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _deny(self, peer: str, offer: control.Offer, reason: str, *, field: str | None = None, retry_ms: int = 0) -> None:
        self._counters["offers_denied"] += 1
        self._answer(peer, control.Deny(**self._returned(offer), reason=reason[:1000], field=field, retry_ms=retry_ms))

    def _answer(self, peer: str, message: control.ControlMessage) -> None:
        self._wire.send_control(peer, message)

    def _addressed(self, grant: Grant) -> control.Address:
        return {
            "transfer_id": grant.transfer_id,
            "attempt": grant.attempt,
            "src_incarnation": self._incarnation,
            "dst_incarnation": grant.src_incarnation,
            "traceparent": grant.traceparent,
        }

    def _returned(self, message: control.ControlMessage) -> control.Address:
        return {
            "transfer_id": message.transfer_id,
            "attempt": message.attempt,
            "src_incarnation": self._incarnation,
            "dst_incarnation": message.src_incarnation,
            "traceparent": message.traceparent,
        }
