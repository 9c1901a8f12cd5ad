"""How many control messages each connection may still send: its own for as long as it speaks, whatever it says, HELLO and BYE too."""

from __future__ import annotations

from collections import OrderedDict

from shared.transport.protocol.limits import CONTROL_BURST, CONTROL_RATE_PER_S, MAX_CONTROL_QUOTAS


class ControlQuotas:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By connection: messages at a time; who spoke last stands last."""

    def take(self, key: str, now: float) -> bool:
        """One message came from there; False: it is one too many. `now`: seconds."""
        num_left, since_s = self._left.pop(key, (float(CONTROL_BURST), now))
        num_left = min(CONTROL_BURST, num_left + (now - since_s) * CONTROL_RATE_PER_S)
        is_within = num_left >= 1
        self._left[key] = (num_left - is_within, now)
        if len(self._left) > MAX_CONTROL_QUOTAS:
            self._left.popitem(last=False)
        return is_within
