"""Frames of KVX/1 as an enemy would send them, to both state machines in the middle of transfers, and what must never happen then.

DataFuzzer: DataHeader.unpack and ReceiverState.on_data. ControlFuzzer: control.decode, ReceiverState.on_control and SenderState.on_control.
Frames are valid ones, changed: bits, fields with the CRC made right again, lengths, frames of other transfers and of the past. As a
program: `kv_frame_fuzzer.py NUM_FRAMES SEED` fuzzes under a limit on memory and prints what it saw, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from kv_transfer_pairs import LAYOUT, SETTINGS, ReceiverLog, SenderLog

from shared.clock import ManualClock
from shared.errors import ProtocolError
from shared.messages import KVPeer
from shared.transport.connector import DataMessage, StoredBytes
from shared.transport.host_blocks import HostBlocks
from shared.transport.protocol import control
from shared.transport.protocol.frames import (
    HEADER_NBYTES,
    ChecksumCode,
    DataHeader,
    Flags,
    KVDtype,
    KVPart,
    MessageType,
    ScaleCode,
    checksum,
    chunk_checksum,
)
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.region import Region
from shared.transport.protocol.seq_ranges import from_ranges, to_ranges
from shared.transport.protocol.wire_plan import WirePlan
from shared.transport.receiving.peer_table import LaneAddresses
from shared.transport.receiving.receiver_state import ReceiverState
from shared.transport.sending.chunk_reading import read_message
from shared.transport.sending.sender_state import SenderState
from shared.transport.wires.shared_segment import SharedSegment
from shared.transport.wires.wire_speed import probe_messages

NUM_BLOCKS, NUM_TOKENS, CHAIN = 64, 30, 8
"""Blocks of a pool; tokens and blocks of each transfer."""
MAX_FRAME_S = 1.0
"""Of CPU time; a frame that takes more is a hang, as is one that lets the whole run take too long."""
_CRC_OFFSET = HEADER_NBYTES - 4
_RESERVED = slice(_CRC_OFFSET - 36, _CRC_OFFSET)
_RECEIVER = 22
_PEERS = {
    "plain": (11, LAYOUT),
    "shm": (12, LAYOUT),
    "small blocks": (13, LAYOUT.model_copy(update={"block_size": 2})),
    "rank 0": (14, LAYOUT.model_copy(update={"tp_size": 2})),
    "rank 1": (15, LAYOUT.model_copy(update={"tp_size": 2, "tp_rank": 1})),
    "half": (16, LAYOUT.model_copy(update={"dtype": KVDtype.FLOAT16})),
}
"""Prefill workers of each kind: (incarnation, layout). "shm" is read where it stands, the others send."""
_GROUPS = (("plain",), ("shm",), ("small blocks",), ("rank 0", "rank 1"), ("half",))
_SENDER = 11
_INTERESTING = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    15,
    16,
    63,
    64,
    127,
    128,
    255,
    256,
    1000,
    0x7FFF,
    0xFFFF,
    1 << 31,
    (1 << 32) - 1,
    1 << 62,
    (1 << 64) - 1,
)


class GuardedMemory(HostBlocks):
    """Remembers which blocks were looked at, and how many bytes were written."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(LAYOUT, memoryview(bytearray(num_blocks * LAYOUT.block_nbytes)))
        self.touched: set[int] = set()
        self.written_nbytes = 0

    def read(self, regions: Sequence[Region]) -> StoredBytes:
        self.touched |= {region.block_id for region in regions}
        return super().read(regions)

    def write(self, regions: Sequence[Region], data: memoryview) -> memoryview | None:
        self.touched |= {region.block_id for region in regions}
        self.written_nbytes += data.nbytes
        return super().write(regions, data)


