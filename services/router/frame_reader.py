"""A ZeroMQ socket read by callbacks of the event loop: no future and no task for a message, of which there is one for every step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

_BURST = 64
# Plain integers: the operators of zmq's enumerations cost more than the call.
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)


class FrameReader:
    """`on_message(frames)` runs on the event loop for every message from now until `close`; it must not block or raise."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_message = on_message
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._is_closed = False
        self._loop.add_reader(self._descriptor, self._read)
        self.read_soon()

    def read_soon(self) -> None:
        """To be called after every other use of the socket: it may have taken in the one signal that there is something to read."""
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Call it before the socket is closed. Safe to call again."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._descriptor)

    def _read(self) -> None:
        # The descriptor tells of a change only: until there is nothing left to read, nothing more will be heard from it.
        for _ in range(_BURST):
            if self._is_closed or not int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
                return
            self._on_message(self._socket.recv_multipart(_NOBLOCK))
        # The others on the loop get their turn.
        self.read_soon()
