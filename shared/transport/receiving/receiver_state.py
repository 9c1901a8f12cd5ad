"""The receiving half of KVX/1 as a state machine: reservations, control messages, data messages and ticks in; answers and events out.

The receiver decides where bytes land: a data message is accepted only for a live grant whose every identity it names, so a late
or foreign message can never touch a block. Thread-safe: one short lock; hashing and copying run outside it, counted as writers,
and a transfer's blocks are handed back (abort returns, an event is delivered) only when it has no writer.

A transfer from a tensor-parallel prefill worker has a stream from each of its ranks; it commits when all of them are complete.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.clock import Clock
from shared.config import Settings
from shared.errors import PagewireError, ProtocolError, TransferError, reason_of
from shared.ids import new_grant_id
from shared.transport.connector import BlockMemory, CommitInfo, ReceiverEvents, ReceiverWire
from shared.transport.protocol import control
from shared.transport.protocol.frames import ChecksumCode, DataHeader, Flags, MessageType, checksum, chunk_checksum, join_checksums
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.limits import (
    LATE_TICK_S,
    MAX_TOMBSTONES,
    MAX_WAITING_OFFERS,
    MAX_WAITING_OFFERS_PER_PEER,
    OFFER_WAIT_S,
)
from shared.transport.protocol.region import Region
from shared.transport.protocol.seq_ranges import to_ranges
from shared.transport.protocol.wire_plan import WirePlan, source_ranks
from shared.transport.receiving.incoming import Incoming, Stream
from shared.transport.receiving.peer_table import LaneAddresses, PeerTable

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
    "control_throttled",
    "malformed_messages",
    "offers_denied",
    "transfers_expected",
    "transfers_committed",
    "transfers_failed",
)


@dataclass(slots=True)
class _WaitingOffer:
    peer: str
    offer: control.Offer
    deadline_s: float


@dataclass(slots=True)
class _Event:
    """The end of a transfer, to be told when it has no writer. `info` is set on success."""

    incoming: Incoming
    hidden_state: bytes
    info: CommitInfo | None
    reason: str
    is_cancelled: bool


@dataclass(slots=True, frozen=True)
class _Tombstone:
    is_committed: bool
    reason: str
    is_cancelled: bool = False


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
        wire: ReceiverWire,
        lanes: LaneAddresses,
    ) -> None:
        """Raises ConfigurationError when one layer of a block does not fit a chunk."""
        layout.check_chunk(settings.kv_max_chunk_bytes)
        self._layout = layout
        self._memory = memory
        self._incarnation = incarnation
        self._events = events
        self._clock = clock
        self._settings = settings
        self._wire = wire
        self._lock = threading.Condition()
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._peers = PeerTable(layout, memory, incarnation, clock, settings, wire, lanes, self._counters)
        self._incoming: dict[str, Incoming] = {}
        self._offers: dict[tuple[str, int], _WaitingOffer] = {}
        """By transfer and rank of the sender."""
        self._announced: dict[str, float] = {}
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()
        self._outbox: deque[_Event] = deque()
        self._slot_gen = 0
        self._last_tick_s = 0.0
        self._is_draining = False
        self._credit_batch = max(1, settings.kv_credits // 4)

    def counters(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counters)

    @property
    def num_transfers(self) -> int:
        with self._lock:
            return len(self._incoming) + len(self._offers)

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
            for (other_id, _), waiting in self._offers.items():
                if other_id == transfer_id:
                    waiting.deadline_s = deadline

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
        src_tp_size: int = 1,
    ) -> None:
        """Blocks are reserved: grant the offer, now or when it comes.

        `block_ids`: the block of every index of the prompt's chain, held or reserved; `missing`: the indices to be sent.
        `deadline_s`: seconds from now for the whole transfer. `block_hashes`: compared with the offer's when given.
        `is_prefix`: full blocks, of which the first ones alone may be offered, or none; the commit then tells how many came.
        `src_tp_size`: ranks of the prefill worker. Raises TransferError when the arguments contradict each other or the transfer is
        expected already.
        """
        num_blocks = self._layout.num_blocks(num_prompt_tokens)
        if len(block_ids) < num_blocks:
            raise TransferError(f"{num_prompt_tokens} prompt tokens need {num_blocks} blocks; block_ids has {len(block_ids)}")
        if any(not 0 <= index < num_blocks for index in missing):
            raise TransferError(f"missing must be indices of the prompt's {num_blocks} blocks, not block ids: {list(missing)[:8]}")
        with self._lock:
            if transfer_id in self._incoming:
                raise TransferError(f"transfer {transfer_id} is expected already")
            now = self._clock.now_s()
            self._slot_gen = (self._slot_gen + 1) & 0xFFFF_FFFF
            incoming = Incoming(
                transfer_id=transfer_id,
                attempt=attempt,
                block_ids=tuple(block_ids),
                missing=frozenset(missing),
                num_prompt_tokens=num_prompt_tokens,
                deadline_s=now + deadline_s,
                traceparent=traceparent,
                slot_gen=self._slot_gen,
                expected_s=now,
                block_hashes=None if block_hashes is None else b"".join(block_hashes),
                ranks=source_ranks(self._layout.num_kv_heads, src_tp_size, self._layout.tp_rank, self._layout.tp_size),
                src_tp_size=src_tp_size,
                is_prefix=is_prefix,
                last_progress_s=now,
            )
            self._announced.pop(transfer_id, None)
            self._incoming[transfer_id] = incoming
            self._counters["transfers_expected"] += 1
            tombstone = self._tombstones.get(transfer_id)
            waiting = self._pop_offers(transfer_id)
            if tombstone is not None:
                self._end(incoming, tombstone.reason or "this transfer has ended already", is_cancelled=tombstone.is_cancelled)
            for offer in waiting:
                self._on_offer(offer.peer, offer.offer)

    def deny(self, transfer_id: str, reason: str, retry_ms: int = 0) -> None:
        """No room, or not wanted: refuse the offer, now or when it comes."""
        with self._lock:
            self._announced.pop(transfer_id, None)
            if transfer_id not in self._incoming:
                self._bury(transfer_id, _Tombstone(False, reason))
            for waiting in self._pop_offers(transfer_id):
                self._deny(waiting.peer, waiting.offer, reason, retry_ms=retry_ms)

    def abort(self, transfer_id: str, reason: str) -> bool:
        """End a transfer here; on return nothing writes into its blocks, or ever will.

        True: ended by this call, no event will follow. False: it had ended before, or was never expected; an event may have
        been delivered. Waits only for copies in progress.
        """
        with self._lock:
            for waiting in self._pop_offers(transfer_id):
                self._deny(waiting.peer, waiting.offer, reason)
            self._announced.pop(transfer_id, None)
            incoming = self._incoming.get(transfer_id)
            if incoming is not None:
                self._fail(incoming, reason)
            event = next((event for event in self._outbox if event.incoming.transfer_id == transfer_id), None)
            if event is None:
                if transfer_id not in self._tombstones:
                    self._bury(transfer_id, _Tombstone(False, reason))
                return False
            self._outbox.remove(event)
            while event.incoming.num_writing:
                self._lock.wait()
            return True

    def drain(self) -> None:
        """Finish what is granted, refuse everything new."""
        with self._lock:
            self._is_draining = True
            for key, peer in self._peers.items():
                self._wire.send_control(key, control.Drain(src_incarnation=self._incarnation, dst_incarnation=peer.incarnation))
            waiting, self._offers = list(self._offers.values()), {}
            for offer in waiting:
                self._deny(offer.peer, offer.offer, "the decode worker is draining")

    def close(self, reason: str = "the decode worker is shutting down") -> None:
        """Abort everything and say goodbye; events follow through deliver_events."""
        with self._lock:
            self._is_draining = True
            for incoming in list(self._incoming.values()):
                self._fail(incoming, reason)
            for key, peer in self._peers.items():
                self._wire.send_control(key, control.Bye(src_incarnation=self._incarnation, dst_incarnation=peer.incarnation))
            self._offers.clear()
            self._peers.clear()

    # What the wire reports

    def on_control(self, key: str, message: control.AnyControl, blob: bytes = b"") -> None:
        with self._lock:
            if not self._peers.hear(key, message.src_incarnation):
                return
            if message.dst_incarnation != self._incarnation:
                self._counters["control_ignored"] += 1
                self._peers.refuse(key, message.src_incarnation, "this is another process than the one you look for; it restarted")
            elif isinstance(message, control.Hello):
                self._peers.welcome(key, message, lambda reason: self._lose_peer(key, reason))
            elif self._peers.get(key, message.src_incarnation) is None:
                self._counters["control_ignored"] += 1
                self._peers.refuse(key, message.src_incarnation, "say HELLO first", "hello")
            elif isinstance(message, control.Bye):
                self._lose_peer(key, "the prefill worker is shutting down")
            elif isinstance(message, control.Offer):
                self._on_offer(key, message)
            else:
                self._on_transfer_message(key, message, blob)

    def refuse_version(self, key: str, error: control.OtherVersionError) -> None:
        """Somebody said HELLO in a version that is not ours."""
        with self._lock:
            if not self._peers.hear(key, error.src_incarnation):
                return
            self._counters["control_ignored"] += 1
            self._peers.refuse(key, error.src_incarnation, error.message, "protocol")

    def on_peer_lost(self, key: str, reason: str) -> None:
        """The prefill worker is gone."""
        with self._lock:
            self._lose_peer(key, reason)

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
                self._peers.take_probe(lane, header)
                return
            stream = self._admit(header, payload)
            if stream is None:
                return
            if header.msg_type is MessageType.FENCE:
                self._on_fence(stream, lane, header)
                return
            is_readable = not header.has_places or checksum(payload) == header.segment_offset
            sources = self._sources(stream, header, payload) if is_readable else [payload]
            if not sources or not self._claim(stream, header):
                return
        is_sound, fault = False, ""
        try:
            is_sound = is_readable and self._write(stream, header, sources)
        except Exception as error:
            logger.exception("KV transfer %s: cannot write a block", stream.incoming.transfer_id)
            fault = f"the decode worker cannot write a block: {reason_of(error)}"
        with self._lock:
            self._settle(stream, header, is_sound, fault)

    def count_malformed(self) -> None:
        """The wire refused or could not pass on a message."""
        with self._lock:
            self._counters["malformed_messages"] += 1

    def flush_credits(self) -> None:
        """Acknowledge what has not been yet; call when a lane runs dry."""
        with self._lock:
            for incoming in self._incoming.values():
                for stream in incoming.streams.values():
                    if stream.num_uncredited:
                        self._send_credit(stream)

    def tick(self) -> None:
        """Look at every deadline; call at least every TICK_S while transfers live."""
        with self._lock:
            now = self._clock.now_s()
            timeout = self._settings.kv_progress_timeout_s
            is_late, self._last_tick_s = now - self._last_tick_s > LATE_TICK_S, now
            if is_late:
                self._peers.forgive_silence(now)
            granting = [stream.peer for incoming in self._incoming.values() for stream in incoming.streams.values()]
            for key in self._peers.silent(granting, now):
                self._lose_peer(key, f"the prefill worker has been silent for {self._settings.kv_peer_timeout_s} s")
            for incoming in list(self._incoming.values()):
                if now > incoming.deadline_s:
                    self._fail(incoming, "the request's deadline passed during the KV transfer")
                elif not incoming.is_granted and now - incoming.last_granted_s > timeout:
                    # Whatever the other ranks of its sender say meanwhile.
                    missing = [rank for rank in incoming.ranks if rank not in incoming.streams]
                    who = "the prefill worker" if len(incoming.ranks) == 1 else f"ranks {missing} of the prefill worker"
                    self._fail(incoming, f"{who} offered nothing for {timeout} s")
                elif now - incoming.last_progress_s > timeout:
                    self._fail(incoming, f"the prefill worker neither sent a chunk nor renewed for {timeout} s")
            for at, waiting in list(self._offers.items()):
                if now > waiting.deadline_s:
                    del self._offers[at]
                    self._deny(waiting.peer, waiting.offer, "the decode worker did not reserve blocks in time")
            for transfer_id, deadline in list(self._announced.items()):
                if now > deadline:
                    del self._announced[transfer_id]

    @property
    def has_events(self) -> bool:
        with self._lock:
            return any(event.incoming.num_writing == 0 for event in self._outbox)

    def deliver_events(self) -> None:
        """Tell the listener what has ended; call from one thread only, without locks."""
        while True:
            with self._lock:
                event = next((event for event in self._outbox if event.incoming.num_writing == 0), None)
                if event is None:
                    return
                self._outbox.remove(event)
            try:
                if event.info is not None:
                    self._events.on_committed(event.incoming.transfer_id, event.hidden_state, event.info)
                else:
                    self._events.on_failed(event.incoming.transfer_id, event.reason, event.is_cancelled)
            except Exception:
                logger.exception("a listener of KV transfer events failed")

    # Below here the lock is held

    def _lose_peer(self, key: str, reason: str) -> None:
        self._peers.pop(key)
        for (transfer_id, rank), waiting in list(self._offers.items()):
            if waiting.peer == key:
                del self._offers[transfer_id, rank]
                self._bury(transfer_id, _Tombstone(False, reason))
        for incoming in list(self._incoming.values()):
            if any(stream.peer == key for stream in incoming.streams.values()):
                self._fail(incoming, reason, to_all_but=key)

    # Offers

    def _pop_offers(self, transfer_id: str) -> list[_WaitingOffer]:
        return [self._offers.pop(at) for at in list(self._offers) if at[0] == transfer_id]

    def _on_offer(self, key: str, offer: control.Offer) -> None:
        transfer_id = offer.transfer_id
        incoming = self._incoming.get(transfer_id)
        tombstone = self._tombstones.get(transfer_id)
        at = transfer_id, self._peers[key].plan.src.tp_rank
        if incoming is not None:
            self._grant(incoming, key, offer)
        elif tombstone is not None:
            self._deny(key, offer, tombstone.reason or "this transfer has ended already")
        elif self._is_draining:
            self._deny(key, offer, "the decode worker is draining")
        elif at in self._offers:
            self._offers[at].peer = key
            self._answer(key, control.Renew(**self._returned(offer)))
        elif len(self._offers) >= MAX_WAITING_OFFERS:
            self._deny(key, offer, f"{MAX_WAITING_OFFERS} offers wait already", retry_ms=100)
        elif sum(waiting.peer == key for waiting in self._offers.values()) >= MAX_WAITING_OFFERS_PER_PEER:
            self._deny(key, offer, f"{MAX_WAITING_OFFERS_PER_PEER} offers of yours wait already", retry_ms=100)
        else:
            now = self._clock.now_s()
            deadline = min(now + offer.deadline_s, self._announced.get(transfer_id, now + OFFER_WAIT_S))
            self._offers[at] = _WaitingOffer(key, offer, deadline)

    def _grant(self, incoming: Incoming, key: str, offer: control.Offer) -> None:
        plan = self._peers[key].plan
        rank = plan.src.tp_rank
        hashes = bytes.fromhex(offer.block_hashes)
        difference = ""
        if offer.attempt != incoming.attempt:
            difference = f"attempt: {incoming.attempt} here and {offer.attempt} there"
        elif plan.src.tp_size != incoming.src_tp_size:
            difference = f"tp_size: {incoming.src_tp_size} here and {plan.src.tp_size} there"
        elif incoming.is_prefix and not incoming.streams:
            num_blocks = self._layout.num_blocks(offer.num_prompt_tokens)
            if not incoming.shorten(offer.num_prompt_tokens, num_blocks, hashes):
                difference = "block_hashes: not the beginning of what is wanted"
        elif offer.num_prompt_tokens != incoming.num_prompt_tokens:
            difference = f"num_prompt_tokens: {incoming.num_prompt_tokens} here and {offer.num_prompt_tokens} there"
        elif incoming.block_hashes not in (None, hashes):
            difference = "block_hashes: they differ"
        if difference:
            self._deny(key, offer, f"the offer does not match the request: {difference}", field=difference.partition(":")[0])
            if offer.attempt >= incoming.attempt:
                self._fail(incoming, f"the prefill worker offered something else: {difference}")
            return
        now = self._clock.now_s()
        stream = incoming.streams.get(rank)
        if stream is not None and offer.src_incarnation != stream.src_incarnation:
            self._deny(key, offer, "this transfer belongs to another prefill worker")
            return
        incoming.last_progress_s = now
        if stream is None:
            stream = Stream(
                incoming=incoming,
                peer=key,
                src_incarnation=offer.src_incarnation,
                plan=plan,
                grant_id=new_grant_id(),
                hash_set_digest=checksum(hashes),
                granted_s=now,
                missing=plan.missing_units(incoming.missing, incoming.num_prompt_tokens),
                device=self._peers[key].device,
            )
            incoming.streams[rank] = stream
            num_held = plan.num_units(incoming.num_prompt_tokens) - len(stream.missing)
            self._counters["bytes_deduped"] += num_held * plan.layer_nbytes(plan.unit_tokens) * self._layout.num_layers
        stream.peer = key
        self._answer(
            key,
            control.Grant(
                **self._addressed(stream),
                grant_id=stream.grant_id,
                slot_gen=incoming.slot_gen,
                missing=to_ranges(stream.missing),
                credits=self._settings.kv_credits,
            ),
        )

    # Messages about one transfer

    def _on_transfer_message(self, key: str, message: control.AnyControl, blob: bytes) -> None:
        transfer_id = message.transfer_id
        if not transfer_id or isinstance(message, control.AbortAck):
            return
        incoming = self._incoming.get(transfer_id)
        stream = incoming.streams.get(self._peers[key].plan.src.tp_rank) if incoming is not None else None
        if stream is not None and (stream.incoming.attempt, stream.src_incarnation) == (message.attempt, message.src_incarnation):
            stream.incoming.last_progress_s = self._clock.now_s()
            stream.peer = key
            if isinstance(message, control.Commit):
                self._on_commit(stream, message, blob)
            elif isinstance(message, control.Renew):
                self._send_credit(stream)
            elif isinstance(message, control.Abort):
                self._answer(key, control.AbortAck(**self._returned(message)))
                self._abort(stream.incoming, message, key)
            return
        if isinstance(message, control.Abort):
            self._pop_offers(transfer_id)
            if incoming is None and transfer_id not in self._tombstones:
                self._bury(transfer_id, _Tombstone(False, f"aborted by the prefill worker: {message.reason}", message.is_cancelled))
            elif incoming is not None and stream is None and incoming.attempt == message.attempt:
                self._abort(incoming, message, key)
            self._answer(key, control.AbortAck(**self._returned(message)))
        elif isinstance(message, control.Commit | control.Renew) and not any(at[0] == transfer_id for at in self._offers):
            self._answer_ended(key, message)

    def _abort(self, incoming: Incoming, message: control.Abort, key: str) -> None:
        self._fail(incoming, f"aborted by the prefill worker: {message.reason}", to_all_but=key, is_cancelled=message.is_cancelled)

    def _answer_ended(self, key: str, message: control.AnyControl) -> None:
        tombstone = self._tombstones.get(message.transfer_id)
        if tombstone is not None and tombstone.is_committed:
            self._answer(key, control.Committed(**self._returned(message)))
        else:
            reason = tombstone.reason if tombstone is not None else "the decode worker does not know this transfer"
            self._answer(key, control.Abort(**self._returned(message), reason=reason[:1000]))

    def _on_commit(self, stream: Stream, message: control.Commit, blob: bytes) -> None:
        if len(blob) != message.hidden_nbytes or checksum(blob) != message.hidden_checksum:
            # Not kept: the sender repeats COMMIT until it is answered.
            self._counters["bad_checksums"] += 1
        elif stream.commit is None:
            stream.commit, stream.hidden_state = message, blob
        if not self._complete(stream.incoming):
            self._send_credit(stream)

    # Data

    def _admit(self, header: DataHeader, payload: memoryview) -> Stream | None:
        incoming = self._incoming.get(header.transfer_id.hex())
        stream = incoming.streams.get(header.src_tp_rank) if incoming is not None else None
        if stream is None:
            # A fence brings no bytes, and one is always behind the last chunk: it often meets a transfer that is complete already.
            if header.msg_type is not MessageType.FENCE:
                self._counters["stale_frames"] += 1
            return None
        ours = (stream.incoming.attempt, stream.src_incarnation, self._incarnation, stream.grant_id, stream.incoming.slot_gen)
        theirs = (header.attempt, header.src_incarnation, header.dst_incarnation, header.grant_id, header.slot_gen)
        if (*ours, stream.hash_set_digest) != (*theirs, header.hash_set_digest):
            self._counters["stale_frames"] += 1
            return None
        if payload.nbytes != header.frame_nbytes:
            self._counters["bad_headers"] += 1
            return None
        return stream

    def _sources(self, stream: Stream, header: DataHeader, payload: memoryview) -> list[memoryview]:
        """Where a chunk's bytes are: in the message, or in the sender's segment, in one piece or each unit by itself. Empty: nowhere."""
        if Flags.DEVICE_MEMORY in header.flags and stream.device is None:
            self._counters["bad_headers"] += 1
            self._fail(stream.incoming, "the sender has shown no GPU memory")
            return []
        if Flags.SHARED_MEMORY not in header.flags:
            return [payload]
        peer = self._peers.get(stream.peer, stream.src_incarnation)
        try:
            if peer is None or peer.segment is None:
                raise TransferError("the sender has shown no segment")
            if Flags.SCATTERED not in header.flags:
                return [peer.segment.read(header.segment_offset, header.payload_nbytes)]
            offsets, unit_nbytes = struct.unpack(f"<{header.block_count}Q", payload), header.payload_nbytes // header.block_count
            return [peer.segment.read(offset, unit_nbytes) for offset in offsets]
        except TransferError as error:
            self._counters["bad_headers"] += 1
            self._fail(stream.incoming, error.message)
            return []

    def _claim(self, stream: Stream, header: DataHeader) -> bool:
        if stream.has(header.chunk_seq):
            self._counters["chunks_duplicate"] += 1
            self._credit(stream)
            return False
        try:
            if header.checksum_algo is not ChecksumCode.XXH3_64 or not stream.plan.describes(header):
                raise ProtocolError("a chunk has another shape than agreed at HELLO")
            if header.chunk_seq >= len(stream.received) + self._settings.kv_credits:
                raise ProtocolError(f"chunk {header.chunk_seq} is beyond the {self._settings.kv_credits} credits of this grant")
            stream.claim(header)
        except ProtocolError as error:
            self._counters["bad_headers"] += 1
            self._fail(stream.incoming, error.message)
            return False
        return True

    def _write(self, stream: Stream, header: DataHeader, sources: Sequence[memoryview]) -> bool:
        """Without the lock: into the blocks, if it is what was sent."""
        plan = stream.plan
        regions = plan.target_regions(header, stream.incoming.block_ids)
        if Flags.DEVICE_MEMORY in header.flags:
            assert self._memory.gpu is not None
            offsets = struct.unpack(f"<{header.block_count}Q", sources[0])
            return self._memory.gpu.write_from(stream.device, offsets, regions) == header.checksum
        if len(sources) == 1:
            return self._write_units(plan, header, regions, sources[0]) == header.checksum
        landed = [self._write_units(plan, header, [region], source) for region, source in zip(regions, sources, strict=True)]
        return join_checksums(landed) == header.checksum

    def _write_units(self, plan: WirePlan, header: DataHeader, regions: Sequence[Region], source: memoryview) -> int:
        """The units of `regions` stand in `source`. Gives their checksum."""
        decoded = plan.codec.decode(source, 2 * header.layer_count * len(regions))
        # What is checked is what has landed: the sender's memory may change while it is read. It counts for nothing until then.
        landed = self._memory.write(regions, decoded)
        if landed is None or decoded is not source:
            return chunk_checksum(source, len(regions), self._memory.checksum)
        return landed

    def _settle(self, stream: Stream, header: DataHeader, is_sound: bool, fault: str) -> None:
        now = self._clock.now_s()
        stream.settle(header, is_sound, now)
        if stream.incoming.has_ended:
            self._lock.notify_all()
            return
        stream.incoming.last_progress_s = now
        if fault:
            self._fail(stream.incoming, fault)
        elif not is_sound:
            self._counters["bad_checksums"] += 1
            self._nack(stream, [header.chunk_seq], is_damaged=True)
        else:
            self._counters["chunks_received"] += 1
            self._counters["bytes_received"] += header.payload_nbytes
            self._credit(stream)
            self._complete(stream.incoming)

    def _on_fence(self, stream: Stream, lane: int, header: DataHeader) -> None:
        stream.incoming.last_progress_s = self._clock.now_s()
        lost, unseen = stream.pass_fence(lane, header)
        self._send_credit(stream)
        if unseen:
            stream.repeat_nack(unseen)
            self._send_nack(stream, unseen)
        if lost:
            self._nack(stream, lost, is_damaged=False)

    def _nack(self, stream: Stream, seqs: Sequence[int], *, is_damaged: bool) -> None:
        self._counters["chunks_nacked"] += len(seqs)
        try:
            stream.record_failure(seqs, is_damaged=is_damaged)
        except TransferError as error:
            self._fail(stream.incoming, error.message)
            return
        self._send_nack(stream, seqs)

    def _send_nack(self, stream: Stream, seqs: Sequence[int]) -> None:
        self._answer(stream.peer, control.Nack(**self._addressed(stream), nack_seq=stream.nack_seq, chunks=to_ranges(seqs)))

    def _credit(self, stream: Stream) -> None:
        stream.num_uncredited += 1
        if stream.num_uncredited >= self._credit_batch:
            self._send_credit(stream)

    def _send_credit(self, stream: Stream) -> None:
        stream.num_uncredited = 0
        self._answer(stream.peer, control.Credit(**self._addressed(stream), received=stream.received.ranges()))

    def _complete(self, incoming: Incoming) -> bool:
        """COMMITTED to every rank once all have sent everything and said so. True when the transfer has ended."""
        if not incoming.is_complete:
            return False
        streams = [incoming.streams[rank] for rank in incoming.ranks]
        try:
            for stream in streams:
                assert stream.commit is not None
                stream.check_commit(stream.commit)
        except PagewireError as error:
            self._fail(incoming, error.message)
            return True
        for stream in streams:
            self._answer(stream.peer, control.Committed(**self._addressed(stream)))
        first = streams[0]
        assert first.commit is not None
        info = CommitInfo(
            transport=self._peers[first.peer].transport,
            src_dtype=first.plan.src.dtype,
            num_prompt_tokens=incoming.num_prompt_tokens,
            num_cached_tokens=first.commit.num_cached_tokens,
            num_blocks_missing=len(incoming.missing),
            num_bytes=sum(stream.num_bytes for stream in streams),
            num_chunks=sum(len(stream.received) for stream in streams),
            num_chunks_failed=sum(stream.num_failed for stream in streams),
            expected_s=incoming.expected_s,
            granted_s=max(stream.granted_s for stream in streams),
            first_chunk_s=min((stream.first_chunk_s for stream in streams if stream.first_chunk_s is not None), default=None),
            last_chunk_s=max((stream.last_chunk_s for stream in streams if stream.last_chunk_s is not None), default=None),
            committed_s=self._clock.now_s(),
        )
        self._end(incoming, "", first.hidden_state, info)
        return True

    # Ends and answers

    def _fail(self, incoming: Incoming, reason: str, to_all_but: str = "", *, is_cancelled: bool = False) -> None:
        """Tell every rank that was granted something, then end."""
        for stream in incoming.streams.values():
            if stream.peer != to_all_but:
                self._answer(stream.peer, control.Abort(**self._addressed(stream), reason=reason[:1000]))
        self._end(incoming, reason, is_cancelled=is_cancelled)

    def _end(
        self, incoming: Incoming, reason: str, hidden_state: bytes = b"", info: CommitInfo | None = None, *, is_cancelled: bool = False
    ) -> None:
        if self._incoming.pop(incoming.transfer_id, None) is None:
            return
        incoming.has_ended = True
        self._bury(incoming.transfer_id, _Tombstone(info is not None, reason, is_cancelled))
        self._outbox.append(_Event(incoming, hidden_state, info, reason, is_cancelled))
        self._counters["transfers_committed" if info is not None else "transfers_failed"] += 1

    def _bury(self, transfer_id: str, tombstone: _Tombstone) -> None:
        self._tombstones[transfer_id] = tombstone
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _deny(self, key: str, offer: control.Offer, reason: str, *, field: str | None = None, retry_ms: int = 0) -> None:
        self._counters["offers_denied"] += 1
        self._answer(key, control.Deny(**self._returned(offer), reason=reason[:1000], field=field, retry_ms=retry_ms))

    def _answer(self, key: str, message: control.ControlMessage) -> None:
        self._wire.send_control(key, message)

    def _addressed(self, stream: Stream) -> control.Address:
        return {
            "transfer_id": stream.incoming.transfer_id,
            "attempt": stream.incoming.attempt,
            "src_incarnation": self._incarnation,
            "dst_incarnation": stream.src_incarnation,
            "traceparent": stream.incoming.traceparent,
        }

    def _returned(self, message: control.ControlMessage) -> control.Address:
        return {
            "transfer_id": message.transfer_id,
            "attempt": message.attempt,
            "src_incarnation": self._incarnation,
            "dst_incarnation": message.src_incarnation,
            "traceparent": message.traceparent,
        }
