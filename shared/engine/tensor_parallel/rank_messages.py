"""What the first rank, which has the scheduler, tells the others; over a socket pair of this machine, each message with its length."""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass, field
from enum import IntEnum

from pydantic import BaseModel, ConfigDict

from shared.config import Settings

ALIVE_INTERVAL_S = 0.25
_HEADER = struct.Struct("<BQ")


class Kind(IntEnum):
    SET_UP = 1
    """RankSetup as JSON; answered by READY when the weights are there, and on a CPU by ALIVE before and after."""
    READY = 2
    STEP = 3
    """StepInput: compute it."""
    COPY_BLOCK = 4
    """Two int64: copy the first block over the second. Where ranks share one KV cache the first does it alone."""
    ALIVE = 5
    """From another rank on a CPU, every ALIVE_INTERVAL_S."""
    NEW_CACHE = 6
    """On GPUs, where each rank has its own. One int64: from now on the KV cache has so many blocks; what was in it is gone."""
    CONNECT = 7
    """All ranks are READY: connect to each other. Not before, since one may load for minutes longer than the others."""


class RankSetup(BaseModel):
    """What a rank needs to be one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: Settings
    rank: int
    store_port: int
    num_blocks: int
    max_model_len: int
    dtype: str
    device: str
    memory_descriptor: int | None = None
    """Of the KV cache that all ranks share (RankMemory), inherited; None: each has its own."""


@dataclass
class RankChannel:
    sock: socket.socket
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """From any thread. Raises OSError when nobody reads within the socket's timeout, or nobody is there."""
        with self._sending:
            self.sock.sendall(_HEADER.pack(kind, len(payload)) + payload)

    def receive(self) -> tuple[Kind, bytes] | None:
        """None: the other end is gone. Waits for as long as the socket's timeout."""
        header = self._read(_HEADER.size)
        if header is None:
            return None
        kind, size = _HEADER.unpack(header)
        payload = self._read(size)
        return None if payload is None else (Kind(kind), payload)

    def _read(self, size: int) -> bytes | None:
        parts, missing = [], size
        while missing:
            part = self.sock.recv(missing)
            if not part:
                return None
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
