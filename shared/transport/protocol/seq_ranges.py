"""Sets of small integers as (start, count) ranges: how chunk numbers and block indices travel in control messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.errors import ProtocolError

Ranges = tuple[tuple[int, int], ...]


def to_ranges(values: Iterable[int]) -> Ranges:
    """Ascending, disjoint ranges of `values`."""
    ranges: list[tuple[int, int]] = []
    for value in sorted(set(values)):
        if ranges and ranges[-1][0] + ranges[-1][1] == value:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((value, 1))
    return tuple(ranges)


def from_ranges(ranges: Sequence[tuple[int, int]], end: int) -> list[int]:
    """The values, all of which must lie in [0, end); ProtocolError otherwise, before anything of a wire-supplied size is built."""
    total = 0
    for start, count in ranges:
        total += count
        if start < 0 or count < 1 or start + count > end or total > end:
            raise ProtocolError(f"a range of {count} from {start} lies outside [0, {end})")
    return [value for start, count in ranges for value in range(start, start + count)]


class SeqSet:
    """Numbers seen so far, most of which form one run from 0: memory is the number of those ahead of the run."""

    def __init__(self) -> None:
        self._run = 0
        self._ahead: set[int] = set()

    def __contains__(self, value: int) -> bool:
        return value < self._run or value in self._ahead

    def __len__(self) -> int:
        return self._run + len(self._ahead)

    def add(self, value: int) -> None:
        if value in self:
            return
        self._ahead.add(value)
        while self._run in self._ahead:
            self._ahead.remove(self._run)
            self._run += 1

    def missing_below(self, end: int) -> list[int]:
        return [value for value in range(self._run, end) if value not in self._ahead]

    def ranges(self) -> Ranges:
        ahead = to_ranges(self._ahead)
        return ((0, self._run), *ahead) if self._run else ahead
