"""Two prefill and two decode workers on the in-memory twin, under seeded faults: what `pagewire chaos --simulated` runs, many times.

Both halves of KVX/1 are the real ones; the wire, the time and the processes are simulated. What must hold in every run stands in
`Simulation.check`: a committed transfer's blocks are the source's bytes; a block that was given back is never written again; every
transfer ends once on each side that lives, in time; whoever dies or freezes is noticed within DETECTION_S; nothing is left behind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

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
NUM_WORKERS_EACH, NUM_TRANSFERS, BLOCKS_EACH = 2, 8, 5
DEADLINE_S = 20.0
DETECTION_S = 2.0
"""A peer that is dead or frozen is noticed within this."""
_TICK_MARGIN_S = 0.15
_SHORT_STOP_S = 0.8
"""A process that stood still for no longer is alive to everyone."""
_FREE, _TAKEN = 0xEE, 0x55
"""What blocks hold while nobody owns them, and from their reservation until they are written."""


@dataclass(frozen=True)
class Disturbances:
    """What happens to processes and transfers in a run, beside what the wire does to messages (FaultPlan)."""

    num_deaths: int = 0
    has_restarts: bool = False
    """The dead come back at their address as another incarnation."""
    num_stops: int = 0
    max_stop_s: float = _SHORT_STOP_S
    abort_share: float = 0.0

    @property
    def lose_nothing(self) -> bool:
        return self.num_deaths == 0 and self.max_stop_s <= _SHORT_STOP_S


@dataclass(eq=False)
class _Process:
    name: str
    incarnation: int
    memory: BytesMemory
    state: SenderState | ReceiverState | None = None
    is_dead: bool = False
    absences: list[tuple[float, float]] = field(default_factory=list)
    """(from, to): stopped, or dead, when `to` is infinite."""
    free_blocks: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Transfer:
    transfer_id: str
    prefill: _Process
    decode: _Process
    num_tokens: int
    missing: list[int]
    source_ids: list[int]
    source_bytes: list[bytes]
    hidden: bytes
    target_ids: list[int] = field(default_factory=list)
    is_aborted: bool = False
    offered_s: float | None = None
    expected_s: float | None = None
    granted_s: float | None = None
    sender_ends: list[tuple[float, str | None]] = field(default_factory=list)
    receiver_ends: list[tuple[float, str | None]] = field(default_factory=list)
    """(when, why); why is None for a commit."""


class _SenderListener:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def on_granted(self, transfer_id: str) -> None:
        self._simulation.on_granted(transfer_id)

    def on_committed(self, transfer_id: str) -> None:
        self._simulation.on_sender_end(transfer_id, None)

    def on_failed(self, transfer_id: str, reason: str) -> None:
        self._simulation.on_sender_end(transfer_id, reason)


class _ReceiverListener:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def on_committed(self, transfer_id: str, hidden_state: bytes, info: CommitInfo) -> None:
        self._simulation.on_receiver_end(transfer_id, None, hidden_state)

    def on_failed(self, transfer_id: str, reason: str, is_cancelled: bool) -> None:
        self._simulation.on_receiver_end(transfer_id, reason, b"")


class Simulation:
    """One run. `run` returns what did not hold, in words; nothing is what it should be."""

    def __init__(self, seed: int, plan: FaultPlan, disturbances: Disturbances | None = None) -> None:
        self._random = random.Random(seed)
        self._plan = plan
        self._disturbances = disturbances or Disturbances()
        self._clock = ManualClock()
        self._network = SimulatedNetwork(seed, plan, self._clock)
        self._faults: list[str] = []
        """Gathered, not raised: the transport survives a listener that raises, so an assert in one would be lost."""
        self._transfers: dict[str, _Transfer] = {}
        self.num_refused = 0
        """Transfers for which decode had no room."""
        self._num_processes = 0
        self._processes: list[_Process] = []
        """All there ever were."""
        self._prefill = [self._start(f"prefill-{index}") for index in range(NUM_WORKERS_EACH)]
        self._decode = [self._start(f"decode-{index}") for index in range(NUM_WORKERS_EACH)]
        for number in range(NUM_TRANSFERS):
            self._network.at(self._random.uniform(0.0, 2.0), partial(self._begin, number))
        for _ in range(self._disturbances.num_deaths):
            self._network.at(self._random.uniform(0.0, 2.5), self._kill_one)
        for _ in range(self._disturbances.num_stops):
            self._network.at(self._random.uniform(0.0, 2.5), self._stop_one)

    @classmethod
    def drawn(cls, seed: int) -> Simulation:
        """A run whose kinds of faults are drawn from the seed too. Every fourth loses nothing, so it must fail nothing."""
        draw = random.Random(f"plan {seed}")
        is_gentle = seed % 4 == 0

        def perhaps(value: float) -> float:
            return draw.choice((0.0, 0.0, value, value * draw.random()))

        plan = FaultPlan(
            data_loss=0.0 if is_gentle else perhaps(0.1),
            data_duplicate=perhaps(0.4),
            data_flip=0.0 if is_gentle else perhaps(0.1),
            control_loss=0.0 if is_gentle else perhaps(0.1),
            control_duplicate=perhaps(0.4),
            control_flip=0.0 if is_gentle else perhaps(0.05),
            max_delay_s=draw.choice((0.0001, 0.001, 0.02, 0.1)),
            is_control_ordered=is_gentle or draw.random() < 0.5,
            lane_bytes_per_s=draw.choice((float("inf"), 1e6, 1e5, 2e4)),
            data_late=0.0 if is_gentle else perhaps(0.1),
        )
        num_deaths = 0 if is_gentle else draw.choice((0, 0, 1, 2))
        return cls(
            seed,
            plan,
            Disturbances(
                num_deaths=num_deaths,
                has_restarts=draw.random() < 0.7,
                num_stops=draw.choice((0, 0, 1, 2)),
                max_stop_s=_SHORT_STOP_S if is_gentle else draw.choice((_SHORT_STOP_S, 4.0, 10.0)),
                abort_share=draw.choice((0.0, 0.0, 0.3)),
            ),
        )

    @property
    def num_faults(self) -> dict[str, int]:
        return dict(self._network.num_faults)

    @property
    def num_committed(self) -> int:
        return sum([why for _, why in transfer.receiver_ends] == [None] for transfer in self._transfers.values())

    def run(self) -> list[str]:
        self._network.run(3.0 + self._disturbances.max_stop_s + DEADLINE_S + 5.0)
        self._check()
        return self._faults

    # ---- processes ----------------------------------------------------------------------------------------------------
    def _start(self, name: str) -> _Process:
        self._num_processes += 1
        num_blocks = NUM_TRANSFERS * BLOCKS_EACH
        if name.startswith("prefill"):
            # It connects, so what others answer to is another connection; only decode comes back at the same address.
            name = f"{name.partition('.')[0]}.{self._num_processes}"
        process = _Process(name, 100 + self._num_processes, BytesMemory(num_blocks, LAYOUT))
        self._processes.append(process)
        if name.startswith("prefill"):
            for block_id in range(num_blocks):
                process.memory.block(block_id)[:] = self._random.randbytes(LAYOUT.block_nbytes)
            sender = SenderState(
                layout=LAYOUT, memory=process.memory, incarnation=process.incarnation, events=_SenderListener(self), clock=self._clock,
                settings=SETTINGS, worker_id=name, wire=MemorySenderWire(self._network, name, process.memory),
            )  # fmt: skip
            self._network.add_sender(name, sender)
            process.state = sender
        else:
            for block_id in range(num_blocks):
                fill(process.memory, block_id, _FREE)
            # Few enough to be used again and again in a run.
            process.free_blocks = list(range(3 * BLOCKS_EACH))
            receiver = ReceiverState(
                layout=LAYOUT, memory=process.memory, incarnation=process.incarnation, events=_ReceiverListener(self), clock=self._clock,
                settings=SETTINGS, wire=MemoryReceiverWire(self._network), lanes=LaneAddresses(("lane-0", "lane-1")),
            )  # fmt: skip
            self._network.add_receiver(name, receiver)
            process.state = receiver
        return process

    def _any_process(self) -> tuple[list[_Process], int]:
        return self._random.choice((self._prefill, self._decode)), self._random.randrange(NUM_WORKERS_EACH)

    def _kill_one(self) -> None:
        group, index = self._any_process()
        process = group[index]
        if process.is_dead:
            return
        self._network.num_faults["kill"] += 1
        now = self._clock.now_s()
        process.is_dead = True
        process.absences = [(start, min(end, now)) for start, end in process.absences]
        process.absences.append((now, float("inf")))
        self._network.kill(process.name)
        if self._disturbances.has_restarts:

            def restart() -> None:
                self._network.num_faults["restart"] += 1
                group[index] = self._start(process.name)

            self._network.at(self._random.uniform(0.05, 4.0), restart)

    def _stop_one(self) -> None:
        group, index = self._any_process()
        process = group[index]
        now = self._clock.now_s()
        if process.is_dead or any(end > now for _, end in process.absences):
            return
        self._network.num_faults["stop"] += 1
        duration_s = self._random.uniform(0.2, self._disturbances.max_stop_s)
        process.absences.append((now, now + duration_s))
        self._network.stop(process.name, duration_s)

    def _do(self, process: _Process, action: Callable[[], None]) -> None:
        """What a service does itself: nothing when it is dead, later when it is stopped."""
        if not process.is_dead:
            self._network.run_in(process.name, lambda: None if process.is_dead else action())

    # ---- transfers ----------------------------------------------------------------------------------------------------
    def _begin(self, number: int) -> None:
        """Both workers hear of a request, each in its own time."""
        draw, network = self._random, self._network
        num_tokens = draw.randint(1, BLOCKS_EACH * LAYOUT.block_size)
        num_blocks = LAYOUT.num_blocks(num_tokens)
        prefill, decode = draw.choice(self._prefill), draw.choice(self._decode)
        source_ids = draw.sample(range(number * BLOCKS_EACH, number * BLOCKS_EACH + num_blocks), num_blocks)
        transfer = _Transfer(
            f"{number:032x}", prefill, decode, num_tokens,
            missing=[index for index in range(num_blocks) if draw.random() < 0.8],
            source_ids=source_ids,
            source_bytes=[bytes(prefill.memory.block(block_id)) for block_id in source_ids],
            hidden=draw.randbytes(40),
        )  # fmt: skip
        self._transfers[transfer.transfer_id] = transfer
        sender = prefill.state
        assert isinstance(sender, SenderState)
        network.at(draw.uniform(0, 0.2), lambda: self._do(prefill, partial(self._offer, transfer)))
        delay_s = 0.2
        for index in range(num_blocks):
            delay_s += draw.uniform(0, 0.1)
            blocks = [(index, source_ids[index])]
            network.at(delay_s, lambda blocks=blocks: self._do(prefill, partial(sender.send_blocks, transfer.transfer_id, blocks)))  # type: ignore[misc]
        network.at(delay_s, lambda: self._do(prefill, partial(sender.commit, transfer.transfer_id, transfer.hidden, 0)))
        network.at(draw.uniform(0, 0.4), lambda: self._do(decode, partial(self._expect, transfer)))
        if draw.random() < self._disturbances.abort_share:
            self._network.num_faults["abort"] += 1
            transfer.is_aborted = True
            if draw.random() < 0.5:
                abort = partial(sender.abort, transfer.transfer_id, "prefill aborts")
                network.at(delay_s + draw.uniform(0, 0.2), lambda: self._do(prefill, abort))
            else:
                network.at(draw.uniform(0.4, 0.8), lambda: self._do(decode, partial(self._abort_at_decode, transfer)))

    def _offer(self, transfer: _Transfer) -> None:
        sender, decode = transfer.prefill.state, transfer.decode
        assert isinstance(sender, SenderState)
        transfer.offered_s = self._clock.now_s()
        peer = KVPeer(worker_id=decode.name, ctrl_endpoint=decode.name, incarnation=decode.incarnation)
        sender.offer(transfer.transfer_id, 0, [peer], transfer.num_tokens, [], DEADLINE_S, TRACEPARENT)

    def _expect(self, transfer: _Transfer) -> None:
        """Reserve blocks and wait for them; without room, refuse."""
        decode = transfer.decode
        assert isinstance(decode.state, ReceiverState)
        num_blocks = LAYOUT.num_blocks(transfer.num_tokens)
        if len(decode.free_blocks) < num_blocks:
            transfer.is_aborted = True
            self.num_refused += 1
            decode.state.deny(transfer.transfer_id, "no room", 100)
            return
        # The ones given back last: a late message of theirs is the most likely to come yet.
        transfer.target_ids = [decode.free_blocks.pop() for _ in range(num_blocks)]
        for block_id in transfer.target_ids:
            if set(decode.memory.block(block_id)) != {_FREE}:
                self._faults.append(f"block {block_id} of {decode.name} was written while it was free")
            fill(decode.memory, block_id, _TAKEN)
        transfer.expected_s = self._clock.now_s()
        decode.state.expect(transfer.transfer_id, 0, transfer.target_ids, transfer.missing, transfer.num_tokens, DEADLINE_S, TRACEPARENT)

    def _abort_at_decode(self, transfer: _Transfer) -> None:
        state = transfer.decode.state
        assert isinstance(state, ReceiverState)
        if state.abort(transfer.transfer_id, "decode aborts"):
            self.on_receiver_end(transfer.transfer_id, "decode aborts", b"")

    def on_granted(self, transfer_id: str) -> None:
        self._transfers[transfer_id].granted_s = self._clock.now_s()

    def on_sender_end(self, transfer_id: str, why: str | None) -> None:
        transfer = self._transfers[transfer_id]
        transfer.sender_ends.append((self._clock.now_s(), why))
        for block_id in transfer.source_ids:
            fill(transfer.prefill.memory, block_id, 0xAA)

    def on_receiver_end(self, transfer_id: str, why: str | None, hidden: bytes) -> None:
        transfer, memory = self._transfers[transfer_id], self._transfers[transfer_id].decode.memory
        transfer.receiver_ends.append((self._clock.now_s(), why))
        if len(transfer.receiver_ends) > 1:
            return
        if why is None:
            for index, block_id in enumerate(transfer.target_ids):
                num_tokens = max(0, transfer.num_tokens - index * LAYOUT.block_size) if index in transfer.missing else 0
                if memory.block(block_id) != _expected(transfer.source_bytes[index], num_tokens):
                    self._faults.append(f"block {index} of {transfer_id} is not what was sent")
            if hidden != transfer.hidden:
                self._faults.append(f"the hidden state of {transfer_id} is not what was sent")
        for block_id in transfer.target_ids:
            fill(memory, block_id, _FREE)
        transfer.decode.free_blocks += transfer.target_ids

    # ---- what must hold -----------------------------------------------------------------------------------------------
    def _check(self) -> None:
        for process in self._processes:
            if process.is_dead:
                continue
            if process.state is not None and process.state.num_transfers:
                self._faults.append(f"{process.name} still holds {process.state.num_transfers} transfers")
            for block_id in process.free_blocks:
                if set(process.memory.block(block_id)) != {_FREE}:
                    self._faults.append(f"block {block_id} of {process.name} was written while it was free")
        for transfer in self._transfers.values():
            self._check_ends(transfer)

    def _check_ends(self, transfer: _Transfer) -> None:
        name, prefill, decode = f"transfer {transfer.transfer_id}", transfer.prefill, transfer.decode
        if transfer.offered_s is not None:
            self._check_end(f"{name} at {prefill.name}", prefill, transfer.sender_ends, transfer.offered_s)
            self._check_detection(f"{name} at {prefill.name}", prefill, decode, transfer.sender_ends, transfer.offered_s)
        if transfer.expected_s is not None:
            self._check_end(f"{name} at {decode.name}", decode, transfer.receiver_ends, transfer.expected_s)
            if transfer.granted_s is not None:
                self._check_detection(f"{name} at {decode.name}", decode, prefill, transfer.receiver_ends, transfer.granted_s)
        is_committed = [why for _, why in transfer.receiver_ends] == [None]
        if [why for _, why in transfer.sender_ends] == [None] and not is_committed and not decode.is_dead and not transfer.is_aborted:
            self._faults.append(f"{name}: prefill was told of a commit that was none")
        must_succeed = self._plan_loses_nothing and self._disturbances.lose_nothing and not transfer.is_aborted
        if must_succeed and not is_committed:
            self._faults.append(
                f"{name} failed though everyone lived and nothing was lost: {transfer.receiver_ends or transfer.sender_ends}"
            )

    @property
    def _plan_loses_nothing(self) -> bool:
        plan = self._plan
        return not any((plan.data_loss, plan.data_flip, plan.control_loss, plan.control_flip, plan.data_late))

    def _check_end(self, what: str, process: _Process, ends: Sequence[tuple[float, str | None]], start_s: float) -> None:
        if len(ends) > 1:
            self._faults.append(f"{what} ended {len(ends)} times: {list(ends)}")
        elif not ends and not process.is_dead:
            self._faults.append(f"{what} never ended")
        elif ends:
            limit_s = start_s + DEADLINE_S + _TICK_MARGIN_S
            limit_s = max([limit_s, *(end + _TICK_MARGIN_S for start, end in process.absences if start < limit_s)])
            if ends[0][0] > limit_s:
                self._faults.append(f"{what} ended {ends[0][0] - limit_s:.2f} s after its deadline")

    def _check_detection(
        self, what: str, observer: _Process, peer: _Process, ends: Sequence[tuple[float, str | None]], start_s: float
    ) -> None:
        """Whoever watched all the time ends its transfers with a peer within DETECTION_S of its vanishing."""
        if observer.absences:
            return
        for gone_s, back_s in peer.absences:
            since_s = max(gone_s, start_s)
            limit_s = since_s + DETECTION_S + _TICK_MARGIN_S
            if back_s > limit_s and (not ends or ends[0][0] > limit_s) and limit_s < self._clock.now_s():
                self._faults.append(f"{what} outlived {peer.name}, gone at {gone_s:.2f} s, by more than {DETECTION_S} s")


def _expected(source: bytes, num_tokens: int) -> bytes:
    """A block that was taken and then got the first `num_tokens` of the source's."""
    shape = (LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, LAYOUT.block_size, -1)
    block = np.full(len(source), _TAKEN, np.uint8).reshape(shape)
    block[..., :num_tokens, :] = np.frombuffer(source, np.uint8).reshape(shape)[..., :num_tokens, :]
    return block.tobytes()


def fill(memory: BytesMemory, block_id: int, value: int) -> None:
    view = memory.block(block_id)
    view[:] = bytes([value]) * len(view)
