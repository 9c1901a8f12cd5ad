"""Identifiers: random, so that no two processes need to agree, and wide enough never to meet by chance."""

from __future__ import annotations

import secrets


def new_request_id(prefix: str) -> str:
    """An id such as `cmpl-3f…`; 96 random bits."""
    return f"{prefix}-{secrets.token_hex(12)}"


def new_transfer_id() -> str:
    """16 random bytes in hex; names one dispatch of one request from prefill to decode."""
    return secrets.token_hex(16)


def new_incarnation() -> int:
    """A random non-zero u64 drawn once per process start: tells a restarted worker from its predecessor."""
    return secrets.randbits(63) + 1


def new_grant_id() -> int:
    """A random non-zero u64 naming one reservation on a receiver."""
    return secrets.randbits(63) + 1
