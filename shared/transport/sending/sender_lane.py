"""One data lane to one decode worker: a queue, a blocking thread, a PUSH socket and a context of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import zmq

from shared.transport.connector import FrameTap
from shared.transport.protocol.frames import DataHeader, MessageType
from shared.transport.wires.zmq_sockets import SyncSocket, connect, new_context, new_lane_socket

logger = logging.getLogger(__name__)
_SEND_TIMEOUT_MS = 100


class SenderLane:
    """Never blocks whoever calls `send`; credits bound what waits in the queue."""

    def __init__(
        self,
        endpoint: str,
        max_chunk_bytes: int,
        on_failed: Callable[[str, str], None],
        tap: FrameTap | None,
        secure: Callable[[SyncSocket], None],
    ) -> None:
        """`secure` is called with the socket before it connects."""
        self._endpoint = endpoint
        self._max_chunk_bytes = max_chunk_bytes
        self._on_failed = on_failed
        self._tap = tap
        self._secure = secure
        self._queue: queue.SimpleQueue[tuple[DataHeader, memoryview] | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{endpoint}", daemon=True)
        self._thread.start()

    def send(self, header: DataHeader, payload: memoryview) -> None:
        self._queue.put((header, payload))

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop at once; what is queued is dropped."""
        self._is_closed.set()
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        context = new_context()
        sock = new_lane_socket(context, zmq.PUSH, self._max_chunk_bytes, _SEND_TIMEOUT_MS)
        try:
            self._secure(sock)
            connect(sock, self._endpoint)
            while (item := self._queue.get()) is not None and not self._is_closed.is_set():
                header, payload = item
                try:
                    self._send(sock, header, payload)
                except Exception as error:
                    logger.warning("KV lane to %s: %s", self._endpoint, error)
                    self._on_failed(header.transfer_id.hex(), f"the prefill worker cannot send on a lane: {error}")
        except zmq.ZMQError as error:
            logger.warning("KV lane to %s cannot be opened: %s", self._endpoint, error)
            while (item := self._queue.get()) is not None:
                self._on_failed(item[0].transfer_id.hex(), f"the prefill worker cannot open a lane: {error}")
        finally:
            sock.close(0)
            context.term()

    def _send(self, sock: zmq.Socket[bytes], header: DataHeader, payload: memoryview) -> None:
        if self._tap is not None and header.msg_type is not MessageType.PROBE:
            tapped = self._tap(header, payload)
            if tapped is None:
                return
            payload = tapped
        frames: list[bytes | memoryview] = [header.pack(), payload]
        while not self._is_closed.is_set():
            try:
                sock.send_multipart(frames, copy=False)
                return
            except zmq.Again:
                continue
