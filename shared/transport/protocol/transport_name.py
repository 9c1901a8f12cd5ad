"""The ways KV can travel, and who can use which."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

TransportName = Literal["cuda", "shm", "ipc", "tcp"]
"""cuda: the receiver copies out of the memory of the sender's GPU, shm: out of its host memory; ZeroMQ carries notices. ipc: ZeroMQ over
Unix sockets. tcp: ZeroMQ over TCP."""

BY_SPEED: tuple[TransportName, ...] = ("cuda", "shm", "ipc", "tcp")


def allowed(setting: str) -> tuple[TransportName, ...]:
    """Those that the setting kv_transport allows, the best first."""
    return BY_SPEED if setting == "auto" else tuple(name for name in BY_SPEED if name == setting)


def network_identity() -> str:
    """The same in two processes exactly when they share a kernel and a network namespace, hence abstract Unix sockets. "": unknown."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    return hashlib.sha256(f"{boot_id} {namespace.st_dev} {namespace.st_ino}".encode()).hexdigest()
