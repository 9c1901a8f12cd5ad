"""One supervised operating-system process of the one-machine stack."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from shared.worker.process import DIE_WITH_PARENT_VARIABLE, STATUS_FD_VARIABLE

MIN_RESTART_DELAY_S = 0.2
MAX_RESTART_DELAY_S = 10.0
STABLE_AFTER_S = 20.0
"""A child that lived this long starts again without delay."""
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    # For children that are not ours to change (Redis): runs between fork and exec.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """What it reports: `fraction`, how much of the model is loaded; `device`, where it then computes; `failure`, why it cannot start."""

    def __init__(self, name: str, command: list[str], environ: Mapping[str, str], reports_status: bool = True) -> None:
        self.name = name
        self._command = command
        self._environ = dict(environ)
        self._reports_status = reports_status
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._restart_at_s = 0.0
        self._delay_s = MIN_RESTART_DELAY_S
        self.fraction = 0.0
        self.is_ready = False
        self.device: str | None = None
        self.failure: str | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """In a process group of its own, so that a Ctrl-C at the terminal reaches the launcher alone."""
        environ = dict(self._environ)
        pass_fds: tuple[int, ...] = ()
        reader = writer = -1
        if self._reports_status:
            reader, writer = os.pipe()
            environ |= {STATUS_FD_VARIABLE: str(writer), DIE_WITH_PARENT_VARIABLE: str(os.getpid())}
            pass_fds = (writer,)
        self.fraction, self.is_ready = 0.0, False
        self._process = subprocess.Popen(
            self._command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=pass_fds,
            process_group=0,
            preexec_fn=None if self._reports_status or sys.platform != "linux" else _die_with_parent,
        )
        self._started_s = time.monotonic()
        if self._reports_status:
            os.close(writer)
            threading.Thread(target=self._read_status, args=(reader,), name=f"status-{self.name}", daemon=True).start()

    def _read_status(self, reader: int) -> None:
        with os.fdopen(reader, "r", errors="replace") as lines:
            for line in lines:
                word, _, rest = line.strip().partition(" ")
                if word == "loading":
                    with contextlib.suppress(ValueError):
                        self.fraction = float(rest)
                elif word == "ready":
                    self.fraction, self.is_ready, self.device = 1.0, True, rest or None
                elif word == "failed":
                    self.failure = rest

    def poll(self) -> str | None:
        """None while it runs or waits for its restart; how it ended, once, when it has just died."""
        if self._process is None:
            if self._restart_at_s and time.monotonic() >= self._restart_at_s:
                self._restart_at_s = 0.0
                self.start()
            return None
        code = self._process.poll()
        if code is None:
            return None
        self._process = None
        lived_s = time.monotonic() - self._started_s
        self._delay_s = MIN_RESTART_DELAY_S if lived_s > STABLE_AFTER_S else min(MAX_RESTART_DELAY_S, self._delay_s * 2)
        self._restart_at_s = time.monotonic() + self._delay_s
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def terminate(self) -> None:
        self._restart_at_s = 0.0
        self._signal(signal.SIGTERM)

    def wait(self, deadline_s: float) -> None:
        """Until monotonic `deadline_s`, then SIGKILL."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            # A stopped process takes no SIGTERM until it is continued.
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)
