"""One direction of a ZMTP 3 connection cut into what a proxy may drop, double or hold back without the ends losing step: messages.

Only what is not encrypted is understood (mechanism NULL); of CURVE and of any other protocol the bytes pass as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_GREETING_NBYTES = 64
_MECHANISM = slice(12, 32)
_NULL = b"NULL".ljust(20, b"\0")
_MORE, _LONG, _COMMAND = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of the stream. `frames` are those of a whole message; None for everything else."""

    data: bytes
    frames: tuple[bytes, ...] | None = None


def encode_message(frames: Sequence[bytes]) -> bytes:
    """The bytes of one message."""
    parts = []
    for index, frame in enumerate(frames):
        flags = _MORE if index < len(frames) - 1 else 0
        parts += [bytes([flags, len(frame)]) if len(frame) < 256 else bytes([flags | _LONG]) + len(frame).to_bytes(8, "big"), frame]
    return b"".join(parts)


class ZmtpStream:
    def __init__(self) -> None:
        self._greeting = b""
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        """Of the message under way."""

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces that are complete with `data`."""
        if len(self._greeting) < _GREETING_NBYTES:
            # The ends answer each other in the middle of the greeting, so none of it may wait.
            part, data = data[: _GREETING_NBYTES - len(self._greeting)], data[_GREETING_NBYTES - len(self._greeting) :]
            self._greeting += part
            yield Piece(part)
        if not data:
            return
        if not (self._greeting[:1] == b"\xff" and self._greeting[_MECHANISM] == _NULL):
            yield Piece(data)
            return
        self._buffer += data
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                yield Piece(bytes([flags, len(body)]) + body if not flags & _LONG else bytes([flags]) + len(body).to_bytes(8, "big") + body)
                continue
            self._frames.append(body)
            if not flags & _MORE:
                frames, self._frames = tuple(self._frames), []
                yield Piece(encode_message(frames), frames)

    def _next_frame(self) -> tuple[int, bytes] | None:
        """(flags, body), taken from the buffer when it is there in full."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        start = 9 if buffer[0] & _LONG else 2
        if len(buffer) < start:
            return None
        end = start + int.from_bytes(buffer[1:start], "big")
        if len(buffer) < end:
            return None
        flags, body = buffer[0], bytes(buffer[start:end])
        del buffer[:end]
        return flags, body
