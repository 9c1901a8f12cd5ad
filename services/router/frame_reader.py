"""A ZeroMQ socket read by callbacks of the event loop: no future and no task for a message, of which there is one for every step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

_BURST = 64
_NOBLOCK = int(zmq.NOBLOCK)  # a plain integer: the operators of zmq's enumerations cost more than the call


class FrameReader:
    """`on_frame(frame)` runs on the event loop for every frame from now until `close`; it must not block or raise."""

    def __init__(self, socket: zmq.Socket[bytes], on_frame: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_frame = on_frame
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
            if self._is_closed:
                return
            try:
                frame = self._socket.recv(_NOBLOCK)
            except zmq.Again:
                return
            self._on_frame(frame)
        # The others on the loop get their turn.
        self.read_soon()
