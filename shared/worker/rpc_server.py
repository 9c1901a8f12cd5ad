"""The worker's end of the router protocol: one ROUTER socket served by one thread; answers may be sent from any thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

import zmq

from shared.errors import ConfigurationError, ProtocolError
from shared.messages import Ping, RouterMessage, WorkerMessage, decode_router_message, encode_batch

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
MAX_BURST_MESSAGES = 256
PING_INTERVAL_S = 0.5
SEND_QUEUE_MESSAGES = 100_000
"""Outgoing messages kept for a router that does not read; more are dropped, and its requests end by deadline."""


class _Held(threading.local):
    """What this thread sends inside of a `batch`; None outside."""

    messages: dict[bytes, list[WorkerMessage]] | None = None


class RpcServer:
    """`handler(router_identity, message)` and `on_router_gone(router_identity)` run on the server's thread and must not block.

    That a router is gone shows when a message cannot be delivered to it, its connection being closed; so those that have requests
    here (`routers_in_use`) are sent a ping now and then, in case there is no answer for them yet."""

    def __init__(
        self,
        bind_host: str,
        advertise_host: str,
        handler: Callable[[bytes, RouterMessage], None],
        on_router_gone: Callable[[bytes], None] = lambda _router: None,
        routers_in_use: Callable[[], set[bytes]] = set,
    ) -> None:
        self._handler = handler
        self._routers_in_use = routers_in_use
        self._on_router_gone = on_router_gone
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        try:
            port = self._socket.bind_to_random_port(f"tcp://{bind_host}")
        except zmq.ZMQError as error:
            raise ConfigurationError(f"cannot listen on {bind_host}: {error}; set PAGEWIRE_BIND_HOST to an address of this host") from error
        self.endpoint = f"tcp://{advertise_host}:{port}"
        self._held = _Held()
        self._outgoing: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self._wake_lock = threading.Lock()
        wake_address = f"inproc://rpc-wake-{id(self)}"
        self._wake_receiver = self._context.socket(zmq.PAIR)
        self._wake_receiver.bind(wake_address)
        self._wake_sender = self._context.socket(zmq.PAIR)
        self._wake_sender.connect(wake_address)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="rpc", daemon=True)
        self.num_rejected = 0

    def start(self) -> None:
        self._thread.start()

    def send(self, router: bytes, message: WorkerMessage) -> None:
        """Queue `message` for a router; never blocks, from any thread. A router that is gone is ignored."""
        if self._held.messages is not None:
            self._held.messages.setdefault(router, []).append(message)
        else:
            self._queue(router, [message])
            self._wake()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """What the calling thread sends inside leaves together at the end: one frame for each router. Inside, wait for nothing."""
        held: dict[bytes, list[WorkerMessage]] = {}
        self._held.messages = held
        try:
            yield
        finally:
            self._held.messages = None
            for router, messages in held.items():
                self._queue(router, messages)
            if held:
                self._wake()

    def _queue(self, router: bytes, messages: list[WorkerMessage]) -> None:
        for frame in encode_batch(messages):
            self._outgoing.put((router, frame))

    def _wake(self) -> None:
        with self._wake_lock, contextlib.suppress(zmq.ZMQError):
            self._wake_sender.send(b"", zmq.NOBLOCK)

    def close(self, timeout_s: float = 1.0) -> None:
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._wake_lock:
            self._wake_sender.close(0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        ping_at_s = 0.0
        while not self._stopping:
            ready = dict(poller.poll(int(PING_INTERVAL_S * 1000)))
            if time.monotonic() >= ping_at_s:
                ping_at_s = time.monotonic() + PING_INTERVAL_S
                for router in self._routers_in_use():
                    self._queue(router, [Ping()])
            if self._wake_receiver in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._wake_receiver.recv(zmq.NOBLOCK)
            self._flush()
            if self._socket in ready:
                # A bounded burst: answers go out in between, whatever comes in.
                with contextlib.suppress(zmq.Again):
                    for _ in range(MAX_BURST_MESSAGES):
                        self._take(self._socket.recv_multipart(zmq.NOBLOCK))
        self._flush()
        self._socket.close(200)
        self._wake_receiver.close(0)

    def _flush(self) -> None:
        while True:
            try:
                router, frame = self._outgoing.get_nowait()
            except queue.Empty:
                return
            try:
                self._socket.send_multipart([router, frame], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    self._on_router_gone(router)
                else:
                    logger.warning("an answer was dropped: %s", error)

    def _take(self, frames: list[bytes]) -> None:
        router = frames[0]
        try:
            if len(frames) != 2:
                raise ProtocolError(f"expected one frame, got {len(frames) - 1}")
            self._handler(router, decode_router_message(frames[1]))
        except ProtocolError as error:
            self.num_rejected += 1
            if self.num_rejected & (self.num_rejected - 1) == 0:  # 1, 2, 4, 8, ...: a flood is not to fill the log
                logger.warning("%d messages dropped so far, the last one: %s", self.num_rejected, error)
        except Exception:
            logger.exception("handler failed")
