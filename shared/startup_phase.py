"""Where the time between the start of a process and its readiness goes: a line for each part in its log, at debug level."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)
_STAT, _UPTIME = Path("/proc/self/stat"), Path("/proc/uptime")
_TICKS_PER_S = 100
"""Of /proc, on every Linux."""


@contextlib.contextmanager
def startup_phase(name: str) -> Iterator[None]:
    """Logs how long the body took."""
    start_s = time.monotonic()
    yield
    log_phase(name, time.monotonic() - start_s)


def log_phase(name: str, seconds: float) -> None:
    logger.debug("start-up: %s took %.3f s", name, seconds)


def process_age_s() -> float:
    """Since this process was started; 0 where the system does not say (not Linux)."""
    try:
        ticks = int(_STAT.read_text().rpartition(")")[2].split()[19])
        return float(_UPTIME.read_text().split()[0]) - ticks / _TICKS_PER_S
    except (OSError, ValueError, IndexError):
        return 0.0
