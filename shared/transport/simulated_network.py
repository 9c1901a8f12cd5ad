"""The in-memory twin of the wire: both state machines on a seeded event queue with faults and a manual clock.

Everything passes through real bytes (headers, JSON), so a flipped bit meets the same checks as on a socket. Time is simulated:
minutes of deadlines run in milliseconds, and a seed replays exactly.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.clock import ManualClock
from shared.errors import ProtocolError, reason_of
from shared.transport.connector import BlockMemory, ChunkRead, DataMessage
from shared.transport.host_blocks import HostBlocks
from shared.transport.protocol import control
from shared.transport.protocol.frames import DataHeader, MessageType
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.limits import TICK_S
from shared.transport.receiving.receiver_state import ReceiverState
from shared.transport.sending.chunk_reading import read_message
from shared.transport.sending.sender_state import SenderState


@dataclass(frozen=True)
class FaultPlan:
    """Probabilities per message, and delays in seconds."""

    data_loss: float = 0.0
    data_duplicate: float = 0.0
    data_flip: float = 0.0
    control_loss: float = 0.0
    control_duplicate: float = 0.0
    control_flip: float = 0.0
    min_delay_s: float = 0.0001
    max_delay_s: float = 0.0001
    """Messages overtake each other when the two differ."""
    is_control_ordered: bool = False
    """Control messages of one connection keep their order, as they do in one TCP stream."""
    lane_bytes_per_s: float = float("inf")
    data_late: float = 0.0
    late_s: float = 3.0
    """How late a late data message is, at most: it may meet a transfer that has ended, and blocks that are another's."""


@dataclass(order=True)
class _Event:
    at_s: float
    order: int
    action: Callable[[], None] = field(compare=False)


class BytesMemory(HostBlocks):
    """Blocks of this process alone, of which a test may look at the bytes."""

    def __init__(self, num_blocks: int, layout: KVLayout) -> None:
        self._block_nbytes = layout.block_nbytes
        self._memory = memoryview(bytearray(num_blocks * layout.block_nbytes))
        super().__init__(layout, self._memory)

    def block(self, block_id: int) -> memoryview:
        """Writable."""
        return self._memory[block_id * self._block_nbytes : (block_id + 1) * self._block_nbytes]


