"""KV transfer under seeded faults on the in-memory twin: loss, duplication, reordering, bit flips, aborts and deaths.

What must hold in every run: a committed transfer's blocks are the source's bytes; every transfer ends, once, on both sides, in
time; after an end nothing is written into the blocks, which are reused at once on both sides.
"""

import random
from dataclasses import dataclass, field

import pytest
from kv_transfer_pairs import LAYOUT, POISON, SETTINGS, TRACEPARENT, ReceiverLog, SenderLog, fill, random_memory, tokens_of

from shared.clock import ManualClock
from shared.messages import KVPeer
from shared.transport.receiving.peer_table import LaneAddresses
from shared.transport.receiving.receiver_state import ReceiverState
from shared.transport.sending.sender_state import SenderState
from shared.transport.simulated_network import BytesMemory, FaultPlan, MemoryReceiverWire, MemorySenderWire, SimulatedNetwork

NUM_SENDERS, NUM_TRANSFERS, BLOCKS_EACH = 2, 6, 5
DEADLINE_S = 20.0


@dataclass
class _Transfer:
    transfer_id: str
    sender: int
    num_tokens: int
    missing: list[int]
    source_ids: list[int]
    target_ids: list[int]
    source_bytes: list[bytes]
    target_bytes: list[bytes]
    hidden: bytes
    is_sender_ended: bool = False
    receiver_end: str | None = None
    poisoned: list[int] = field(default_factory=list)


class Simulation:
    def __init__(self, seed: int, plan: FaultPlan, *, with_deaths: bool, with_aborts: bool) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.network = SimulatedNetwork(seed, plan, self.clock)
        self.with_aborts = with_aborts
        self.dead: set[str] = set()
        self.faults: list[str] = []
        """What listeners saw broken: the transport survives a listener that raises, so an assert in one would be lost."""
        self.transfers: dict[str, _Transfer] = {}
        self.sources = [random_memory(NUM_TRANSFERS * BLOCKS_EACH, seed + index) for index in range(NUM_SENDERS)]
        self.target = BytesMemory(NUM_TRANSFERS * BLOCKS_EACH, LAYOUT)
        self.senders = []
        self.sender_log = SenderLog(on_end=self._sender_ended)
        self.receiver_log = ReceiverLog(on_end=self._receiver_ended)
        for index in range(NUM_SENDERS):
            name = f"prefill-{index}"
            sender = SenderState(
                layout=LAYOUT, memory=self.sources[index], incarnation=11 + index, events=self.sender_log, clock=self.clock,
                settings=SETTINGS, worker_id=name, wire=MemorySenderWire(self.network, name, self.sources[index]),
            )  # fmt: skip
            self.network.add_sender(name, sender)
            self.senders.append(sender)
        self.receiver = ReceiverState(
            layout=LAYOUT, memory=self.target, incarnation=22, events=self.receiver_log, clock=self.clock,
            settings=SETTINGS, wire=MemoryReceiverWire(self.network), lanes=LaneAddresses(("lane-0", "lane-1")),
        )  # fmt: skip
        self.network.add_receiver("decode", self.receiver)
        for number in range(NUM_TRANSFERS):
            self._plan_transfer(number)
        if with_deaths:
            name = self.random.choice(["decode", "prefill-0", "prefill-1"])
            self.network.at(self.random.uniform(0, 1), lambda: self._kill(name))

    def _plan_transfer(self, number: int) -> None:
        draw = self.random
        num_tokens = draw.randint(1, BLOCKS_EACH * LAYOUT.block_size)
        num_blocks = LAYOUT.num_blocks(num_tokens)
        ids = list(range(number * BLOCKS_EACH, number * BLOCKS_EACH + num_blocks))
        source_ids, target_ids = draw.sample(ids, num_blocks), draw.sample(ids, num_blocks)
        sender = draw.randrange(NUM_SENDERS)
        missing = [index for index in range(num_blocks) if draw.random() < 0.8]
        transfer = _Transfer(
            f"{number:032x}", sender, num_tokens, missing, source_ids, target_ids,
            [bytes(self.sources[sender].block(block_id)) for block_id in source_ids],
            [bytes(self.target.block(block_id)) for block_id in target_ids],
            draw.randbytes(40),
        )  # fmt: skip
        self.transfers[transfer.transfer_id] = transfer
        peer = KVPeer(worker_id="decode", ctrl_endpoint="decode", incarnation=22)
        state = self.senders[sender]
        start = draw.uniform(0, 0.3)
        self._sender_does(sender, start, lambda: state.offer(transfer.transfer_id, 0, [peer], num_tokens, [], DEADLINE_S, TRACEPARENT))
        for index in range(num_blocks):
            start += draw.uniform(0, 0.1)
            self._sender_does(sender, start, lambda index=index: state.send_blocks(transfer.transfer_id, [(index, source_ids[index])]))
        self._sender_does(sender, start, lambda: state.commit(transfer.transfer_id, transfer.hidden, 0))
        self._decode_does(
            draw.uniform(0, 0.4),
            lambda: self.receiver.expect(transfer.transfer_id, 0, target_ids, missing, num_tokens, DEADLINE_S, TRACEPARENT),
        )
        if self.with_aborts and draw.random() < 0.4:
            if draw.random() < 0.5:
                self._sender_does(sender, start + draw.uniform(0, 0.2), lambda: state.abort(transfer.transfer_id, "sender aborts"))
            else:
                self._decode_does(draw.uniform(0.4, 0.8), lambda: self._abort_at_receiver(transfer))

    def _sender_does(self, sender: int, delay_s: float, action) -> None:
        self.network.at(delay_s, lambda: None if f"prefill-{sender}" in self.dead else action())

    def _decode_does(self, delay_s: float, action) -> None:
        self.network.at(delay_s, lambda: None if "decode" in self.dead else action())

    def _kill(self, name: str) -> None:
        self.dead.add(name)
        self.network.kill(name)

    def _abort_at_receiver(self, transfer: _Transfer) -> None:
        if self.receiver.abort(transfer.transfer_id, "receiver aborts"):
            assert transfer.receiver_end is None, "aborted after its event"
            transfer.receiver_end = "aborted"
            self._reuse_target(transfer)

    def _reuse_target(self, transfer: _Transfer) -> None:
        for block_id in transfer.target_ids:
            fill(self.target, block_id, POISON)

    def _sender_ended(self, transfer_id: str, reason: str | None) -> None:
        transfer = self.transfers[transfer_id]
        if transfer.is_sender_ended:
            self.faults.append(f"the sender was told of the end of {transfer_id} twice")
        transfer.is_sender_ended = True
        for block_id in transfer.source_ids:
            fill(self.sources[transfer.sender], block_id, 0xAA)

    def _receiver_ended(self, transfer_id: str, reason: str | None) -> None:
        transfer = self.transfers[transfer_id]
        if transfer.receiver_end is not None:
            self.faults.append(f"the receiver was told of the end of {transfer_id} twice")
        transfer.receiver_end = "committed" if reason is None else "failed"
        if reason is None:
            for index, block_id in enumerate(transfer.target_ids):
                expected = transfer.source_bytes if index in transfer.missing else transfer.target_bytes
                valid = min(LAYOUT.block_size, transfer.num_tokens - index * LAYOUT.block_size)
                if tokens_of(self.target.block(block_id), valid) != tokens_of(expected[index], valid):
                    self.faults.append(f"block {index} of {transfer_id} is not what was sent")
            if self.receiver_log.hidden[transfer_id] != transfer.hidden:
                self.faults.append(f"the hidden state of {transfer_id} is not what was sent")
        self._reuse_target(transfer)

    def run(self) -> None:
        self.network.run(DEADLINE_S + 5)
        assert not self.faults, self.faults
        for transfer in self.transfers.values():
            if "decode" not in self.dead:
                assert transfer.receiver_end is not None, f"{transfer.transfer_id} never ended at the receiver"
                for block_id in transfer.target_ids:
                    assert set(self.target.block(block_id)) == {POISON}, "written after its end"
            if f"prefill-{transfer.sender}" not in self.dead:
                assert transfer.is_sender_ended or transfer.transfer_id not in self.sender_log.ended
            if self.sender_log.ended.get(transfer.transfer_id) == [None] and "decode" not in self.dead:
                assert transfer.receiver_end in ("committed", "aborted"), "the sender was told of a commit that was not"
        assert self.receiver.num_transfers == 0 or "decode" in self.dead
        for index, sender in enumerate(self.senders):
            assert sender.num_transfers == 0 or f"prefill-{index}" in self.dead

    @property
    def num_committed(self) -> int:
        return sum(transfer.receiver_end == "committed" for transfer in self.transfers.values())


