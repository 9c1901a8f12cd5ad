"""Pairs of workers whose KV transfers fail one after the other: most often one cannot reach the other.

Both are well, and serve with others; nothing but what becomes of requests, and of prefixes pulled for them, shows it.
"""

from __future__ import annotations

import logging

from shared.cache.prefix_index import Holder
from shared.clock import Clock

_logger = logging.getLogger(__name__)
MAX_FAILURES = 2
"""In a row: then the pair is taken for broken."""
AVOIDED_S = 30.0
"""Since its last failure; then a request tries whether it works again."""
_FORGOTTEN_S = 600.0

Pair = tuple[Holder, Holder]
"""Sender, receiver."""


class BrokenPairs:
    """Of one router."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[Pair, tuple[int, float]] = {}
        """How many in a row, and when the last one was."""

    def note_success(self, pair: Pair) -> None:
        if self._failures.pop(pair, (0, 0.0))[0] >= MAX_FAILURES:
            _logger.info("KV goes from worker %s to worker %s again", pair[0].worker_id, pair[1].worker_id)

    def note_failure(self, pair: Pair, reason: str) -> None:
        now_s = self._clock.now_s()
        self._failures = {other: failure for other, failure in self._failures.items() if now_s - failure[1] < _FORGOTTEN_S}
        num_failures = self._failures.get(pair, (0, 0.0))[0] + 1
        self._failures[pair] = (num_failures, now_s)
        if num_failures >= MAX_FAILURES:
            _logger.warning(
                "%d KV transfers in a row from worker %s to worker %s failed, the last by: %s; others come first for %g s",
                num_failures, pair[0].worker_id, pair[1].worker_id, reason, AVOIDED_S,
            )  # fmt: skip

    def avoided(self) -> frozenset[Pair]:
        """Those to choose only where there is no other."""
        now_s = self._clock.now_s()
        return frozenset(pair for pair, (number, last_s) in self._failures.items() if number >= MAX_FAILURES and now_s - last_s < AVOIDED_S)