class SimulatedNetwork:
    """Carries messages between any number of senders and receivers, each named by a string."""

    def __init__(self, seed: int, plan: FaultPlan, clock: ManualClock) -> None:
        self._random = random.Random(seed)
        self._plan = plan
        self._clock = clock
        self._events: list[_Event] = []
        self._num_events = 0
        self._last_control_s: dict[str, float] = {}
        self._lane_free_s: dict[tuple[str, str, int], float] = {}
        self._senders: dict[str, SenderState] = {}
        self._receivers: dict[str, ReceiverState] = {}
        self._stopped: dict[str, list[Callable[[], None]]] = {}
        self.num_faults: Counter[str] = Counter()
        """Faults made so far, by kind."""

    def add_sender(self, name: str, state: SenderState) -> None:
        self._senders[name] = state
        self._tick_sender(name, state)

    def add_receiver(self, endpoint: str, state: ReceiverState) -> None:
        self._receivers[endpoint] = state
        self._tick_receiver(endpoint, state)

    def kill(self, name: str) -> None:
        """A process vanishes: it sends and hears nothing more. Whether its peers notice is up to their deadlines."""
        self._senders.pop(name, None)
        self._receivers.pop(name, None)
        self._stopped.pop(name, None)

    def stop(self, name: str, duration_s: float) -> None:
        """SIGSTOP: the process does nothing, and what reaches it waits; after `duration_s` it goes on where it was."""
        waiting = self._stopped[name] = []
        self.at(duration_s, lambda: self._go_on(name, waiting))

    def _go_on(self, name: str, waiting: list[Callable[[], None]]) -> None:
        if self._stopped.get(name) is waiting:
            del self._stopped[name]
            for action in waiting:
                action()

    def run_in(self, name: str, action: Callable[[], None]) -> None:
        """Do something in a process: now, or when it goes on."""
        waiting = self._stopped.get(name)
        if waiting is None:
            action()
        else:
            waiting.append(action)

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something in the middle of a run."""
        self._push(self._clock.now_s() + delay_s, action)

    def _push(self, at_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, _Event(at_s, self._num_events, action))

    def run(self, duration_s: float, until: Callable[[], bool] = lambda: False) -> None:
        """Advance the clock from event to event, for `duration_s` or until the condition holds."""
        end = self._clock.now_s() + duration_s
        while self._events and self._events[0].at_s <= end and not until():
            event = heapq.heappop(self._events)
            self._clock.advance(max(0.0, event.at_s - self._clock.now_s()))
            event.action()

    def post_control(
        self, connection: str, message: control.ControlMessage, blob: bytes, deliver: Callable[[control.AnyControl, bytes], None]
    ) -> None:
        """`connection`: one direction of one."""
        plan = self._plan
        frame = control.encode(message)

        def arrive(frame: bytes, blob: bytes) -> None:
            try:
                decoded = control.decode(frame)
            except ProtocolError:
                return
            deliver(decoded, blob)

        for _ in range(self._copies(plan.control_loss, plan.control_duplicate)):
            damaged = self._flip(frame, plan.control_flip), self._flip(blob, plan.control_flip)
            at_s = self._clock.now_s() + self._delay()
            if plan.is_control_ordered:
                at_s = self._last_control_s[connection] = max(at_s, self._last_control_s.get(connection, 0.0))
            self._push(at_s, lambda damaged=damaged: arrive(*damaged))  # type: ignore[misc]

    def post_data(self, sender: str, endpoint: str, lane: int, header: DataHeader, payload: memoryview) -> None:
        """`payload` is read on arrival, as a zero-copy send may read it late: its block may be another request's by then."""
        plan = self._plan
        # A lane is a queue: it takes time for what it carries, lost or not.
        now = self._clock.now_s()
        key = (sender, endpoint, lane)
        self._lane_free_s[key] = max(now, self._lane_free_s.get(key, 0.0)) + payload.nbytes / plan.lane_bytes_per_s
        queued_s = self._lane_free_s[key] - now
        for _ in range(self._copies(plan.data_loss, plan.data_duplicate)):
            self.at(queued_s + self._delay() + self._lateness(), lambda: self._arrive(endpoint, lane, header.pack(), payload))

    def deliver_to_receiver(self, endpoint: str, peer: str, message: control.AnyControl, blob: bytes) -> None:
        def take() -> None:
            receiver = self._receivers.get(endpoint)
            if receiver is not None:
                receiver.on_control(peer, message, blob)
                receiver.deliver_events()

        self.run_in(endpoint, take)

    def report_read(self, name: str, peer: str, header: DataHeader, read: ChunkRead) -> None:
        """A lane of sender `name` has read a chunk: told a moment later, as from another thread."""

        def report() -> None:
            sender = self._senders.get(name)
            if sender is not None:
                sender.on_chunk_read(peer, header.transfer_id.hex(), header.chunk_seq, read)

        self.at(0.0, lambda: self.run_in(name, report))

    def report_lanes(self, name: str, peer: str, num_lanes: int) -> None:
        """They are connected."""
        for lane in range(num_lanes):
            self._senders[name].on_lane(peer, lane, is_connected=True)

    def deliver_to_sender(self, name: str, peer: str, message: control.AnyControl) -> None:
        def take() -> None:
            sender = self._senders.get(name)
            if sender is not None:
                sender.on_control(peer, message)

        self.run_in(name, take)

    def _arrive(self, endpoint: str, lane: int, header: bytes, payload: memoryview) -> None:
        flip = self._plan.data_flip
        header, data = self._flip(header, flip / 10), self._flip(bytes(payload), flip)

        def take() -> None:
            receiver = self._receivers.get(endpoint)
            if receiver is not None:
                receiver.on_data(lane, header, memoryview(data))
                receiver.flush_credits()
                receiver.deliver_events()

        self.run_in(endpoint, take)

    def _tick_sender(self, name: str, state: SenderState) -> None:
        def tick() -> None:
            if self._senders.get(name) is state:
                state.tick()
                self.at(TICK_S, lambda: self._tick_sender(name, state))

        self.run_in(name, tick)

    def _tick_receiver(self, endpoint: str, state: ReceiverState) -> None:
        def tick() -> None:
            if self._receivers.get(endpoint) is state:
                state.tick()
                state.deliver_events()
                self.at(TICK_S, lambda: self._tick_receiver(endpoint, state))

        self.run_in(endpoint, tick)

    def _copies(self, loss: float, duplicate: float) -> int:
        is_lost, is_twice = self._random.random() < loss, self._random.random() < duplicate
        if is_lost:
            self.num_faults["loss"] += 1
            return 0
        self.num_faults["duplicate"] += is_twice
        return 1 + is_twice

    def _lateness(self) -> float:
        if not self._plan.data_late or self._random.random() >= self._plan.data_late:
            return 0.0
        self.num_faults["late"] += 1
        return self._random.uniform(0.0, self._plan.late_s)

    def _delay(self) -> float:
        return self._random.uniform(self._plan.min_delay_s, self._plan.max_delay_s)

    def _flip(self, frame: bytes, probability: float) -> bytes:
        if not frame or self._random.random() >= probability:
            return frame
        self.num_faults["flip"] += 1
        damaged = bytearray(frame)
        damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)