REORDER = FaultPlan(min_delay_s=0.0001, max_delay_s=0.05)
PLANS = {
    "calm": FaultPlan(),
    "reordered": REORDER,
    "duplicated": FaultPlan(data_duplicate=0.4, control_duplicate=0.4, max_delay_s=0.02),
    "lossy data": FaultPlan(data_loss=0.1, max_delay_s=0.001),
    "flipped": FaultPlan(data_flip=0.1, control_flip=0.05, max_delay_s=0.001),
    "lossy control": FaultPlan(control_loss=0.2, max_delay_s=0.001),
    "slow": FaultPlan(lane_bytes_per_s=20_000.0, max_delay_s=0.001),
    "everything": FaultPlan(0.05, 0.1, 0.05, 0.05, 0.1, 0.05, 0.0001, 0.1, 1e6),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_transfer_is_exact_or_fails_in_time(name):
    committed = 0
    for seed in range(50):
        try:
            simulation = Simulation(seed, PLANS[name], with_deaths=seed % 3 == 2, with_aborts=seed % 3 == 1)
            simulation.run()
        except AssertionError as error:
            raise AssertionError(f"plan {name!r}, seed {seed}: {error}") from error
        committed += simulation.num_committed
    assert committed > 0


@pytest.mark.parametrize("name", ["calm", "duplicated", "slow"])
def test_faults_that_lose_nothing_fail_nothing(name):
    for seed in range(20):
        simulation = Simulation(seed, PLANS[name], with_deaths=False, with_aborts=False)
        simulation.run()
        assert simulation.num_committed == NUM_TRANSFERS, f"plan {name!r}, seed {seed}: {simulation.receiver_log.ended}"


def test_one_loss_in_a_hundred_is_repaired():
    for seed in range(20):
        simulation = Simulation(seed, FaultPlan(data_loss=0.01), with_deaths=False, with_aborts=False)
        simulation.run()
        assert simulation.num_committed == NUM_TRANSFERS, f"seed {seed}: {simulation.receiver_log.ended}"
