"""The ranks of a tensor-parallel decode worker as one receiver: a transfer commits when it has on every rank, or on none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.transport.connector import CommitInfo, ReceiverEvents


@dataclass(slots=True)
class _Outcome:
    committed: dict[int, tuple[bytes, CommitInfo]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    failure: str | None = None
    is_cancelled: bool = False


class RankGroup:
    """Gathers what the receivers of all ranks are told, on any threads, and tells `events` once for each transfer.

    When a rank fails, `abort(rank, transfer_id, reason)` is called for the others: it returns whether that ended the transfer there, as
    KVReceiver.abort does. A rank that had committed already gives up what it got: nothing starts on part of the ranks.
    """

    def __init__(self, num_ranks: int, events: ReceiverEvents, abort: Callable[[int, str, str], bool]) -> None:
        self._num_ranks = num_ranks
        self._events = events
        self._abort = abort
        self._lock = threading.Lock()
        self._outcomes: dict[str, _Outcome] = {}

    def of(self, rank: int) -> ReceiverEvents:
        """What the receiver of `rank` is to be given as its events."""
        return _RankEvents(self, rank)

    def note(
        self, rank: int, transfer_id: str, committed: tuple[bytes, CommitInfo] | None, reason: str, *, is_cancelled: bool = False
    ) -> None:
        with self._lock:
            outcome = self._outcomes.setdefault(transfer_id, _Outcome())
            outcome.ended.add(rank)
            is_first_failure = committed is None and outcome.failure is None
            if committed is not None:
                outcome.committed[rank] = committed
            elif is_first_failure:
                outcome.failure, outcome.is_cancelled = reason, is_cancelled
            others = [other for other in range(self._num_ranks) if other not in outcome.ended] if is_first_failure else []
        aborted = {other for other in others if self._abort(other, transfer_id, f"another rank failed: {reason}")}
        with self._lock:
            outcome.ended |= aborted
            if len(outcome.ended) < self._num_ranks or self._outcomes.pop(transfer_id, None) is None:
                return
        if outcome.failure is not None:
            self._events.on_failed(transfer_id, outcome.failure, outcome.is_cancelled)
        else:
            self._events.on_committed(transfer_id, *outcome.committed[0])


class _RankEvents:
    def __init__(self, group: RankGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def on_committed(self, transfer_id: str, hidden_state: bytes, info: CommitInfo) -> None:
        self._group.note(self._rank, transfer_id, (hidden_state, info), "")

    def on_failed(self, transfer_id: str, reason: str, is_cancelled: bool) -> None:
        self._group.note(self._rank, transfer_id, None, reason, is_cancelled=is_cancelled)
