"""Ports of this machine: is one free, and give me one."""

from __future__ import annotations

import errno
import socket

from shared.errors import ConfigurationError


def check_port(host: str, port: int) -> None:
    """ConfigurationError if nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigurationError(f"cannot listen on {host}:{port}: {reason}; choose another with --port or PAGEWIRE_PORT") from error


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
