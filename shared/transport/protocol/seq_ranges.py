"""Sets of small integers as (start, count) ranges: how chunk numbers and block indices travel in control messages."""

from __future__ import annotations

from bisect import bisect_right
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
    """Numbers seen so far, which form few runs: memory, and the time to list them, grow with the runs, not with the numbers."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        """Of the runs, ascending; no two touch."""
        self._count = 0

    def __contains__(self, value: int) -> bool:
        run = bisect_right(self._starts, value) - 1
        return run >= 0 and value < self._ends[run]

    def __len__(self) -> int:
        return self._count

    def add(self, value: int) -> None:
        if value in self:
            return
        self._count += 1
        after = bisect_right(self._starts, value)
        ends_here = after > 0 and self._ends[after - 1] == value
        starts_next = after < len(self._starts) and self._starts[after] == value + 1
        if ends_here and starts_next:
            self._ends[after - 1] = self._ends.pop(after)
            del self._starts[after]
        elif ends_here:
            self._ends[after - 1] = value + 1
        elif starts_next:
            self._starts[after] = value
        else:
            self._starts.insert(after, value)
            self._ends.insert(after, value + 1)

    def missing_below(self, end: int) -> list[int]:
        gaps = zip([0, *self._ends], [*self._starts, end], strict=True)
        return [value for start, stop in gaps for value in range(start, min(stop, end))]

    def ranges(self) -> Ranges:
        return tuple((start, end - start) for start, end in zip(self._starts, self._ends, strict=True))