class _Wire:
    """Goes nowhere. `control` is what was said last."""

    def __init__(self) -> None:
        self.said: list[control.ControlMessage] = []
        self.data: list[tuple[str, DataMessage]] = []

    def send_control(self, peer: str, message: control.ControlMessage, blob: bytes = b"") -> None:
        control.encode(message)
        self.said.append(message)

    def open_peer(self, peer: str, ctrl_endpoint: str, server_key: str) -> None:
        pass

    def open_lanes(self, peer: str, endpoints: tuple[str, ...], probes: Sequence[DataMessage], are_encrypted: bool) -> None:
        pass

    def close_peer(self, peer: str) -> None:
        pass

    def send_data(self, peer: str, lane: int, message: DataMessage) -> None:
        self.data.append((peer, message))


class Violation(AssertionError):
    pass


def _receiver(memory: GuardedMemory, clock: ManualClock, log: ReceiverLog, wire: _Wire) -> ReceiverState:
    return ReceiverState(
        layout=LAYOUT, memory=memory, incarnation=_RECEIVER, events=log, clock=clock, settings=SETTINGS, wire=wire,
        lanes=LaneAddresses(("lane-0", "lane-1")),
    )  # fmt: skip


def _hello(incarnation: int, layout: KVLayout = LAYOUT, **more: Any) -> control.Hello:
    return control.Hello(
        src_incarnation=incarnation, dst_incarnation=_RECEIVER, worker_id="prefill-0", layout=layout, num_lanes=2,
        max_chunk_bytes=SETTINGS.kv_max_chunk_bytes, **more,
    )  # fmt: skip


