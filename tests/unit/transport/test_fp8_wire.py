"""E4M3 on the wire: what is odd in a group of values stays its own affair."""

import ml_dtypes
import numpy as np
import pytest

from shared.transport.protocol.frames import KVDtype
from shared.transport.protocol.wire_dtype import WireCodec

NUMPY = {KVDtype.FLOAT32: np.float32, KVDtype.FLOAT16: np.float16, KVDtype.BFLOAT16: ml_dtypes.bfloat16}


def travel(values: np.ndarray, source: KVDtype = KVDtype.FLOAT32, target: KVDtype = KVDtype.FLOAT32) -> np.ndarray:
    """One group of values, as it arrives."""
    codec = WireCodec.between(source, target, "fp8")
    assert codec is not None
    data = values.astype(NUMPY[source]).view(np.uint8)
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        return np.frombuffer(codec.decode(codec.encode(data.data, 1), 1), NUMPY[target]).astype(np.float64)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_harms_no_other(odd):
    values = np.linspace(-3e-4, 3e-4, 64, dtype=np.float32)
    values[7] = odd
    arrived = travel(values)
    assert np.isnan(arrived[7])
    others = np.arange(64) != 7
    assert np.allclose(arrived[others], values[others], rtol=1 / 16, atol=3e-6 * 3e-4)


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-43, 1e-40, 1e-37, 1e-36, 3e38])
def test_the_smallest_and_the_largest_groups_arrive_as_numbers(largest):
    values = np.float32(largest) * np.linspace(-1, 1, 65, dtype=np.float32)
    arrived = travel(values)
    assert np.allclose(arrived, values, rtol=1 / 16, atol=max(3e-6 * largest, 2.0**-135))


def test_what_is_too_large_for_the_receivers_format_arrives_as_its_largest_value():
    arrived = travel(np.array([1e6, -1e6, 60000.0, 1.0]), KVDtype.BFLOAT16, KVDtype.FLOAT16)
    assert arrived[:2].tolist() == [65504.0, -65504.0]
    assert np.allclose(arrived[2], 60000.0, rtol=1 / 16)


def test_the_largest_half_stays_finite():
    assert np.isfinite(travel(np.array([65504.0, -65504.0, 3.0]), KVDtype.FLOAT16, KVDtype.FLOAT16)).all()
