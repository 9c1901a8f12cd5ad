"""How the sockets of KVX/1 are set up, and what wakes their threads. One socket belongs to one thread.

Control has its own context, hence its own I/O thread, and heartbeats. Data lanes have one context each and no heartbeat: it would
cut a healthy lane whose receiver is busy. IMMEDIATE: nothing is queued for a peer that is not connected.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

import zmq

from shared.errors import ConfigurationError
from shared.transport.protocol.frames import HEADER_NBYTES
from shared.transport.protocol.limits import MAX_CONTROL_BYTES

SyncContext = zmq.Context[zmq.Socket[bytes]]
SyncSocket = zmq.Socket[bytes]

_LANE_HWM = 4
_BUFFER_BYTES = 1 << 20
_CURVE_NBYTES = 33
"""What encryption adds to a frame: name, nonce, authenticator, flags. The limit is on what comes over the wire."""


def new_context() -> SyncContext:
    context: SyncContext = zmq.Context(io_threads=1)
    return context


def _harden(sock: SyncSocket, max_bytes: int) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, max_bytes + _CURVE_NBYTES)
    sock.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    sock.setsockopt(zmq.RECONNECT_IVL, 50)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


def new_control_socket(context: SyncContext, kind: int) -> SyncSocket:
    """DEALER (prefill) or ROUTER (decode)."""
    sock = context.socket(kind)
    _harden(sock, MAX_CONTROL_BYTES)
    sock.setsockopt(zmq.SNDHWM, 1000)
    sock.setsockopt(zmq.RCVHWM, 1000)
    sock.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
    if kind == zmq.ROUTER:
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    else:
        sock.setsockopt(zmq.IMMEDIATE, 1)
    return sock


def new_lane_socket(context: SyncContext, kind: int, max_chunk_bytes: int, timeout_ms: int) -> SyncSocket:
    """PUSH (prefill) or PULL (decode); sends and receives block for at most `timeout_ms`."""
    sock = context.socket(kind)
    _harden(sock, max(max_chunk_bytes, HEADER_NBYTES))
    for option, value in (
        (zmq.SNDHWM, _LANE_HWM),
        (zmq.RCVHWM, _LANE_HWM),
        (zmq.SNDBUF, _BUFFER_BYTES),
        (zmq.RCVBUF, _BUFFER_BYTES),
        (zmq.SNDTIMEO, timeout_ms),
        (zmq.RCVTIMEO, timeout_ms),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_MAXRT, 10_000),
    ):
        sock.setsockopt(option, value)
    if kind == zmq.PUSH:
        sock.setsockopt(zmq.IMMEDIATE, 1)
    return sock


def advertised_host(bind_host: str, advertise_host: str | None) -> str:
    """The host name others reach a socket by. Raises ConfigurationError when it cannot be told from a wildcard address."""
    if advertise_host:
        return advertise_host
    if bind_host in ("0.0.0.0", "::", "*"):
        raise ConfigurationError(f"bind_host {bind_host} is every address: set advertise_host to the name other services reach this one by")
    return bind_host


def is_loopback(bind_host: str) -> bool:
    """Nobody but this machine can reach what is bound there."""
    return ipaddress.ip_address(_numeric(bind_host)).is_loopback


def _numeric(host: str) -> str:
    # libzmq binds to numeric addresses only.
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def bind_tcp(sock: SyncSocket, bind_host: str, advertise_host: str, port: int = 0, advertise_port: int = 0) -> str:
    """Bind to `port` of `bind_host` (0: a free one); the endpoint as others reach it, at `advertise_port` unless that is 0.

    Raises ConfigurationError when something else listens there.
    """
    if ":" in bind_host:
        sock.setsockopt(zmq.IPV6, 1)
    try:
        sock.bind(f"tcp://{_bracketed(_numeric(bind_host))}:{port}")
    except zmq.ZMQError as error:
        if port == 0 or error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise ConfigurationError(
            f"cannot listen on {bind_host}:{port} for KV transfers ({error.strerror}): "
            "kv_port must be free, and the kv_lanes ports after it"
        ) from error
    port = advertise_port or int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    return f"tcp://{_bracketed(advertise_host)}:{port}"


def bind_ipc(sock: SyncSocket, name: str) -> str:
    """Bind to an abstract Unix socket, which needs no file and ends with the process; the endpoint, for this network namespace."""
    endpoint = f"ipc://@pagewire-{name}"
    sock.bind(endpoint)
    return endpoint


def connect(sock: SyncSocket, endpoint: str) -> None:
    if "[" in endpoint:
        sock.setsockopt(zmq.IPV6, 1)
    sock.connect(endpoint)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class Waker:
    """Wakes a thread that polls `fileno()`; `wake` may be called from any thread and never blocks."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        # A full pipe wakes just as well; a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