class DataFuzzer:
    """A receiver with a transfer under way from each kind of sender."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._clock = ManualClock()
        self._log = ReceiverLog()
        self._wire = _Wire()
        self.memory = GuardedMemory(NUM_BLOCKS)
        self.receiver = _receiver(self.memory, self._clock, self._log, self._wire)
        self._segment = SharedSegment(CHAIN * LAYOUT.block_nbytes)
        self._plans: dict[str, WirePlan] = {}
        for name, (incarnation, layout) in _PEERS.items():
            more = {"transports": ("shm",), "segment": self._segment.offer} if name == "shm" else {}
            self.receiver.on_control(name, _hello(incarnation, layout, **more))
            self._plans[name] = WirePlan.between(layout, LAYOUT, SETTINGS.kv_wire_dtype)
        self._free = list(range(NUM_BLOCKS))
        self._live: dict[str, dict[int, int]] = {}
        """Transfer id -> block id by index of the blocks that may be written."""
        self._groups: dict[str, tuple[str, ...]] = {}
        self._blocks: dict[str, list[int]] = {}
        self._valid: dict[str, list[DataHeader]] = {}
        self._past = [message.header for message in probe_messages(self._plans["plain"], SETTINGS.kv_max_chunk_bytes, _SENDER, _RECEIVER)]
        self._payloads: dict[int, bytes] = {}
        self.seen: Counter[str] = Counter()
        self._refill()

    def _refill(self) -> None:
        for group in _GROUPS:
            if group in self._groups.values():
                continue
            transfer_id = f"{self._random.getrandbits(128):032x}"
            self._random.shuffle(self._free)
            ids, self._free = self._free[:CHAIN], self._free[CHAIN:]
            missing = sorted(self._random.sample(range(CHAIN), self._random.randint(2, CHAIN)))
            self.receiver.expect(transfer_id, 1, ids, missing, NUM_TOKENS, 1e9, src_tp_size=len(group))
            self._live[transfer_id] = {index: ids[index] for index in missing}
            self._groups[transfer_id] = group
            self._blocks[transfer_id] = ids
            self._valid[transfer_id] = []
            for name in group:
                address: control.Address = {
                    "transfer_id": transfer_id, "attempt": 1, "src_incarnation": _PEERS[name][0], "dst_incarnation": _RECEIVER,
                    "traceparent": "",
                }  # fmt: skip
                self._wire.said.clear()
                offer = control.Offer(**address, num_prompt_tokens=NUM_TOKENS, block_hashes="", deadline_s=1e9)
                self.receiver.on_control(name, offer)
                grant = next(message for message in self._wire.said if isinstance(message, control.Grant))
                self._valid[transfer_id] += self._headers(grant, name)

    def _headers(self, grant: control.Grant, name: str) -> list[DataHeader]:
        plan, is_shared, headers = self._plans[name], name == "shm", []
        per_chunk = plan.layers_per_chunk(SETTINGS.kv_max_chunk_bytes)
        for units in self._runs(name, from_ranges(grant.missing, plan.num_units(NUM_TOKENS))):
            num_tokens = plan.tokens_of(units.start, NUM_TOKENS)
            if is_shared and num_tokens < LAYOUT.block_size:
                continue
            step = max(1, per_chunk // len(units))
            for start in range(0, LAYOUT.num_layers, step):
                count = min(step, LAYOUT.num_layers - start)
                nbytes = len(units) * count * plan.layer_nbytes(num_tokens)
                flags, at, payload = Flags.NONE, 0, self._random.randbytes(nbytes)
                if is_shared:
                    flags, at, payload = self._notice(units, start, nbytes)
                digest = chunk_checksum(payload, len(units))
                self._payloads[digest] = self._places(units, start) if Flags.SCATTERED in flags else payload
                headers.append(
                    DataHeader(
                        MessageType.CHUNK, flags, bytes.fromhex(grant.transfer_id), 1,
                        _PEERS[name][0], _RECEIVER, grant.grant_id, 0, grant.slot_gen, len(headers), 0, nbytes, ChecksumCode.XXH3_64,
                        digest, checksum(b""), start, count, units.start, len(units), num_tokens, KVPart.KV, plan.codec.wire,
                        plan.codec.scale, LAYOUT.layout, plan.head_start, plan.head_count, LAYOUT.head_dim, plan.src.tp_rank,
                        plan.src.tp_size, at,
                    )
                )  # fmt: skip
        fence = replace(
            headers[0], msg_type=MessageType.FENCE, flags=Flags.NONE, chunk_seq=1, chunk_total=len(headers), payload_nbytes=0,
            layer_count=0, block_count=2, checksum_algo=ChecksumCode.NONE, checksum=0,
        )  # fmt: skip
        return [*headers, replace(fence, layer_count=0, block_count=1), fence]

    def _notice(self, units: range, layer_start: int, nbytes: int) -> tuple[Flags, int, bytes]:
        """What a notice says of its kind and of where the bytes stand, and the bytes: those of several units stand apart."""
        places = self._places(units, layer_start)
        each = nbytes // len(units)
        stored = b"".join(bytes(self._segment.view[place : place + each]) for (place,) in struct.iter_unpack("<Q", places))
        if len(units) == 1:
            return Flags.SHARED_MEMORY, struct.unpack("<Q", places)[0], stored
        return Flags.SHARED_MEMORY | Flags.SCATTERED, checksum(places), stored

    def _places(self, units: range, layer_start: int) -> bytes:
        return struct.pack(f"<{len(units)}Q", *(unit * LAYOUT.block_nbytes + layer_start * LAYOUT.layer_nbytes for unit in units))

    def _runs(self, name: str, units: Sequence[int]) -> list[range]:
        """What goes into one chunk: single units, or from some senders two in a row where they have the same number of tokens."""
        runs: list[range] = []
        for unit in units:
            is_whole = self._plans[name].tokens_of(unit, NUM_TOKENS) == self._plans[name].unit_tokens
            if name in ("small blocks", "half", "shm") and runs and is_whole and runs[-1].stop == unit and len(runs[-1]) == 1:
                runs[-1] = range(runs[-1].start, unit + 1)
            else:
                runs.append(range(unit, unit + 1))
        return runs

    # ---- frames -------------------------------------------------------------------------------------------------------
    def _frame(self) -> tuple[bytes, bytes]:
        draw = self._random
        pool = self._past if draw.random() < 0.1 else self._valid[draw.choice(list(self._valid))]
        header = draw.choice(pool)
        payload = self._payloads.get(header.checksum, b"") if header.frame_nbytes else b""
        kind = draw.random()
        if kind < 0.04:
            return header.pack(), payload
        if kind < 0.5:
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                header = self._with_odd_field(header)
            if header.flags & Flags.SCATTERED and draw.random() < 0.6:
                # As a sender that means it: places, of which some are elsewhere, and their checksum.
                size, whole = len(self._segment.view), payload[: len(payload) // 8 * 8]
                odd = (0, 1, size - 1, size, size + 1, 2**64 - 1, draw.randrange(size))
                places = [place if draw.random() < 0.5 else draw.choice(odd) for (place,) in struct.iter_unpack("<Q", whole)]
                places += [draw.choice(odd)] * max(0, min(header.block_count, 2000) - len(places))
                payload = struct.pack(f"<{len(places)}Q", *places)
                header = replace(header, segment_offset=checksum(payload))
            elif draw.random() < 0.6 and header.payload_nbytes <= 4 * SETTINGS.kv_max_chunk_bytes:
                # As a sender that means it: the payload is what the header says, and its checksum too.
                payload = draw.randbytes(header.payload_nbytes)
                header = replace(header, checksum=chunk_checksum(payload, max(1, min(header.block_count, len(payload)))))
            return _packed(header), payload
        damaged = bytearray(header.pack())
        if kind < 0.75:
            for _ in range(draw.choice((1, 1, 2, 5))):
                damaged[draw.randrange(HEADER_NBYTES)] ^= 1 << draw.randrange(8)
            if kind < 0.65:
                _mend_crc(damaged)
        elif kind < 0.82:
            damaged = damaged[: draw.randrange(HEADER_NBYTES)]
        elif kind < 0.86:
            damaged += draw.randbytes(draw.randrange(1, 64))
        elif kind < 0.92:
            damaged = bytearray(draw.randbytes(HEADER_NBYTES))
            damaged[:8], damaged[_RESERVED] = header.pack()[:8], bytes(_CRC_OFFSET - _RESERVED.start)
            _mend_crc(damaged)
        else:
            payload = draw.choice((b"", payload[:-1], payload + b"x", payload[::-1], draw.randbytes(len(payload))))
        return bytes(damaged), payload

    def _with_odd_field(self, header: DataHeader) -> DataHeader:
        draw = self._random
        name = draw.choice(_HEADER_FIELDS)
        value = getattr(header, name)
        if isinstance(value, bytes):
            other: Any = draw.choice((bytes(len(value)), draw.randbytes(len(value)), *self._ids(name)))
        else:
            other = draw.choice((value + 1, max(0, value - 1), draw.choice(_INTERESTING), draw.getrandbits(16), value ^ 1, 2 * value))
        header = replace(header, **{name: other})
        if draw.random() < 0.5:
            # Sizes that agree with each other get further.
            with contextlib.suppress(ValueError):  # a code that is none
                shape = replace(header, kv_part=KVPart(header.kv_part), dtype=KVDtype(header.dtype), scale=ScaleCode(header.scale))
                header = replace(header, payload_nbytes=shape.shape_nbytes)
        return header

    def _ids(self, name: str) -> list[bytes]:
        return [bytes.fromhex(transfer_id) for transfer_id in self._live] if name == "transfer_id" else []

    # ---- one frame, and what must hold --------------------------------------------------------------------------------
    def step(self) -> None:
        frame, payload = self._frame()
        self.memory.touched.clear()
        self.memory.written_nbytes = 0
        before = self.receiver.counters()
        lane = self._random.randrange(2)
        self.receiver.on_data(lane, frame, memoryview(payload))
        after = self.receiver.counters()
        allowed = {block_id for blocks in self._live.values() for block_id in blocks.values()}
        if not self.memory.touched <= allowed:
            raise Violation(f"blocks {self.memory.touched - allowed} were written outside any grant, by {frame.hex()}")
        if after["chunks_received"] > before["chunks_received"]:
            header = DataHeader.unpack(frame, SETTINGS.kv_max_chunk_bytes)
            transfer_id = header.transfer_id.hex()
            # Every region that now counts as there has been written, once and whole, in this cache's own number format.
            claimed = 2 * header.layer_count * header.block_count * header.head_count * header.block_tokens * LAYOUT.head_dim
            if self.memory.written_nbytes != claimed * LAYOUT.dtype.itemsize:
                raise Violation(f"a chunk counts for other bytes than it brought ({self.memory.written_nbytes}): {header}")
            if header.head_start + header.head_count > LAYOUT.num_kv_heads or header.layer_start + header.layer_count > LAYOUT.num_layers:
                raise Violation(f"a chunk of heads or layers that there are not: {header}")
            blocks = [self._live[transfer_id][unit * self._unit_tokens(transfer_id) // LAYOUT.block_size] for unit in _units(header)]
            if self.memory.touched != set(blocks):
                raise Violation(f"a chunk was written to blocks {self.memory.touched}, not {blocks}: {header}")
            self.seen["accepted"] += 1
        for name in ("stale_frames", "bad_headers", "bad_checksums", "chunks_duplicate", "chunks_nacked"):
            self.seen[name] += int(after[name] - before[name])
        self.receiver.deliver_events()
        for transfer_id in list(self._live):
            if transfer_id in self._log.ended:
                self._end(transfer_id)
        if self._random.random() < 0.03:
            transfer_id = self._random.choice(list(self._live))
            self.receiver.abort(transfer_id, "the fuzzer wants another")
            self._end(transfer_id)
        self._wire.said.clear()
        self._refill()

    def _unit_tokens(self, transfer_id: str) -> int:
        return self._plans[self._groups[transfer_id][0]].unit_tokens

    def _end(self, transfer_id: str) -> None:
        ends = self._log.ended.pop(transfer_id, [])
        if len(ends) > 1 or ends == [None]:
            raise Violation(f"transfer {transfer_id} ended {ends} without a commit")
        self.seen["transfers ended"] += 1
        self._free += self._blocks.pop(transfer_id)
        del self._live[transfer_id], self._groups[transfer_id]
        # Their blocks belong to others now; their frames may still come.
        self._past = [*self._past[:20], *self._valid.pop(transfer_id)]
        if len(self._payloads) > 2_000:
            self._payloads = {
                header.checksum: self._payloads.get(header.checksum, b"") for headers in self._valid.values() for header in headers
            }


def _units(header: DataHeader) -> range:
    return range(header.block_index, header.block_index + header.block_count)


_HEADER_FIELDS = [field.name for field in fields(DataHeader)]
_WIDTHS = (
    8, 8, 128, 16, 64, 64, 64, 32, 32, 32, 32, 64, 8, 64, 64, 16, 16, 32, 16, 16, 8, 8, 8, 8, 16, 16, 16, 16, 16, 64, 128, 64, 8,
)  # fmt: skip
"""Bits of each field of DataHeader, in order."""


def _packed(header: DataHeader) -> bytes:
    """With integers cut to the width they have on the wire."""
    values = {}
    for name, bits in zip(_HEADER_FIELDS, _WIDTHS, strict=True):
        value = getattr(header, name)
        values[name] = value if isinstance(value, bytes) else int(value) & ((1 << bits) - 1)
    return replace(header, **values).pack()


def _mend_crc(packed: bytearray) -> None:
    packed[_CRC_OFFSET:] = struct.pack("<I", zlib.crc32(packed[:_CRC_OFFSET]))


class ControlFuzzer:
    """A receiver and a sender, each with transfers in every phase; every message that decodes goes to both."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._clock = ManualClock()
        self._receiver_log, self._sender_log = ReceiverLog(), SenderLog()
        self._receiver_wire, self._sender_wire = _Wire(), _Wire()
        self.target, self.source = GuardedMemory(NUM_BLOCKS), GuardedMemory(NUM_BLOCKS)
        self.receiver = _receiver(self.target, self._clock, self._receiver_log, self._receiver_wire)
        self.sender = SenderState(
            layout=LAYOUT, memory=self.source, incarnation=_SENDER, events=self._sender_log, clock=self._clock, settings=SETTINGS,
            worker_id="prefill-0", wire=self._sender_wire,
        )  # fmt: skip
        self._peer = KVPeer(worker_id="decode-0", ctrl_endpoint="decode-0", incarnation=_RECEIVER)
        self._key = f"decode-0#{_RECEIVER:x}"
        self._receiving: list[str] = []
        self._sending: list[str] = []
        self._past: list[str] = ["ab" * 16]
        self.seen: Counter[str] = Counter()
        self._refill()

    def _address(self, transfer_id: str, to_receiver: bool) -> control.Address:
        source, target = (_SENDER, _RECEIVER) if to_receiver else (_RECEIVER, _SENDER)
        return {"transfer_id": transfer_id, "attempt": 1, "src_incarnation": source, "dst_incarnation": target, "traceparent": ""}

    def _refill(self) -> None:
        """Bring both back to the middle of things."""
        draw = self._random
        for log, group in ((self._receiver_log, self._receiving), (self._sender_log, self._sending)):
            for transfer_id in [each for each in group if each in log.ended]:
                group.remove(transfer_id)
                self._past = [*self._past[-30:], transfer_id]
                if len(log.ended[transfer_id]) != 1:
                    raise Violation(f"transfer {transfer_id} ended {len(log.ended[transfer_id])} times")
                del log.ended[transfer_id]
                self.seen["transfers ended"] += 1
        if ("peer", _SENDER) not in self.receiver.peers():
            self.receiver.on_control("peer", _hello(_SENDER))
        while len(self._receiving) < 6:
            transfer_id = f"{draw.getrandbits(128):032x}"
            self._receiving.append(transfer_id)
            first = draw.randrange(NUM_BLOCKS - CHAIN)
            self.receiver.expect(transfer_id, 1, range(first, first + CHAIN), range(1, CHAIN), NUM_TOKENS, 1e9)
            if draw.random() < 0.7:
                self.receiver.on_control("peer", self._offer(transfer_id))
        while len(self._sending) < 6:
            transfer_id = f"{draw.getrandbits(128):032x}"
            self._sending.append(transfer_id)
            self.sender.offer(transfer_id, 1, [self._peer], NUM_TOKENS, [], 1e9, "")
            self.sender.on_control(self._key, _hello_ack(1 << 20))
            phase = draw.randrange(4)
            if phase > 0:
                self.sender.on_control(self._key, self._grant(transfer_id))
            if phase > 1:
                self.sender.send_blocks(transfer_id, [(index, index) for index in range(CHAIN if phase > 2 else 4)])
            if phase > 2:
                self.sender.commit(transfer_id, b"hidden", 0)
        self._read_chunks()
        self._receiver_wire.said.clear()
        self._sender_wire.said.clear()

    def _read_chunks(self) -> None:
        """What the lanes do."""
        while self._sender_wire.data:
            waiting, self._sender_wire.data = self._sender_wire.data, []
            for peer, message in waiting:
                header, _, read = read_message(self.source, message)
                if header.msg_type is MessageType.CHUNK:
                    self.sender.on_chunk_read(peer, header.transfer_id.hex(), header.chunk_seq, read)

    def _offer(self, transfer_id: str) -> control.Offer:
        return control.Offer(**self._address(transfer_id, True), num_prompt_tokens=NUM_TOKENS, block_hashes="", deadline_s=1e6)

    def _grant(self, transfer_id: str) -> control.Grant:
        missing = to_ranges(range(2, CHAIN))
        return control.Grant(**self._address(transfer_id, False), grant_id=5, slot_gen=1, missing=missing, credits=4)

    def _message(self) -> control.ControlMessage:
        """A sound one, of any kind, for any transfer there is, was or never will be."""
        draw = self._random
        to_receiver = draw.random() < 0.5
        known = self._receiving if to_receiver else self._sending
        transfer_id = draw.choice((draw.choice(known), draw.choice(known), draw.choice(self._past), f"{draw.getrandbits(128):032x}"))
        address = self._address(transfer_id, to_receiver)
        about_connection = {name: address[name] for name in ("src_incarnation", "dst_incarnation")}  # type: ignore[literal-required]
        ranges = to_ranges(draw.sample(range(16), draw.randrange(8)))
        u32 = draw.choice((0, 1, 7, draw.getrandbits(32)))
        if to_receiver:
            return draw.choice(
                (
                    lambda: self._offer(transfer_id),
                    lambda: control.Commit(
                        **address, num_cached_tokens=u32, chunk_total=u32, num_bytes=u32, digest=u32, hidden_nbytes=draw.choice((6, u32)),
                        hidden_checksum=checksum(b"hidden"),
                    ),
                    lambda: control.Abort(**address, reason="fuzz"),
                    lambda: control.AbortAck(**address),
                    lambda: control.Renew(**address),
                    lambda: control.Renew(**about_connection),
                    lambda: control.Bye(**about_connection) if draw.random() < 0.1 else control.Renew(**address),
                    lambda: _hello(_SENDER),
                )
            )()  # fmt: skip
        return draw.choice(
            (
                lambda: self._grant(transfer_id),
                lambda: control.Credit(**address, received=ranges),
                lambda: control.Nack(**address, nack_seq=u32 % 16, chunks=ranges),
                lambda: control.Committed(**address),
                lambda: control.Abort(**address, reason="fuzz"),
                lambda: control.AbortAck(**address),
                lambda: control.Deny(**address, reason="fuzz", retry_ms=u32),
                lambda: control.Renew(**address),
                lambda: control.Drain(**about_connection) if draw.random() < 0.1 else control.Renew(**address),
                lambda: control.Bye(**about_connection) if draw.random() < 0.1 else control.Renew(**address),
                lambda: _hello_ack(u32),
            )
        )()

    def _frame(self) -> bytes:
        draw = self._random
        frame = control.encode(self._message())
        kind = draw.random()
        if kind < 0.1:
            return frame
        if kind < 0.65:
            body = json.loads(frame[8:])
            for _ in range(draw.choice((1, 1, 1, 2))):
                self._spoil(body)
            return _with_prefix(json.dumps(body).encode())
        damaged = bytearray(frame)
        if kind < 0.85:
            for _ in range(draw.choice((1, 1, 2, 5))):
                damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
            return _with_prefix(bytes(damaged[8:])) if kind < 0.78 else bytes(damaged)
        if kind < 0.9:
            return _with_prefix(frame[8 : draw.randrange(8, len(frame))])
        if kind < 0.94:
            return bytes(frame[: draw.randrange(len(frame))])
        if kind < 0.97:
            return _with_prefix(
                draw.choice((b"[" * 5000, b'{"a":' * 3000, b"null", b"1e999", b'"\\ud800"', draw.randbytes(50), frame[8:] * 2))
            )
        return draw.randbytes(draw.randrange(200))

    def _spoil(self, body: dict[str, Any]) -> None:
        draw = self._random
        name = draw.choice(list(body))
        how = draw.random()
        if how < 0.1:
            del body[name]
        elif how < 0.15:
            body["extra"] = 1
        elif how < 0.3:
            body["kind"] = draw.choice([kind.model_fields["kind"].default for kind in control.AnyControl.__args__])
        else:
            body[name] = self._odd_value(body[name])

    def _odd_value(self, value: Any) -> Any:
        draw = self._random
        if isinstance(value, bool) or value is None:
            return draw.choice((None, True, 0, "x"))
        if isinstance(value, (int, float)):
            return draw.choice(
                (draw.choice(_INTERESTING), value + 1, value - 1, -1, 1 << 70, 0.5, float("nan"), 1e308, str(value), None, [value])
            )
        if isinstance(value, str):
            return draw.choice(
                ("", value + "0", "x" * draw.choice((64, 1000, 20_000)), "\0", "\ud7ff", draw.choice(self._past), 5, None, value[:-1])
            )
        if isinstance(value, list):
            count = draw.choice(_INTERESTING)
            return draw.choice(
                ([], value + value, [[0, count]], [[count, 1]], [[-1, 2]], [[0, 1]] * 2000, [[0, 1 << 70]], [[1 << 70, 1]], [[0]], 7, None)
            )
        return draw.choice(({}, [], None, 1))

    def step(self) -> None:
        frame = self._frame()
        blob = self._random.choice((b"", b"hidden", b"x" * 100))
        try:
            message = control.decode(frame)
        except ProtocolError:
            self.seen["refused"] += 1
            return
        self.seen["decoded"] += 1
        self.target.touched.clear()
        self.source.touched.clear()
        self.receiver.on_control("peer", message, blob)
        self.receiver.deliver_events()
        self.sender.on_control(self._key, message)
        self._read_chunks()
        if self.target.touched:
            raise Violation(f"a control message touched blocks {self.target.touched}: {message}")
        if not self.source.touched <= set(range(CHAIN)):
            raise Violation(f"blocks {self.source.touched} that belong to no transfer were read: {message}")
        # Slowly enough for nobody to be silent for too long, fast enough for nobody to say too much.
        if self._random.random() < 0.01:
            self._clock.advance(0.05)
            self.receiver.tick()
            self.receiver.deliver_events()
            self.sender.tick()
        if len(self._receiver_wire.said) + len(self._sender_wire.said) > 1000:
            raise Violation(f"one message was answered {len(self._receiver_wire.said)} times: {message}")
        self._refill()


