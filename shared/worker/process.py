"""What makes a Python process a well-behaved service: logging, signals, dying with its parent, progress to whoever started it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable

STATUS_FD_VARIABLE = "PAGEWIRE_STATUS_FD"
"""A file descriptor the launcher reads: lines "loading <fraction>", then "ready", of a worker with its device, or "failed <why>"."""
DIE_WITH_PARENT_VARIABLE = "PAGEWIRE_DIE_WITH_PARENT"
"""The launcher's pid."""
_PR_SET_PDEATHSIG = 1


def set_up_process(name: str) -> None:
    """Logging to stderr; and, where the launcher asks for it, an end to this process when the launcher is killed."""
    logging.basicConfig(
        level=os.environ.get("PAGEWIRE_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if os.environ.get(DIE_WITH_PARENT_VARIABLE) and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ[DIE_WITH_PARENT_VARIABLE]):
            # The launcher died before the call above.
            os.kill(os.getpid(), signal.SIGTERM)


def report_status(text: str) -> bool:
    """Tell the launcher; False if there is none, and the user should be told instead."""
    descriptor = os.environ.get(STATUS_FD_VARIABLE)
    if not descriptor:
        return False
    with contextlib.suppress(OSError, ValueError):
        os.write(int(descriptor), f"{text}\n".encode())
    return True


def report_progress(fraction: float) -> None:
    report_status(f"loading {fraction:.3f}")


def on_termination(stop: Callable[[], None]) -> None:
    """Call `stop`, which must be safe to call again, at every SIGTERM or SIGINT. Stopping is bounded, so no signal cuts it short."""

    def handle(_signum: int, _frame: object) -> None:
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
