"""KVSender: the prefill side of KVX/1 over ZeroMQ. One control thread owns the state machine; one thread per peer and lane sends."""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.clock import Clock
from shared.config import Settings
from shared.errors import ProtocolError, TransferError
from shared.messages import KVPeer
from shared.transport.connector import BlockMemory, ChunkRead, DataMessage, FrameTap, SenderEvents
from shared.transport.protocol import control
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.limits import DISCONNECT_GRACE_S, MAX_CONTROL_BYTES, TICK_S
from shared.transport.protocol.transport_name import network_identity
from shared.transport.sending.sender_lane import SenderLane
from shared.transport.sending.sender_state import SenderState
from shared.transport.wires.curve import CurveKeys, connect_with, load_key_file
from shared.transport.wires.zmq_sockets import SyncSocket, Waker, connect, new_context, new_control_socket

logger = logging.getLogger(__name__)
_IDLE_POLL_S = 1.0
_CLOSE_TIMEOUT_S = 2.0
_TRANSFER_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True)
class _Link:
    """The sockets to one decode worker."""

    dealer: SyncSocket
    monitor: SyncSocket
    server_key: bytes
    outgoing: deque[list[bytes]] = field(default_factory=deque)
    lanes: list[SenderLane] = field(default_factory=list)
    disconnected_s: float | None = None


