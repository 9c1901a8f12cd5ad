"""One data lane to one decode worker: a queue, a blocking thread, a PUSH socket and a context of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.errors import reason_of
from shared.transport.connector import BlockMemory, ChunkRead, DataMessage, FrameTap
from shared.transport.protocol.frames import MessageType
from shared.transport.sending.chunk_reading import read_message
from shared.transport.wires.zmq_sockets import SyncSocket, connect, new_context, new_lane_socket

logger = logging.getLogger(__name__)
_SEND_TIMEOUT_MS = 100


class SenderLane:
    """Never blocks whoever calls `send`; credits bound what waits in the queue."""

    def __init__(
        self,
        endpoint: str,
        max_chunk_bytes: int,
        memory: BlockMemory,
        on_read: Callable[[str, int, ChunkRead], None],
        tap: FrameTap | None,
        secure: Callable[[SyncSocket], None],
    ) -> None:
        """`on_read(transfer_id, chunk_seq, read)` is called once for each CHUNK, on this lane's thread or by `drop` on its caller's;
        `secure` with the socket before it connects."""
        self._endpoint = endpoint
        self._memory = memory
        self._on_read = on_read
        self._tap = tap
        self._secure = secure
        self._queue: deque[DataMessage] = deque()
        self._changed = threading.Condition()
        """Guards the queue; told when it grows, and at the end."""
        self._is_closed = threading.Event()
        self._context = new_context()
        self._sock = new_lane_socket(self._context, zmq.PUSH, max_chunk_bytes, _SEND_TIMEOUT_MS)
        self._monitor = self._sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{endpoint}", daemon=True)
        self._thread.start()

    def send(self, message: DataMessage) -> None:
        with self._changed:
            self._queue.append(message)
            self._changed.notify()

    def drop(self, transfer_id: str | None = None) -> None:
        """Send nothing more of what waits, of one transfer or at all. Each CHUNK of it is reported as not read: a lane whose connection
        is broken would keep its blocks until it is back."""
        with self._changed:
            waiting = [message for message in self._queue if transfer_id in (None, message.header.transfer_id.hex())]
            self._queue = deque(message for message in self._queue if transfer_id not in (None, message.header.transfer_id.hex()))
        for message in waiting:
            self._report(message, ChunkRead(message.header))

    def connection_changes(self) -> list[bool]:
        """What has happened to the connection since the last call: True, it was made; False, it broke. For one thread only."""
        changes = []
        while self._monitor.poll(0):
            changes.append(recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return changes

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop at once; what is queued is dropped. On the thread that reads `connection_changes`, which is not called again."""
        with self._changed:
            self._is_closed.set()
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        failure = ""
        try:
            self._secure(self._sock)
            connect(self._sock, self._endpoint)
        except zmq.ZMQError as error:
            logger.warning("KV lane to %s cannot be opened: %s", self._endpoint, error)
            failure = f"the prefill worker cannot open a lane: {error}"
        while (message := self._next()) is not None:
            if self._is_closed.is_set() or failure:
                self._report(message, ChunkRead(message.header, failure=failure or "the lane was closed"))
            else:
                self._take(message)
        # After close() nothing is put any more: it comes from the thread that sends. Its monitor ends before the socket that is read does:
        # libzmq reports an event to nobody for ever, with a lock held for which disable_monitor waits with the interpreter's.
        self._sock.disable_monitor()
        self._monitor.close(0)
        self._sock.close(0)
        self._context.term()

    def _next(self) -> DataMessage | None:
        """None: the lane is closed and nothing is left to be answered."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed.is_set())
            return self._queue.popleft() if self._queue else None

    def _take(self, message: DataMessage) -> None:
        """Read, report, send. The report comes first: the answer to a chunk must not overtake it."""
        try:
            header, payload, read = read_message(self._memory, message)
        except Exception as error:
            logger.exception("KV lane to %s cannot read a block", self._endpoint)
            self._report(message, ChunkRead(message.header, failure=f"the prefill worker cannot read a block: {reason_of(error)}"))
            return
        try:
            if self._tap is not None and header.msg_type is not MessageType.PROBE:
                tapped = self._tap(header, payload)
                if tapped is None:
                    self._report(message, read)
                    return
                payload = tapped
        except Exception as error:
            self._report(message, ChunkRead(header, failure=f"the prefill worker cannot send on a lane: {error}"))
            return
        self._report(message, read)
        self._send([header.pack(), payload])

    def _report(self, message: DataMessage, read: ChunkRead) -> None:
        if message.header.msg_type is MessageType.CHUNK:
            self._on_read(message.header.transfer_id.hex(), message.header.chunk_seq, read)

    def _send(self, frames: list[bytes | memoryview]) -> None:
        while not self._is_closed.is_set():
            try:
                self._sock.send_multipart(frames, copy=False)
                return
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                # What was not sent is missing at the next fence.
                logger.warning("KV lane to %s: %s", self._endpoint, error)
                return
