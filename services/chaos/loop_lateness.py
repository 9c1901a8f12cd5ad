"""How late the event loop of a chaos run is: an observer that was held up itself sees everything late."""

from __future__ import annotations

import asyncio
import time

_NAP_S = 0.02
_USUAL_S = 0.005
"""A loop with work of its own is this late without being held up."""


class LoopLateness:
    def __init__(self) -> None:
        self._sum_s = 0.0
        self._due_s: float | None = None

    @property
    def total_s(self) -> float:
        """Since `watch` began, to this moment."""
        return self._sum_s + (max(0.0, time.monotonic() - self._due_s) if self._due_s is not None else 0.0)

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            self._due_s = time.monotonic() + _NAP_S + _USUAL_S
            await asyncio.sleep(_NAP_S)
            self._sum_s = self.total_s
