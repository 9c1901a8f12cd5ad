"""KV between workers that differ in block size, tensor-parallel degree or number format, on the in-memory twin."""

import random
from itertools import product

import numpy as np
import pytest
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
FAULTS = FaultPlan(0.03, 0.05, 0.03, 0.02, 0.05, 0.02, 0.0001, 0.02)


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


@pytest.mark.parametrize(("src_block", "dst_block"), [(4, 16), (16, 4), (4, 4), (8, 2)])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 45])
def test_block_sizes_may_differ_when_one_divides_the_other(src_block, dst_block, num_tokens):
    ranks = Ranks(num_tokens, src_block, dst_block)
    ranks.start()
    ranks.run()
    assert ranks.log.ended == {TRANSFER: [None]}
    assert ranks.is_exact
    assert ranks.log.infos[TRANSFER].num_bytes == ranks.truth.nbytes, "no token travels twice, and none that is not there"


def test_of_unequal_blocks_only_the_missing_ones_are_written():
    ranks = Ranks(45, 4, 16)
    ranks.start(missing=[1])
    ranks.run()
    arrived = ranks.arrived()
    assert np.array_equal(arrived[:, :, :, 16:32], ranks.truth[:, :, :, 16:32])
    assert not arrived[:, :, :, :16].any()
    assert not arrived[:, :, :, 32:].any()


@pytest.mark.parametrize(("src_tp", "dst_tp"), [pair for pair in product([1, 2, 4, 8], repeat=2) if pair != (1, 1)])
def test_tensor_parallel_degrees_may_differ(src_tp, dst_tp):
    ranks = Ranks(13, 4, 4, src_tp, dst_tp)
    ranks.start()
    ranks.run()
    assert ranks.log.ended == {TRANSFER: [None]}
    assert ranks.is_exact
    assert ranks.log.hidden == {TRANSFER: b"hidden"}
    total = ranks.truth.nbytes * max(1, dst_tp // HEADS)
    assert sum(receiver.counters()["bytes_received"] for receiver in ranks.receivers) == total, "exactly once to each that holds it"


@pytest.mark.parametrize("seed", range(30))
def test_everything_at_once_under_faults_is_exact_or_fails_as_a_whole(seed):
    draw = random.Random(seed)
    blocks = draw.choice([(4, 8), (8, 4), (16, 2), (4, 4)])
    ranks = Ranks(draw.randint(1, 40), *blocks, draw.choice([1, 2, 4]), draw.choice([1, 2, 4]), FAULTS, seed)
    ranks.start()
    ranks.run(80)
    assert list(ranks.log.ended) == [TRANSFER]
    assert len(ranks.log.ended[TRANSFER]) == 1
    assert ranks.log.ended[TRANSFER] != [None] or ranks.is_exact
    assert all(len(log.ended[TRANSFER]) == 1 for log in ranks.sender_logs if log.ended)
    assert not any(sender.num_transfers for sender, _ in ranks.senders)


def test_when_one_rank_of_the_sender_fails_no_rank_commits():
    ranks = Ranks(16, 4, 4, 4, 2, FaultPlan(min_delay_s=0.1, max_delay_s=0.1))
    ranks.network.at(0.35, lambda: ranks.senders[3][0].abort(TRANSFER, "rank 3 broke"))
    ranks.start()
    ranks.run()
    assert "rank 3 broke" in ranks.log.ended[TRANSFER][0]
    assert all(log.ended[TRANSFER] != [None] for log in ranks.sender_logs)
    assert all(receiver.num_transfers == 0 for receiver in ranks.receivers)


def test_when_one_rank_of_the_receiver_fails_no_rank_starts():
    ranks = Ranks(16, 4, 4, 1, 4, FaultPlan(min_delay_s=0.1, max_delay_s=0.1))
    ranks.start()
    ranks.network.run(0.45)
    ranks.network.kill("decode-2")
    ranks.receivers[2].on_peer_lost(ranks.receivers[2].peers()[0][0], "its connection broke")
    ranks.receivers[2].deliver_events()
    ranks.run()
    assert "connection broke" in ranks.log.ended[TRANSFER][0]
    assert ranks.sender_logs[0].ended[TRANSFER] != [None]


def test_half_precision_arrives_in_a_single_precision_cache_exactly():
    ranks = Ranks(21, 8, 4, dtypes=(KVDtype.FLOAT16, KVDtype.FLOAT32))
    ranks.start()
    ranks.run()
    assert ranks.log.ended == {TRANSFER: [None]}
    assert ranks.is_exact
    assert ranks.log.infos[TRANSFER].num_bytes == ranks.truth.nbytes, "the narrower format travels"


def test_fp8_on_the_wire_when_both_ends_ask_for_it():
    ranks = Ranks(21, 8, 4, kv_wire_dtype="fp8")
    ranks.start()
    ranks.run()
    assert ranks.log.ended == {TRANSFER: [None]}
    error = np.abs(ranks.arrived() - ranks.truth)
    assert (error <= np.abs(ranks.truth) / 16 + 3e-5).all()
    assert error.any()
    assert ranks.log.infos[TRANSFER].num_bytes < ranks.truth.nbytes * 0.3


def test_a_cast_that_loses_and_was_not_asked_for_is_refused_and_the_field_named():
    ranks = Ranks(16, 4, 4, dtypes=(KVDtype.FLOAT32, KVDtype.FLOAT16))
    ranks.start()
    ranks.network.run(1.0)
    assert "dtype" in ranks.sender_logs[0].ended[TRANSFER][0]