def _hello_ack(max_chunk_bytes: int) -> control.HelloAck:
    return control.HelloAck(
        src_incarnation=_RECEIVER, dst_incarnation=_SENDER, layout=LAYOUT, lane_endpoints=("a", "b"), max_chunk_bytes=max_chunk_bytes
    )


def _with_prefix(body: bytes) -> bytes:
    return struct.pack("<4sI", b"KVXC", zlib.crc32(body)) + body


def fuzz(num_frames: int, seed: int) -> dict[str, Any]:
    """Half of the frames to each fuzzer. Raises Violation, or whatever escapes from the state machines."""
    logging.disable(logging.CRITICAL)
    slowest_s = 0.0
    seen: dict[str, Any] = {}
    for kind in (DataFuzzer, ControlFuzzer):
        fuzzer = kind(seed)
        for number in range(num_frames // 2):
            start_s = time.process_time()
            try:
                fuzzer.step()
            except BaseException as error:
                error.add_note(f"{kind.__name__}, seed {seed}, frame {number}")
                raise
            took_s = time.process_time() - start_s
            slowest_s = max(slowest_s, took_s)
            if took_s > MAX_FRAME_S:
                raise Violation(f"{kind.__name__}, seed {seed}, frame {number} took {took_s:.1f} s")
        seen[kind.__name__] = dict(fuzzer.seen)
    logging.disable(logging.NOTSET)
    return {"num_frames": num_frames, "seed": seed, "slowest_ms": round(1000 * slowest_s, 1), **seen}


if __name__ == "__main__":
    fuzz(2000, 0)  # what is taken once, is taken
    with open(f"/proc/{os.getpid()}/statm") as statm:
        in_use = int(statm.read().split()[0]) * resource.getpagesize()
    # An allocation whose size came from the wire fails here, and with it the run.
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (64 << 20),) * 2)
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = fuzz(int(sys.argv[1]), int(sys.argv[2]))
    report["rss_growth_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - max_rss) >> 10
    print(json.dumps(report))
