"""Senders and receivers of KV transfer for tests: a small layout, recorded events, and a pair joined by the in-memory twin."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shared.clock import ManualClock
from shared.config import Settings
from shared.messages import KVPeer
from shared.transport.connector import CommitInfo
from shared.transport.protocol.frames import KVDtype
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.receiving.peer_table import LaneAddresses
from shared.transport.receiving.receiver_state import ReceiverState
from shared.transport.sending.sender_state import SenderState
from shared.transport.simulated_network import BytesMemory, FaultPlan, MemoryReceiverWire, MemorySenderWire, SimulatedNetwork

LAYOUT = KVLayout(model_fingerprint="test", dtype=KVDtype.FLOAT32, block_size=4, num_layers=6, num_kv_heads=2, head_dim=16)
# Four layers to a chunk: two chunks to a block.
SETTINGS = Settings(kv_max_chunk_bytes=4 * LAYOUT.layer_nbytes, kv_credits=4)
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRANSFER = "ab" * 16
POISON = 0xEE


@dataclass
class SenderLog:
    """SenderEvents that remembers, and may act."""

    granted: list[str] = field(default_factory=list)
    ended: dict[str, list[str | None]] = field(default_factory=dict)
    """transfer id -> reasons, None for committed."""
    on_end: Callable[[str, str | None], None] = lambda transfer_id, reason: None
    changed: threading.Event = field(default_factory=threading.Event)

    def on_granted(self, transfer_id: str) -> None:
        self.granted.append(transfer_id)
        self.changed.set()

    def on_committed(self, transfer_id: str) -> None:
        self._end(transfer_id, None)

    def on_failed(self, transfer_id: str, reason: str) -> None:
        self._end(transfer_id, reason)

    def _end(self, transfer_id: str, reason: str | None) -> None:
        self.ended.setdefault(transfer_id, []).append(reason)
        self.on_end(transfer_id, reason)
        self.changed.set()


@dataclass
class ReceiverLog:
    """ReceiverEvents that remembers, and may act."""

    ended: dict[str, list[str | None]] = field(default_factory=dict)
    hidden: dict[str, bytes] = field(default_factory=dict)
    infos: dict[str, CommitInfo] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    on_end: Callable[[str, str | None], None] = lambda transfer_id, reason: None
    changed: threading.Event = field(default_factory=threading.Event)

    def on_committed(self, transfer_id: str, hidden_state: bytes, info: CommitInfo) -> None:
        self.hidden[transfer_id], self.infos[transfer_id] = hidden_state, info
        self._end(transfer_id, None)

    def on_failed(self, transfer_id: str, reason: str, is_cancelled: bool) -> None:
        self.cancelled += [transfer_id] * is_cancelled
        self._end(transfer_id, reason)

    def _end(self, transfer_id: str, reason: str | None) -> None:
        self.ended.setdefault(transfer_id, []).append(reason)
        self.on_end(transfer_id, reason)
        self.changed.set()


def random_memory(num_blocks: int, seed: int, layout: KVLayout = LAYOUT) -> BytesMemory:
    memory = BytesMemory(num_blocks, layout)
    generator = random.Random(seed)
    for block_id in range(num_blocks):
        memory.block(block_id)[:] = generator.randbytes(layout.block_nbytes)
    return memory


def tokens_of(block: memoryview | bytes, num_tokens: int, layout: KVLayout = LAYOUT) -> bytes:
    """The first tokens of a block, or with a negative number the last, in every layer and head."""
    rows = np.frombuffer(block, np.uint8).reshape(layout.num_layers, 2, layout.heads[1], layout.block_size, -1)
    return (rows[..., :num_tokens, :] if num_tokens >= 0 else rows[..., num_tokens:, :]).tobytes()


def fill(memory: BytesMemory, block_id: int, value: int) -> None:
    view = memory.block(block_id)
    view[:] = bytes([value]) * len(view)


class MemoryPair:
    """One prefill and one decode worker on the twin."""

    def __init__(
        self,
        plan: FaultPlan | None = None,
        *,
        seed: int = 0,
        num_blocks: int = 16,
        receiver_layout: KVLayout = LAYOUT,
        settings: Settings = SETTINGS,
        receiver_incarnation: int = 22,
        source: BytesMemory | None = None,
        target: BytesMemory | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.network = SimulatedNetwork(seed, plan or FaultPlan(), self.clock)
        self.source = source or random_memory(num_blocks, seed)
        self.target = target or BytesMemory(num_blocks, receiver_layout)
        self.sender_log, self.receiver_log = SenderLog(), ReceiverLog()
        self.peer = KVPeer(worker_id="decode-0", ctrl_endpoint="decode-0", incarnation=22)
        self.sender = SenderState(
            layout=LAYOUT,
            memory=self.source,
            incarnation=11,
            events=self.sender_log,
            clock=self.clock,
            settings=settings,
            worker_id="prefill-0",
            wire=MemorySenderWire(self.network, "prefill-0", self.source),
        )
        self.receiver = ReceiverState(
            layout=receiver_layout,
            memory=self.target,
            incarnation=receiver_incarnation,
            events=self.receiver_log,
            clock=self.clock,
            settings=settings,
            wire=MemoryReceiverWire(self.network),
            lanes=LaneAddresses(("lane-0", "lane-1")),
        )
        self.network.add_sender("prefill-0", self.sender)
        self.network.add_receiver("decode-0", self.receiver)

    def offer(self, num_tokens: int, hashes: list[bytes] | None = None, deadline_s: float = 60.0, transfer_id: str = TRANSFER) -> None:
        self.sender.offer(transfer_id, 0, [self.peer], num_tokens, hashes or [], deadline_s, TRACEPARENT)

    def expect(self, num_tokens: int, missing: list[int], hashes: list[bytes] | None = None, deadline_s: float = 60.0) -> None:
        """Block i of the chain goes to block 15 - i."""
        block_ids = [15 - index for index in range(LAYOUT.num_blocks(num_tokens))]
        self.receiver.expect(TRANSFER, 0, block_ids, missing, num_tokens, deadline_s, TRACEPARENT, hashes)

    def send_all(self, num_tokens: int, hidden: bytes = b"hidden") -> None:
        self.sender.send_blocks(TRANSFER, [(index, index) for index in range(LAYOUT.num_blocks(num_tokens))])
        self.sender.commit(TRANSFER, hidden, 0)

    def run(self, duration_s: float = 10.0) -> None:
        """Until both sides have ended, at most `duration_s` simulated seconds."""
        self.network.run(duration_s, lambda: bool(self.sender_log.ended) and bool(self.receiver_log.ended))

    def is_copied(self, missing: list[int]) -> bool:
        return all(self.source.block(index) == self.target.block(15 - index) for index in missing)

    def is_copied_up_to(self, num_tokens: int, missing: list[int]) -> bool:
        """Of the prompt's last block, only the tokens that are there."""
        return all(
            tokens_of(self.source.block(index), valid) == tokens_of(self.target.block(15 - index), valid)
            for index in missing
            for valid in [min(LAYOUT.block_size, num_tokens - index * LAYOUT.block_size)]
        )
