from __future__ import annotations

import gguf
import numpy as np
import pytest

from shared.errors import ModelLoadError
from shared.model_files.dequantize import TENSOR_TYPES, dequantize, ggml_type_name
from shared.model_files.stored_tensor import StoredTensor

# Where each type keeps its float16 scales: random bytes there could be NaN, which never compares equal.
_SCALES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}


def random_tensor(type_name: str, shape: tuple[int, int], seed: int = 0) -> StoredTensor:
    rng = np.random.default_rng(seed)
    tensor_type = TENSOR_TYPES[type_name]
    count = shape[0] * shape[1] // tensor_type.block_size
    if type_name in ("F32", "F16", "BF16"):
        values = rng.normal(size=shape).astype(np.float32)
        data = {
            "F32": values.view(np.uint8),
            "F16": values.astype(np.float16).view(np.uint8),
            "BF16": (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
        }[type_name].reshape(-1)
    else:
        blocks = rng.integers(0, 256, (count, tensor_type.block_bytes), dtype=np.uint8)
        for start in _SCALES[type_name]:
            blocks[:, start : start + 2] = rng.normal(size=(count, 1)).astype(np.float16).view(np.uint8)
        data = blocks.reshape(-1)
    return StoredTensor("w", shape, type_name, data)


@pytest.mark.parametrize("shape", [(3, 256), (1030, 512)])
@pytest.mark.parametrize("type_name", sorted(TENSOR_TYPES))
def test_dequantize_is_bit_equal_with_the_gguf_package(type_name: str, shape: tuple[int, int]) -> None:
    tensor = random_tensor(type_name, shape)
    theirs = gguf.dequantize(tensor.data.reshape(shape[0], -1), gguf.GGMLQuantizationType[type_name]).astype(np.float32)
    np.testing.assert_array_equal(dequantize(tensor).view(np.uint32), np.ascontiguousarray(theirs).view(np.uint32).reshape(shape))


def test_q4_1_follows_the_formula_with_low_nibbles_first() -> None:
    d, m = np.array([[0.5], [-2.0], [0.25], [1.0]], np.float16), np.array([[1.0], [3.0], [-1.0], [0.0]], np.float16)
    nibbles = np.arange(4 * 32).reshape(4, 32) * 7 % 16
    packed = (nibbles[:, :16] | nibbles[:, 16:] << 4).astype(np.uint8)
    data = np.concatenate([d.view(np.uint8), m.view(np.uint8), packed], axis=1).reshape(-1)
    expected = (d.astype(np.float32) * nibbles + m.astype(np.float32)).astype(np.float32).reshape(2, 64)
    np.testing.assert_array_equal(dequantize(StoredTensor("w", (2, 64), "Q4_1", data)), expected)


def test_q8_0_follows_the_formula() -> None:
    d, q = np.array([[0.5], [-2.0], [0.25], [1.0]], np.float16), (np.arange(4 * 32).reshape(4, 32) * 5 - 100).astype(np.int8)
    data = np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=1).reshape(-1)
    expected = (d.astype(np.float32) * q.astype(np.float32)).reshape(2, 64)
    np.testing.assert_array_equal(dequantize(StoredTensor("w", (2, 64), "Q8_0", data)), expected)


@pytest.mark.parametrize("type_name", ["F16", "Q4_1", "Q6_K"])
def test_row_order_reorders_rows_of_the_result(type_name: str) -> None:
    tensor = random_tensor(type_name, (6, 256), seed=3)
    order = np.array([5, 0, 3, 1, 2, 4])
    np.testing.assert_array_equal(dequantize(tensor, row_order=order), dequantize(tensor)[order])


def test_dequantize_writes_into_the_given_buffer() -> None:
    out = np.full((4, 256), np.nan, np.float32)
    assert dequantize(random_tensor("Q4_0", (4, 256)), out) is out
    assert not np.isnan(out).any()


def test_unsupported_type_is_named_together_with_the_tensor() -> None:
    tensor = StoredTensor("blk.3.ffn_up.weight", (1, 256), ggml_type_name(16), np.empty(0, np.uint8))
    with pytest.raises(ModelLoadError, match=r"blk\.3\.ffn_up\.weight.*IQ2_XXS"):
        dequantize(tensor)


def test_unknown_type_number_is_shown() -> None:
    assert ggml_type_name(999) == "type 999"
