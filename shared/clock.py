"""Time as a port, so that deadlines can be tested without sleeping. Durations use `now_s` only: wall clocks jump."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a monotonic clock; only differences mean something."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves when told to."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds
