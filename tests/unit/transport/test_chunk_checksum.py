"""The checksum of a chunk: one of each unit, so that they can be formed side by side."""

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared.transport.protocol.frames import chunk_checksum, join_checksums


def test_one_unit_is_summed_as_it_is():
    assert chunk_checksum(b"pagewire", 1) == xxhash.xxh3_64_intdigest(b"pagewire")


@given(part_nbytes=st.integers(1, 40), num_parts=st.integers(2, 9), data=st.data())
def test_any_changed_byte_and_any_swapped_units_change_it(part_nbytes, num_parts, data):
    payload = bytearray(data.draw(st.binary(min_size=part_nbytes * num_parts, max_size=part_nbytes * num_parts)))
    before = chunk_checksum(memoryview(payload), num_parts)
    assert before == join_checksums([xxhash.xxh3_64_intdigest(payload[i * part_nbytes : (i + 1) * part_nbytes]) for i in range(num_parts)])
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert chunk_checksum(memoryview(payload), num_parts) != before
