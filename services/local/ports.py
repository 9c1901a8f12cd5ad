"""Ports of this machine: is one free, and give me one."""

from __future__ import annotations

import contextlib
import errno
import random
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
    return free_ports(1, host)


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of `count` ports in a row that nothing uses. Outside the range from which the system gives out its own: there any
    connection could take one before it is listened on."""
    for first in random.SystemRandom().sample(range(20_000, 32_000 - count), 200):  # no seed makes two processes choose alike
        with contextlib.ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind((host, port))
            except OSError:
                continue
            return first
    raise ConfigurationError(f"found no {count} free ports in a row on {host}")
