"""How two layouts that differ are matched: units, heads, number formats."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_transfer_pairs import LAYOUT

from shared.errors import TransferError
from shared.transport.protocol.frames import KVDtype
from shared.transport.protocol.kv_layout import head_range
from shared.transport.protocol.wire_dtype import WireCodec
from shared.transport.protocol.wire_plan import IncompatibleError, WirePlan, elected_heads, source_ranks

SIZES = [1, 2, 4, 8, 16]


def _layout(**changes):
    return LAYOUT.model_copy(update=changes)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("src_tp_size", SIZES)
@pytest.mark.parametrize("dst_tp_size", SIZES)
def test_every_head_of_every_receiving_rank_is_sent_exactly_once(num_kv_heads, src_tp_size, dst_tp_size):
    for dst_rank in range(dst_tp_size):
        sent = []
        for src_rank in range(src_tp_size):
            start, count = elected_heads(num_kv_heads, src_rank, src_tp_size, dst_rank, dst_tp_size)
            sent += range(start, start + count)
            held, size = head_range(num_kv_heads, src_rank, src_tp_size)
            assert not count or held <= start <= start + count <= held + size, "a rank sends what it does not hold"
        first, count = head_range(num_kv_heads, dst_rank, dst_tp_size)
        assert sorted(sent) == list(range(first, first + count))


def test_of_replicated_heads_only_the_lowest_rank_sends():
    assert source_ranks(2, 8, 0, 1) == [0, 4]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("model_fingerprint", {"model_fingerprint": "other"}),
        ("num_layers", {"num_layers": 5}),
        ("num_kv_heads", {"num_kv_heads": 4}),
        ("head_dim", {"head_dim": 32}),
        ("block_size", {"block_size": 6}),
        ("dtype", {"dtype": KVDtype.BFLOAT16}),
    ],
)
def test_what_cannot_be_matched_names_the_field(field, changes):
    with pytest.raises(IncompatibleError) as caught:
        WirePlan.between(LAYOUT, _layout(**changes), "auto")
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(("src", "dst"), [(4, 4), (4, 16), (16, 4), (1, 8)])
@given(num_tokens=st.integers(1, 70), data=st.data())
def test_units_cover_the_missing_blocks_and_nothing_else(src, dst, num_tokens, data):
    plan = WirePlan.between(_layout(block_size=src), _layout(block_size=dst), "auto")
    num_blocks = -(-num_tokens // dst)
    missing = data.draw(st.sets(st.integers(0, num_blocks - 1)))
    units = plan.missing_units(missing, num_tokens)
    covered = {unit * plan.unit_tokens + token for unit in units for token in range(plan.tokens_of(unit, num_tokens))}
    assert covered == {token for index in missing for token in range(index * dst, min(num_tokens, (index + 1) * dst))}


def test_a_layer_larger_than_a_chunk_says_what_to_raise():
    plan = WirePlan.between(LAYOUT, LAYOUT, "auto")
    assert plan.layers_per_chunk(4 * LAYOUT.layer_nbytes + 1) == 4
    with pytest.raises(TransferError, match="kv_max_chunk_bytes"):
        plan.layers_per_chunk(LAYOUT.layer_nbytes - 1)


@pytest.mark.parametrize(
    ("source", "target", "is_exact"),
    [
        (KVDtype.BFLOAT16, KVDtype.FLOAT32, True),
        (KVDtype.FLOAT16, KVDtype.FLOAT32, True),
        (KVDtype.FLOAT8_E4M3, KVDtype.BFLOAT16, True),
        (KVDtype.FLOAT8_E5M2, KVDtype.FLOAT16, True),
        (KVDtype.FLOAT32, KVDtype.BFLOAT16, False),
        (KVDtype.FLOAT16, KVDtype.BFLOAT16, False),
        (KVDtype.BFLOAT16, KVDtype.FLOAT16, False),
        (KVDtype.FLOAT16, KVDtype.FLOAT8_E4M3, False),
    ],
)
def test_only_exact_casts_happen_by_themselves(source, target, is_exact):
    codec = WireCodec.between(source, target, "auto")
    assert (codec is not None) == is_exact
    if codec is not None:
        numpy_types = {
            KVDtype.FLOAT32: np.float32,
            KVDtype.FLOAT16: np.float16,
            KVDtype.BFLOAT16: ml_dtypes.bfloat16,
            KVDtype.FLOAT8_E4M3: ml_dtypes.float8_e4m3fn,
            KVDtype.FLOAT8_E5M2: ml_dtypes.float8_e5m2,
        }
        bits = np.arange(1 << (8 * source.itemsize), dtype=np.uint16 if source.itemsize == 2 else np.uint8)
        decoded = np.frombuffer(codec.decode(codec.encode(bits.view(np.uint8).data, 1), 1), numpy_types[target])
        values, arrived = bits.view(numpy_types[source]).astype(np.float64), decoded.astype(np.float64)
        assert np.array_equal(values, arrived, equal_nan=True), "every value of the narrower format must arrive as it is"


@pytest.mark.parametrize("target", [KVDtype.FLOAT32, KVDtype.FLOAT16, KVDtype.BFLOAT16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_fp8_on_the_wire_keeps_its_stated_tolerance(target, scale):
    codec = WireCodec.between(KVDtype.FLOAT32, target, "fp8")
    groups = np.random.default_rng(0).standard_normal((6, 500)).astype(np.float32) * scale
    groups[5] = 0.0
    payload = codec.encode(groups.view(np.uint8).reshape(-1).data, 6)
    assert payload.nbytes == groups.size + 6 * 4
    dtype = {KVDtype.FLOAT32: np.float32, KVDtype.FLOAT16: np.float16, KVDtype.BFLOAT16: ml_dtypes.bfloat16}[target]
    arrived = np.frombuffer(codec.decode(payload, 6), dtype).reshape(groups.shape).astype(np.float64)
    rounding = {np.float32: 0.0, np.float16: 2.0**-11, ml_dtypes.bfloat16: 2.0**-8}[dtype]
    floor = 2.0**-25 if dtype is np.float16 else 0.0  # half a step of the smallest half-precision numbers
    allowed = np.abs(groups) * (1 / 16 + 2 * rounding) + np.abs(groups).max(axis=1, keepdims=True) * 3e-6 + floor
    assert (np.abs(arrived - groups) <= allowed).all()
    assert (arrived[5] == 0).all()
