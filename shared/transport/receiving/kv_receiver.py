"""KVReceiver: the decode side of KVX/1 over ZeroMQ. One control thread (ROUTER) answers and tells events; one thread per lane (PULL)."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.clock import Clock
from shared.config import Settings
from shared.errors import ConfigurationError, ProtocolError
from shared.freed_memory import keep_freed_memory
from shared.transport.connector import BlockMemory, ReceiverEvents
from shared.transport.protocol import control
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.limits import DISCONNECT_GRACE_S, HEARTBEAT_S, TICK_S
from shared.transport.protocol.transport_name import network_identity
from shared.transport.receiving.peer_table import LaneAddresses
from shared.transport.receiving.receiver_state import ReceiverState
from shared.transport.wires.curve import CurveKeys, DoorKeeper, load_key_file, serve_with
from shared.transport.wires.zmq_sockets import (
    SyncContext,
    SyncSocket,
    Waker,
    advertised_host,
    bind_ipc,
    bind_tcp,
    is_loopback,
    new_context,
    new_control_socket,
    new_lane_socket,
)

logger = logging.getLogger(__name__)
_LANE_POLL_MS = 200
_PROBE_INTERVAL_S = 1.0
_CLOSE_TIMEOUT_S = 2.0


class KVReceiver:
    """All methods may be called from any thread; events come on the transport's thread."""

    def __init__(
        self,
        layout: KVLayout,
        memory: BlockMemory,
        incarnation: int,
        events: ReceiverEvents,
        clock: Clock,
        settings: Settings,
        bind_host: str | None = None,
        advertise_host: str | None = None,
    ) -> None:
        """Binds to `bind_host` (default: of the settings): control to kv_port, lanes to the ports after it.

        Raises ConfigurationError for addresses that cannot work.
        """
        keep_freed_memory()
        bind_host = bind_host or settings.bind_host
        host = advertised_host(bind_host, advertise_host or settings.advertise_host)
        self._clock = clock
        self._incarnation = incarnation
        self._outgoing: queue.SimpleQueue[tuple[str, control.ControlMessage]] = queue.SimpleQueue()
        self._waker = Waker()
        self._is_stopping = threading.Event()
        self._unreachable_s: dict[str, float] = {}
        self._last_probe_s = 0.0
        self._is_suspicious_until_s = 0.0
        keys = CurveKeys.new()
        self.server_key = keys.public.decode()
        """Its public half, which a prefill worker must know; the record of this worker carries it."""
        clients = [pair.public for pair in load_key_file(settings.kv_key_file)] if settings.kv_key_file is not None else []
        self._context = new_context()
        self._door_keepers = [DoorKeeper(self._context, clients)] if clients else []
        self._router = new_control_socket(self._context, zmq.ROUTER)
        serve_with(self._router, keys)
        if settings.kv_advertise_port and not settings.kv_port:
            raise ConfigurationError("kv_advertise_port leads nowhere while kv_port is 0 (any free port): set kv_port too")
        ports = _ports(settings.kv_port, settings.kv_lanes)
        advertised = _ports(settings.kv_advertise_port or settings.kv_port, settings.kv_lanes)
        self.ctrl_endpoint = bind_tcp(self._router, bind_host, host, ports[0], advertised[0])
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._lane_contexts: list[SyncContext] = [new_context() for _ in range(settings.kv_lanes)]
        lanes = [new_lane_socket(context, zmq.PULL, settings.kv_max_chunk_bytes, _LANE_POLL_MS) for context in self._lane_contexts]
        are_encrypted = settings.kv_lane_security == "curve" or (settings.kv_lane_security == "auto" and not is_loopback(bind_host))
        for lane, context in zip(lanes, self._lane_contexts, strict=True):
            if are_encrypted:
                serve_with(lane, keys)
                self._door_keepers += [DoorKeeper(context, clients)] if clients else []
        is_near_allowed = settings.kv_transport != "tcp"
        self.state = ReceiverState(
            layout=layout,
            memory=memory,
            incarnation=incarnation,
            events=events,
            clock=clock,
            settings=settings,
            wire=self,
            lanes=LaneAddresses(
                tuple(
                    bind_tcp(lane, bind_host, host, port, shown) for lane, port, shown in zip(lanes, ports[1:], advertised[1:], strict=True)
                ),
                tuple(bind_ipc(lane, f"{incarnation:x}-{index}") for index, lane in enumerate(lanes) if is_near_allowed),
                network_identity(),
                are_encrypted,
            ),
        )
        self._threads = [threading.Thread(target=self._run_control, name="kv-receive-control", daemon=True)]
        for index, (lane, context) in enumerate(zip(lanes, self._lane_contexts, strict=True)):
            self._threads.append(
                threading.Thread(target=self._run_lane, args=(index, lane, context), name=f"kv-receive-{index}", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    # The decode service's side

    def announce(self, transfer_id: str, deadline_s: float) -> None:
        """See ReceiverState.announce."""
        self.state.announce(transfer_id, deadline_s)

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
        """Blocks are reserved: grant the offer, now or when it comes. See ReceiverState.expect."""
        trace = traceparent if len(traceparent) <= 64 else ""
        self.state.expect(
            transfer_id, attempt, block_ids, missing, num_prompt_tokens, deadline_s, trace, block_hashes, is_prefix, src_tp_size
        )
        self._waker.wake()

    def deny(self, transfer_id: str, reason: str, retry_ms: int = 0) -> None:
        """Refuse the offer, now or when it comes. Also for a request that is dropped before its blocks were reserved."""
        self.state.deny(transfer_id, reason, retry_ms)

    def abort(self, transfer_id: str, reason: str) -> bool:
        """On return nothing writes into the transfer's blocks, or ever will. True: ended by this call, no event follows."""
        return self.state.abort(transfer_id, reason)

    def drain(self) -> None:
        """Finish what is granted, refuse everything new."""
        self.state.drain()

    def counters(self) -> dict[str, float]:
        return self.state.counters()

    @property
    def is_alive(self) -> bool:
        """False once its control thread has ended: nothing expected after that would ever end."""
        return not self._is_stopping.is_set()

    def close(self) -> None:
        """Abort what lives (on_failed follows for each), say goodbye, end all threads; at most two seconds."""
        if self._is_stopping.is_set():
            return
        self.state.close()
        self._is_stopping.set()
        self._waker.wake()
        # Their sockets would keep the contexts from ending.
        for door_keeper in self._door_keepers:
            door_keeper.close()
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)

    # ReceiverWire, from any thread

    def send_control(self, peer: str, message: control.ControlMessage, blob: bytes = b"") -> None:
        self._outgoing.put((peer, message))
        self._waker.wake()

    # Lanes

    def _run_lane(self, index: int, sock: SyncSocket, context: SyncContext) -> None:
        try:
            while not self._is_stopping.is_set():
                try:
                    self._take(index, sock, zmq.NOBLOCK)
                except zmq.Again:
                    self.state.flush_credits()
                    try:
                        self._take(index, sock, 0)
                    except zmq.Again:
                        continue
        except Exception:
            logger.exception("KV lane %d failed; its transfers will run into their deadlines", index)
        finally:
            sock.close(0)
            context.term()

    def _take(self, index: int, sock: SyncSocket, flags: int) -> None:
        frames = sock.recv_multipart(flags, copy=False)
        if len(frames) != 2:
            self.state.count_malformed()
            return
        self.state.on_data(index, frames[0].buffer, frames[1].buffer)
        if self.state.has_events:
            self._waker.wake()

    # The control thread

    def _run_control(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fileno(), zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while not self._is_stopping.is_set():
                is_busy = self.state.num_transfers > 0 or self._unreachable_s or self._clock.now_s() < self._is_suspicious_until_s
                poller.poll(int(1000 * (TICK_S if is_busy else _PROBE_INTERVAL_S)))
                self._waker.drain()
                self._read_monitor()
                self._read_router()
                self.state.tick()
                self._watch_peers()
                self.state.deliver_events()
                self._flush()
        except Exception:
            logger.exception("the KV receiver's control thread failed")
            self.state.close("the KV receiver failed")
        finally:
            self._flush()
            self._deliver_last_events()
            self._router.disable_monitor()
            self._monitor.close(0)
            self._router.close(100)
            self._context.term()
            self._waker.close()

    def _deliver_last_events(self) -> None:
        self._is_stopping.set()
        for lane in self._threads[1:]:
            lane.join(_CLOSE_TIMEOUT_S)
        self.state.close()
        self.state.deliver_events()

    def _read_router(self) -> None:
        # Bounded, so that answers and events are not kept waiting by a flood.
        for _ in range(256):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not 2 <= len(frames) <= 3:
                self.state.count_malformed()
                continue
            try:
                message = control.decode(frames[1])
            except control.OtherVersionError as error:
                self.state.refuse_version(frames[0].decode("latin-1"), error)
                continue
            except ProtocolError as error:
                logger.debug("KV control message refused: %s", error)
                self.state.count_malformed()
                continue
            self.state.on_control(frames[0].decode("latin-1"), message, frames[2] if len(frames) == 3 else b"")

    def _flush(self) -> None:
        while True:
            try:
                peer, message = self._outgoing.get_nowait()
            except queue.Empty:
                return
            self._send(peer, message)

    def _send(self, peer: str, message: control.ControlMessage) -> None:
        try:
            self._router.send_multipart([peer.encode("latin-1"), control.encode(message)], zmq.NOBLOCK)
        except ProtocolError as error:
            logger.error("KV control message not sent: %s", error.message)
            self.state.count_malformed()
        except zmq.Again:
            # Its queue is full: it does not read. All control messages can be repeated; silence ends the transfer.
            self.state.count_malformed()
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._unreachable_s.setdefault(peer, self._clock.now_s())
        else:
            self._unreachable_s.pop(peer, None)

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            # The event does not say whose connection it was: ask everyone, ROUTER_MANDATORY tells who is gone.
            self._is_suspicious_until_s = self._clock.now_s() + 2 * DISCONNECT_GRACE_S
            self._last_probe_s = 0.0

    def _watch_peers(self) -> None:
        now = self._clock.now_s()
        is_suspicious = now < self._is_suspicious_until_s or bool(self._unreachable_s)
        interval = TICK_S if is_suspicious else HEARTBEAT_S if self.state.num_transfers else _PROBE_INTERVAL_S
        if now - self._last_probe_s >= interval:
            self._last_probe_s = now
            for peer, incarnation in self.state.peers():
                self._send(peer, control.Renew(src_incarnation=self._incarnation, dst_incarnation=incarnation))
        for peer, since in list(self._unreachable_s.items()):
            if now - since > DISCONNECT_GRACE_S:
                del self._unreachable_s[peer]
                self.state.on_peer_lost(peer, "the connection to the prefill worker broke")


def _ports(first: int, num_lanes: int) -> list[int]:
    """Of control and of each lane; 0: any."""
    return [first and first + index for index in range(1 + num_lanes)]
