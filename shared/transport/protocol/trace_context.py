"""A W3C traceparent as the raw fields of a data header."""

from __future__ import annotations

_UNTRACED = (bytes(16), bytes(8), 0)


def split_traceparent(traceparent: str) -> tuple[bytes, bytes, int]:
    """(trace id, span id, flags); zeros when there is no valid traceparent: a broken trace never breaks a transfer."""
    parts = traceparent.split("-")
    if len(parts) != 4 or [len(part) for part in parts] != [2, 32, 16, 2]:
        return _UNTRACED
    try:
        return bytes.fromhex(parts[1]), bytes.fromhex(parts[2]), int(parts[3], 16)
    except ValueError:
        return _UNTRACED
