"""Finds stop strings in text that arrives piece by piece, holding back no more than might still become one.

Generation ends at the first character that completes a stop string; of several that end there the leftmost start (the longest)
wins, whatever the order of the list. So the result depends on the text alone, not on how tokens cut it: streaming and not agree.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Feed text to `push`; after `matched` is set everything further is dropped. Empty stop strings are ignored."""

    def __init__(self, stops: Sequence[str], include_stop_str: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop_str = include_stop_str
        self._held = ""
        self.matched: str | None = None

    @property
    def num_held(self) -> int:
        """Characters received and not yet given out."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Text that is safe to show now. On a match: what precedes the stop string (and the string itself if it is to be included)."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include_stop_str else start]
        safe = len(text) - self._longest_possible_start(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """At the end of generation: the held text, which did not become a stop string."""
        text, self._held = self._held, ""
        return text

    def _longest_possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
