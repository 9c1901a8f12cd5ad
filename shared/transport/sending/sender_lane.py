"""One data lane to one decode worker: a queue, a blocking thread, a PUSH socket and a context of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

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
        """`on_read(transfer_id, chunk_seq, read)` is called once for each CHUNK; `secure` with the socket before it connects."""
        self._endpoint = endpoint
        self._memory = memory
        self._on_read = on_read
        self._tap = tap
        self._secure = secure
        self._queue: queue.SimpleQueue[DataMessage | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._context = new_context()
        self._sock = new_lane_socket(self._context, zmq.PUSH, max_chunk_bytes, _SEND_TIMEOUT_MS)
        self._monitor = self._sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{endpoint}", daemon=True)
        self._thread.start()

    def send(self, message: DataMessage) -> None:
        self._queue.put(message)

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
        """Stop at once; what is queued is dropped. On the thread that reads `connection_changes`."""
        self._monitor.close(0)
        self._is_closed.set()
        self._queue.put(None)

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
        while (message := self._queue.get()) is not None:
            if self._is_closed.is_set() or failure:
                self._report(message, ChunkRead(message.header, failure=failure or "the lane was closed"))
            else:
                self._take(message)
        # Behind the end mark nothing is put any more: close() comes from the thread that sends.
        self._sock.disable_monitor()
        self._sock.close(0)
        self._context.term()

    def _take(self, message: DataMessage) -> None:
        """Read, report, send. The report comes first: the answer to a chunk must not overtake it."""
        try:
            header, payload, read = read_message(self._memory, message)
        except Exception as error:
            logger.exception("KV lane to %s cannot read a block", self._endpoint)
            self._report(message, ChunkRead(message.header, failure=f"the prefill worker cannot read a block: {error}"))
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
