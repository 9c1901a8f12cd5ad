"""How long the machine kept this process from running: what a claim about time may be late by without being wrong."""

from __future__ import annotations

import threading
import time

_NAP_S = 0.005
_USUAL_S = 0.001
"""A thread that wakes up this late was not kept from anything."""


class LostTime:
    """A thread that does nothing but wake up, and sums by how much too late: others' work, a stop of the whole machine, the GIL.

    with LostTime() as lost:
        ...
        assert took_s < 2.0 + lost.so_far_s
    """

    THREAD_NAME = "lost-time"

    def __init__(self) -> None:
        self.so_far_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.THREAD_NAME, daemon=True)

    def __enter__(self) -> LostTime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        woke_s = time.monotonic()
        while not self._is_over.is_set():
            time.sleep(_NAP_S)
            last_s, woke_s = woke_s, time.monotonic()
            self.so_far_s += max(0.0, woke_s - last_s - _NAP_S - _USUAL_S)
