"""The router's line to one worker incarnation: a DEALER socket, a reader that hands each message to its request, a monitor.

The monitor makes the death of a worker's process known within milliseconds; a worker that hangs is found by its lease.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from services.router.frame_reader import FrameReader
from shared.errors import ProtocolError
from shared.messages import Ping, RouterMessage, WorkerMessage, WorkerTiming, decode_batch, encode

_logger = logging.getLogger(__name__)
_HEARTBEAT_INTERVAL_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 5000
_MAX_MESSAGE_BYTES = 4 << 20
_SEND_QUEUE_LENGTH = 1000


class WorkerGone(NamedTuple):
    """Handed to every request of a worker that died."""

    reason: str


Handler = Callable[[WorkerMessage | WorkerGone], None]


class WorkerClient:
    """Not thread-safe: everything happens on the event loop that called `start`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        worker_id: str,
        endpoint: str,
        on_disconnect: Callable[[], None],
        on_timing: Callable[[WorkerTiming], None],
    ) -> None:
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._on_disconnect = on_disconnect
        self._on_timing = on_timing
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, _SEND_QUEUE_LENGTH),
            (zmq.RCVHWM, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 500),
        ):
            self._socket.setsockopt(option, value)
        self._handlers: dict[str, Handler] = {}
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._readers: list[FrameReader] = []
        self._event_frames: list[bytes] = []
        self._is_closed = False
        self.is_connected = False
        self.num_invalid_messages = 0
        self.heard_s = float("-inf")
        """When the worker last said anything, on the clock of time.monotonic; while it has requests of ours it does so twice a second."""

    def start(self) -> None:
        self._socket.connect(self._endpoint)
        self._readers = [FrameReader(self._socket, self._take), FrameReader(self._monitor, self._note_event)]

    def register(self, request_id: str, handler: Handler) -> None:
        """`handler` gets every message about `request_id`, on the event loop, until `unregister`. It must not block or raise."""
        self._handlers[request_id] = handler

    def unregister(self, request_id: str) -> None:
        self._handlers.pop(request_id, None)

    def send(self, message: RouterMessage) -> bool:
        """Hand `message` to the socket without waiting. False: the worker is gone or takes nothing in."""
        if self._is_closed:
            return False
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        finally:
            self._readers[0].read_soon()
        return True

    def close(self, reason: str) -> None:
        """Tell every request that the worker is gone, and drop what is queued for it."""
        if self._is_closed:
            return
        self._is_closed = True
        self.is_connected = False
        for reader in self._readers:
            reader.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        handlers, self._handlers = self._handlers, {}
        for handler in handlers.values():
            handler(WorkerGone(reason))

    def _note_event(self, frame: bytes) -> None:
        # An event comes as two frames: what happened, and to which address.
        self._event_frames.append(frame)
        if len(self._event_frames) < 2:
            return
        frames, self._event_frames = self._event_frames, []
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_connected = True
        elif event == zmq.EVENT_DISCONNECTED and self.is_connected:
            self._on_disconnect()

    def _take(self, frame: bytes) -> None:
        self.heard_s = time.monotonic()
        try:
            messages = decode_batch(frame)
        except ProtocolError as error:
            self.num_invalid_messages += 1
            if self.num_invalid_messages == 1:
                _logger.warning("worker %s sent a message that cannot be read: %s", self._worker_id, error)
            return
        for message in messages:
            if isinstance(message, Ping):
                continue
            if isinstance(message, WorkerTiming):
                # Often the last message about a request, after the one that ended it: nobody need be waiting for it.
                self._on_timing(message)
            # Messages about requests that have ended are expected: the abort and they crossed.
            handler = self._handlers.get(message.request_id)
            if handler is not None:
                handler(message)
