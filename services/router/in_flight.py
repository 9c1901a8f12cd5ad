"""A bound on the choices in flight: what does not fit is refused at once instead of waiting unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.errors import InvalidRequestError, OverloadedError

RETRY_AFTER_S = 1.0


class InFlightLimit:
    """`on_change` is told the new count each time."""

    def __init__(self, limit: int, on_change: Callable[[int], None]) -> None:
        self._limit = limit
        self._on_change = on_change
        self.num_in_flight = 0

    def check(self, count: int) -> None:
        """Raises OverloadedError if `count` more would not fit now, InvalidRequestError if they never will."""
        if count > self._limit:
            raise InvalidRequestError(f"prompts x n is {count}; this server takes at most {self._limit} at a time", param="n")
        if self.num_in_flight + count > self._limit:
            raise OverloadedError(f"{self.num_in_flight} requests are in flight, the limit is {self._limit}", retry_after_s=RETRY_AFTER_S)

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        self.check(count)
        self._add(count)
        try:
            yield
        finally:
            self._add(-count)

    def _add(self, count: int) -> None:
        self.num_in_flight += count
        self._on_change(self.num_in_flight)
