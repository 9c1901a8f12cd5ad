"""A prefill and a decode worker of any number of ranks and any block sizes, joined by the in-memory twin."""

import random

import numpy as np
from kv_transfer_pairs import LAYOUT, SETTINGS, TRACEPARENT, TRANSFER, ReceiverLog, SenderLog

from shared.clock import ManualClock
from shared.messages import KVPeer
from shared.transport.protocol.frames import KVDtype
from shared.transport.protocol.wire_plan import source_ranks
from shared.transport.receiving.peer_table import LaneAddresses
from shared.transport.receiving.rank_group import RankGroup
from shared.transport.receiving.receiver_state import ReceiverState
from shared.transport.sending.sender_state import SenderState
from shared.transport.simulated_network import BytesMemory, FaultPlan, MemoryReceiverWire, MemorySenderWire, SimulatedNetwork

HEADS, LAYERS, DIM = 4, LAYOUT.num_layers, LAYOUT.head_dim


class Ranks:
    """A prefill worker of `src_tp` ranks and a decode worker of `dst_tp`; token t of the model's KV is `truth[..., t, :]`."""

    def __init__(self, num_tokens, src_block, dst_block, src_tp=1, dst_tp=1, plan=None, seed=0, dtypes=(KVDtype.FLOAT32,) * 2, **changes):
        self.clock = ManualClock()
        self.num_tokens = num_tokens
        self.network = SimulatedNetwork(seed, plan or FaultPlan(), self.clock)
        settings = SETTINGS.model_copy(update={"kv_max_chunk_bytes": 3 * 8192, **changes})
        base = LAYOUT.model_copy(update={"num_kv_heads": HEADS})
        self.src = [self._layout(base, src_block, rank, src_tp, dtypes[0]) for rank in range(src_tp)]
        self.dst = [self._layout(base, dst_block, rank, dst_tp, dtypes[1]) for rank in range(dst_tp)]
        self.truth = np.random.default_rng(seed).standard_normal((LAYERS, 2, HEADS, num_tokens, DIM)).astype(self._numpy(dtypes[0]))
        self.senders, self.sender_logs = [], []
        self.receivers, self.targets = [], []
        self.log = ReceiverLog()
        group = RankGroup(dst_tp, self.log, lambda rank, transfer_id, reason: self.receivers[rank].abort(transfer_id, reason))
        order = random.Random(seed)
        for rank, layout in enumerate(self.src):
            num_blocks = layout.num_blocks(num_tokens)
            memory = BytesMemory(num_blocks, layout)
            ids = order.sample(range(num_blocks), num_blocks)
            first, count = layout.heads
            for index, block_id in enumerate(ids):
                part = self.truth[:, :, first : first + count, index * src_block : (index + 1) * src_block]
                shape = (LAYERS, 2, count, src_block, DIM)
                np.frombuffer(memory.block(block_id), self.truth.dtype).reshape(shape)[:, :, :, : part.shape[3]] = part
            log = SenderLog()
            wire = MemorySenderWire(self.network, f"prefill-{rank}", memory)
            sender = SenderState(
                layout=layout, memory=memory, incarnation=11 + rank, events=log, clock=self.clock, settings=settings,
                worker_id=f"prefill-{rank}", wire=wire,
            )  # fmt: skip
            self.network.add_sender(f"prefill-{rank}", sender)
            self.senders.append((sender, ids))
            self.sender_logs.append(log)
        for rank, layout in enumerate(self.dst):
            self.targets.append(BytesMemory(layout.num_blocks(num_tokens), layout))
            receiver = ReceiverState(
                layout=layout, memory=self.targets[-1], incarnation=31 + rank, events=group.of(rank), clock=self.clock,
                settings=settings, wire=MemoryReceiverWire(self.network), lanes=LaneAddresses(("lane-0", "lane-1")),
            )  # fmt: skip
            self.network.add_receiver(f"decode-{rank}", receiver)
            self.receivers.append(receiver)

    @staticmethod
    def _layout(base, block_size, rank, size, dtype):
        return base.model_copy(update={"block_size": block_size, "tp_rank": rank, "tp_size": size, "dtype": dtype})

    @staticmethod
    def _numpy(dtype):
        return {KVDtype.FLOAT32: np.float32, KVDtype.FLOAT16: np.float16}[dtype]

    def start(self, missing=None):
        for layout, receiver in zip(self.dst, self.receivers, strict=True):
            blocks = range(layout.num_blocks(self.num_tokens))
            wanted = list(blocks) if missing is None else missing
            receiver.expect(TRANSFER, 0, blocks, wanted, self.num_tokens, 60.0, TRACEPARENT, src_tp_size=len(self.src))
        for layout, (sender, ids) in zip(self.src, self.senders, strict=True):
            peers = [
                KVPeer(worker_id="decode", ctrl_endpoint=f"decode-{rank}", incarnation=31 + rank)
                for rank, other in enumerate(self.dst)
                if layout.tp_rank in source_ranks(HEADS, layout.tp_size, other.tp_rank, other.tp_size)
            ]
            if peers:
                sender.offer(TRANSFER, 0, peers, self.num_tokens, [], 60.0, TRACEPARENT)
                sender.send_blocks(TRANSFER, list(enumerate(ids)))
                sender.commit(TRANSFER, b"hidden", 0)

    def run(self, duration_s=30.0):
        self.network.run(duration_s, lambda: bool(self.log.ended) and not any(sender.num_transfers for sender, _ in self.senders))

    def arrived(self, rank=0):
        """[layer, K|V, head, token, dim] of one receiving rank."""
        layout = self.dst[rank]
        count, num_blocks = layout.heads[1], layout.num_blocks(self.num_tokens)
        blocks = [
            np.frombuffer(self.targets[rank].block(index), self._numpy(layout.dtype)).reshape(LAYERS, 2, count, layout.block_size, DIM)
            for index in range(num_blocks)
        ]
        return np.concatenate(blocks, axis=3)[:, :, :, : self.num_tokens]

    def expected(self, rank=0):
        first, count = self.dst[rank].heads
        return self.truth[:, :, first : first + count]

    @property
    def is_exact(self):
        return all(np.array_equal(self.arrived(rank), self.expected(rank)) for rank in range(len(self.dst)))