class KVSender:
    """All methods return at once and may be called from any thread; events come on the transport's thread."""

    def __init__(
        self,
        layout: KVLayout,
        memory: BlockMemory,
        incarnation: int,
        events: SenderEvents,
        clock: Clock,
        settings: Settings,
        worker_id: str,
        tap: FrameTap | None = None,
    ) -> None:
        """`tap`: fault hook for tests.

        Raises ConfigurationError when one layer of a block does not fit a chunk, or the key file cannot be used.
        """
        self._clock = clock
        self._settings = settings
        self._incarnation = incarnation
        self._memory = memory
        self._tap = tap
        self._keys = load_key_file(settings.kv_key_file)[0] if settings.kv_key_file is not None else CurveKeys.new()
        self._links: dict[str, _Link] = {}
        self._closing: list[SenderLane] = []
        self._num_opened = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waker = Waker()
        self._context = new_context()
        self._is_stopping = False
        self._state = SenderState(
            layout=layout,
            memory=memory,
            incarnation=incarnation,
            events=events,
            clock=clock,
            settings=settings,
            worker_id=worker_id,
            wire=self,
            network=network_identity(),
        )
        self._thread = threading.Thread(target=self._run, name="kv-send-control", daemon=True)
        self._thread.start()

    # The prefill service's side

    def offer(
        self,
        transfer_id: str,
        attempt: int,
        peers: Sequence[KVPeer],
        num_prompt_tokens: int,
        block_hashes: Sequence[bytes],
        deadline_s: float,
        traceparent: str = "",
    ) -> None:
        """Open a transfer; call it when the request arrives, before anything is computed. `deadline_s`: seconds from now.

        `peers`: one decode worker, or all ranks of a tensor-parallel one.
        `block_hashes`: of the full blocks, in chain order. Raises TransferError for arguments that cannot be sent.
        """
        if not _TRANSFER_ID.fullmatch(transfer_id):
            raise TransferError(f"transfer id {transfer_id!r} is not 32 lower-case hex digits; use ids.new_transfer_id()")
        if 2 * sum(map(len, block_hashes)) > MAX_CONTROL_BYTES - 4096:
            raise TransferError(f"{len(block_hashes)} block hashes do not fit one offer; use a larger block_size")
        trace = traceparent if len(traceparent) <= 64 else ""
        self._do(lambda: self._state.offer(transfer_id, attempt, peers, num_prompt_tokens, block_hashes, deadline_s, trace))

    def send_blocks(self, transfer_id: str, blocks: Sequence[tuple[int, int]], layers: tuple[int, int] | None = None) -> None:
        """(block_index, block_id) pairs whose KV is complete and will not change, in all layers or in those of `layers` (first, count);
        only those the GRANT misses are sent.

        The blocks belong to the transfer until on_committed or on_failed, also after abort.
        """
        self._do(lambda: self._state.send_blocks(transfer_id, blocks, layers))

    def commit(self, transfer_id: str, hidden_state: bytes, num_cached_tokens: int) -> None:
        """After all blocks have been handed to send_blocks. Raises TransferError when the hidden state is too large."""
        if len(hidden_state) > MAX_CONTROL_BYTES:
            raise TransferError(f"a hidden state of {len(hidden_state)} bytes is over the limit of {MAX_CONTROL_BYTES}")
        self._do(lambda: self._state.commit(transfer_id, hidden_state, num_cached_tokens))

    def abort(self, transfer_id: str, reason: str, *, is_cancelled: bool = False) -> None:
        """End a transfer; on_failed follows. Unknown ids are ignored. `is_cancelled`: nobody waits for its request any more."""
        self._do(lambda: self._state.abort(transfer_id, reason, is_cancelled=is_cancelled))

    def counters(self) -> dict[str, float]:
        return self._state.counters()

    @property
    def is_alive(self) -> bool:
        """False once its control thread has ended: nothing offered after that would ever be answered."""
        return not self._is_stopping

    def close(self) -> None:
        """Abort what lives (on_failed follows for each), say goodbye, end all threads; at most two seconds."""
        if self._is_stopping:
            return

        def stop() -> None:
            self._state.close()
            self._is_stopping = True

        self._do(stop)
        self._thread.join(2 * _CLOSE_TIMEOUT_S)

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._waker.wake()

    # SenderWire, on the control thread

    def open_peer(self, peer: str, ctrl_endpoint: str, server_key: str) -> None:
        self._num_opened += 1
        try:
            dealer = new_control_socket(self._context, zmq.DEALER)
            dealer.setsockopt(zmq.ROUTING_ID, f"{self._incarnation:016x}-{self._num_opened}".encode())
            monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            self._links[peer] = _Link(dealer, monitor, server_key.encode())
            connect_with(dealer, self._keys, server_key.encode())
            connect(dealer, ctrl_endpoint)
        except zmq.ZMQError as error:
            reason = f"cannot connect to {ctrl_endpoint}: {error}"
            self._do(lambda: self._state.on_peer_lost(peer, reason))

    def open_lanes(self, peer: str, endpoints: tuple[str, ...], probes: Sequence[DataMessage], are_encrypted: bool) -> None:
        server_key = self._links[peer].server_key

        def secure(sock: SyncSocket) -> None:
            if are_encrypted:
                connect_with(sock, self._keys, server_key)

        def on_read(transfer_id: str, seq: int, read: ChunkRead) -> None:
            self._do(lambda: self._state.on_chunk_read(peer, transfer_id, seq, read))

        lanes = self._links[peer].lanes
        try:
            for endpoint in endpoints:
                lanes.append(SenderLane(endpoint, self._settings.kv_max_chunk_bytes, self._memory, on_read, self._tap, secure))
        except zmq.ZMQError as error:
            reason = f"cannot open a lane to {endpoint}: {error}"
            self._do(lambda: self._state.on_peer_lost(peer, reason))
            return
        for index, lane in enumerate(lanes):
            self._state.on_lane(peer, index, is_connected=False)
            for probe in probes:
                lane.send(probe)

    def close_peer(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        for lane in link.lanes:
            lane.close()
        self._closing = [lane for lane in self._closing if lane.is_alive] + link.lanes
        self._flush(link)
        link.dealer.disable_monitor()
        link.monitor.close(0)
        link.dealer.close(100 if self._is_stopping else 0)

    def send_control(self, peer: str, message: control.ControlMessage, blob: bytes = b"") -> None:
        link = self._links.get(peer)
        if link is None:
            return
        try:
            link.outgoing.append([control.encode(message), blob] if isinstance(message, control.Commit) else [control.encode(message)])
        except ProtocolError as error:
            transfer_id, reason = message.transfer_id, error.message
            self._do(lambda: self._state.abort(transfer_id, reason))
        self._flush(link)

    def send_data(self, peer: str, lane: int, message: DataMessage) -> None:
        self._links[peer].lanes[lane].send(message)

    def drop_data(self, peer: str, *, lane: int | None = None, transfer_id: str | None = None) -> None:
        link = self._links.get(peer)
        if link is not None:
            for dropping in link.lanes if lane is None else [link.lanes[lane]]:
                dropping.drop(transfer_id)

    # The control thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._wait()
                self._waker.drain()
                self._run_commands()
                for peer, link in list(self._links.items()):
                    self._read_monitor(peer, link)
                    self._read_lanes(peer, link)
                    self._read_control(peer, link)
                self._state.tick()
        except Exception:
            logger.exception("the KV sender's control thread failed")
            self._state.close("the KV sender failed")
        finally:
            self._is_stopping = True
            for peer in list(self._links):
                self.close_peer(peer)
            give_up_s = self._clock.now_s() + _CLOSE_TIMEOUT_S
            for lane in self._closing:
                lane.join(max(0.0, give_up_s - self._clock.now_s()))
            self._run_commands()
            self._state.forget_lanes()
            self._waker.close()
            self._context.term()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fileno(), zmq.POLLIN)
        is_busy = self._state.num_transfers > 0
        for link in self._links.values():
            poller.register(link.dealer, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
            is_busy = is_busy or link.disconnected_s is not None or bool(link.outgoing)
        poller.poll(int(1000 * (TICK_S if is_busy else _IDLE_POLL_S)))

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            try:
                command()
            except Exception:
                logger.exception("a KV sender command failed")

    def _read_monitor(self, peer: str, link: _Link) -> None:
        while peer in self._links and link.monitor.poll(0):
            event = recv_monitor_message(link.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._state.on_peer_lost(peer, "the decode worker refused our key: kv_key_file must hold one that it knows")
            elif event == zmq.EVENT_DISCONNECTED:
                link.disconnected_s = self._clock.now_s()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if link.disconnected_s is not None:
                    link.disconnected_s = None
                    self._state.on_reconnected(peer)
                self._flush(link)
        if link.disconnected_s is not None and self._clock.now_s() - link.disconnected_s > DISCONNECT_GRACE_S:
            self._state.on_peer_lost(peer, "the connection to the decode worker broke")

    def _read_lanes(self, peer: str, link: _Link) -> None:
        for index, lane in enumerate(link.lanes):
            for is_connected in lane.connection_changes() if peer in self._links else ():
                self._state.on_lane(peer, index, is_connected=is_connected)

    def _read_control(self, peer: str, link: _Link) -> None:
        while peer in self._links:
            try:
                frames = link.dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = control.decode(frames[0])
            except ProtocolError as error:
                logger.debug("KV control message refused: %s", error)
                continue
            # What a lane reported before it sent comes before the answer to what it sent: a chunk that is asked for again must have the
            # checksum of its first reading.
            self._run_commands()
            self._state.on_control(peer, message)
        if peer in self._links:
            self._flush(link)

    def _flush(self, link: _Link) -> None:
        while link.outgoing:
            try:
                link.dealer.send_multipart(link.outgoing[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            link.outgoing.popleft()