class MemorySenderWire:
    """SenderWire of the sender called `name`."""

    def __init__(self, network: SimulatedNetwork, name: str, memory: BlockMemory) -> None:
        self._network = network
        self._name = name
        self._memory = memory
        self._endpoints: dict[str, str] = {}

    def open_peer(self, peer: str, ctrl_endpoint: str, server_key: str) -> None:
        self._endpoints[peer] = ctrl_endpoint

    def open_lanes(self, peer: str, endpoints: tuple[str, ...], probes: Sequence[DataMessage], are_encrypted: bool) -> None:
        """Connected at once, and there is nothing to measure: time is simulated."""
        self._network.report_lanes(self._name, peer, len(endpoints))

    def close_peer(self, peer: str) -> None:
        self._endpoints.pop(peer, None)

    def send_control(self, peer: str, message: control.ControlMessage, blob: bytes = b"") -> None:
        endpoint = self._endpoints.get(peer)
        if endpoint is not None:
            address = f"{self._name}>{peer}"
            self._network.post_control(
                address, message, blob, lambda decoded, raw: self._network.deliver_to_receiver(endpoint, address, decoded, raw)
            )

    def send_data(self, peer: str, lane: int, message: DataMessage) -> None:
        try:
            header, payload, read = read_message(self._memory, message)
        except Exception as error:
            failure = ChunkRead(message.header, failure=f"the prefill worker cannot read a block: {reason_of(error)}")
            self._network.report_read(self._name, peer, message.header, failure)
            return
        if header.msg_type is MessageType.CHUNK:
            self._network.report_read(self._name, peer, header, read)
        self._network.post_data(self._name, self._endpoints[peer], lane, header, payload)

    def drop_data(self, peer: str, *, lane: int | None = None, transfer_id: str | None = None) -> None:
        pass  # everything is read when it is sent


class MemoryReceiverWire:
    """ReceiverWire of any receiver: peers are addressed as their sender's wire named them."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network

    def send_control(self, peer: str, message: control.ControlMessage, blob: bytes = b"") -> None:
        name, _, key = peer.partition(">")
        self._network.post_control(f"<{peer}", message, blob, lambda decoded, raw: self._network.deliver_to_sender(name, key, decoded))
