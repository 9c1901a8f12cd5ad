import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ProtocolError
from shared.transport.protocol.seq_ranges import SeqSet, from_ranges, to_ranges


@settings(max_examples=50)
@given(st.lists(st.integers(0, 40)))
def test_ranges_are_the_set_again(values):
    assert from_ranges(to_ranges(values), 41) == sorted(set(values))
    seen = SeqSet()
    for value in values:
        seen.add(value)
    assert seen.ranges() == to_ranges(values)
    assert len(seen) == len(set(values))
    for end in (0, 20, 41):
        assert seen.missing_below(end) == [value for value in range(end) if value not in set(values)]
    assert all((value in seen) == (value in values) for value in range(42))


@pytest.mark.parametrize("ranges", [((0, 1 << 60),), ((-1, 2),), ((3, 0),), ((9, 2),), ((0, 6), (0, 6))])
def test_range_outside_is_refused_before_anything_is_allocated(ranges):
    with pytest.raises(ProtocolError):
        from_ranges(ranges, 10)
