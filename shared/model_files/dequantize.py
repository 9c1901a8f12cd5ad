"""Stored weights to float32, vectorised: a tile of blocks at a time, straight into the caller's buffer.

Block layouts (GGML): a row is a whole number of blocks; each block holds its scales first, then packed integers. Results are bit
equal with the `gguf` package (same operations in the same order, float32 throughout). numpy releases the GIL in the inner
loops, so two threads on two tensors run side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelLoadError
from shared.model_files.stored_tensor import StoredTensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# 2^18 float32 = 1 MiB: input, scratch and output of a tile stay in the L2 cache.
_TILE_ELEMENTS = 1 << 18
_UNSUPPORTED_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _halves(blocks: Bytes, start: int) -> Floats:
    """One float16 of every block as [num_blocks, 1] float32."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[num_blocks, groups, n] -> [num_blocks, groups, 2, n]: all low nibbles of a group, then all high ones."""
    num_blocks, num_groups, size = packed.shape
    split = np.empty((num_blocks, num_groups, 2, size), dtype=np.uint8)
    np.bitwise_and(packed, 0x0F, out=split[:, :, 0])
    np.right_shift(packed, 4, out=split[:, :, 1])
    return split


def _f32(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, np.ascontiguousarray(blocks).view("<f4"))


def _f16(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, np.ascontiguousarray(blocks).view("<f2"))


def _bf16(blocks: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, np.ascontiguousarray(blocks).view("<u2"))
    bits <<= 16


def _q8_0(blocks: Bytes, out: Floats) -> None:
    """x = d q;  d float16, 32 x int8."""
    np.copyto(out, blocks[:, 2:].view(np.int8))
    out *= _halves(blocks, 0)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    """x = d (q - 8);  d float16, 32 nibbles."""
    np.copyto(out, _nibbles(blocks[:, None, 2:]).reshape(out.shape))
    out -= np.float32(8)
    out *= _halves(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    """x = d q + m;  d, m float16, 32 nibbles."""
    np.copyto(out, _nibbles(blocks[:, None, 4:]).reshape(out.shape))
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """A bit of every item of a block of 32, where it stands in the item: [num_blocks, 32]."""
    return np.unpackbits(blocks[:, start : start + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    """x = d (q - 16);  d float16, 32 fifth bits, 32 nibbles."""
    np.copyto(out, _nibbles(blocks[:, None, 6:]).reshape(out.shape) | _fifth_bits(blocks, 2))
    out -= np.float32(16)
    out *= _halves(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    """x = d q + m;  d, m float16, 32 fifth bits, 32 nibbles."""
    np.copyto(out, _nibbles(blocks[:, None, 8:]).reshape(out.shape) | _fifth_bits(blocks, 4))
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _pairs_of_bits(packed: Bytes) -> Bytes:
    """[num_blocks, 64] -> [num_blocks, 16, 16]: of each half of the bytes first all lowest two bits, then the next two, ..."""
    halves = packed.reshape(len(packed), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (halves & np.uint8(0x03)).reshape(len(packed), 16, 16)


def _q2_k(blocks: Bytes, out: Floats) -> None:
    """x = (d s_j) q - (dmin m_j);  16 groups of 16, s and m in 4 bits each, q in 2."""
    scales = (blocks[:, :16] & 0x0F).astype(np.float32) * _halves(blocks, 80)
    minima = (blocks[:, :16] >> 4).astype(np.float32) * _halves(blocks, 82)
    groups = out.reshape(len(blocks), 16, 16)
    np.copyto(groups, _pairs_of_bits(blocks[:, 16:80]))
    groups *= scales[:, :, None]
    groups -= minima[:, :, None]


def _q3_k(blocks: Bytes, out: Floats) -> None:
    """x = (d (s_j - 32)) q;  16 groups of 16, s in 6 bits, q = 2 low bits, less 4 where the high bit is not set."""
    num_blocks = len(blocks)
    low = _nibbles(blocks[:, None, 96:104]).reshape(num_blocks, 16)
    high = (blocks[:, 104:108].reshape(num_blocks, 1, 4) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 0x03
    scales = (low | (high.reshape(num_blocks, 16) << 4)).astype(np.float32)
    scales -= np.float32(32)
    scales *= _halves(blocks, 108)
    is_set = (blocks[:, :32].reshape(num_blocks, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]) & 0x01
    groups = out.reshape(num_blocks, 16, 16)
    np.copyto(groups, _pairs_of_bits(blocks[:, 32:96]) | (is_set << 2).reshape(groups.shape))
    groups -= np.float32(4)
    groups *= scales[:, :, None]


def _k_scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """d s_j and dmin m_j of the 8 groups of a block of Q4_K or Q5_K, s and m packed in 6 bits each: [num_blocks, 8, 1]."""
    packed = blocks[:, 4:16].reshape(len(blocks), 3, 4)
    low, high, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([low & 0x3F, (rest & 0x0F) | ((low >> 2) & 0x30)], axis=-1).astype(np.float32)
    minima = np.concatenate([high & 0x3F, (rest >> 4) | ((high >> 2) & 0x30)], axis=-1).astype(np.float32)
    scales *= _halves(blocks, 0)
    minima *= _halves(blocks, 2)
    return scales[:, :, None], minima[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    """x = (d s_j) q - (dmin m_j);  8 groups of 32."""
    scales, minima = _k_scales_and_minima(blocks)
    groups = out.reshape(len(blocks), 8, 32)
    np.copyto(groups, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(groups.shape))
    groups *= scales
    groups -= minima


def _q5_k(blocks: Bytes, out: Floats) -> None:
    """As Q4_K; bit j of byte i is the fifth of item i of group j."""
    scales, minima = _k_scales_and_minima(blocks)
    groups = out.reshape(len(blocks), 8, 32)
    fifth = ((blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]) & 0x01) << 4
    np.copyto(groups, _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(groups.shape) | fifth)
    groups *= scales
    groups -= minima


def _q6_k(blocks: Bytes, out: Floats) -> None:
    """x = (d s_j) (q - 32);  16 groups of 16, q = 4 low bits + 2 high bits."""
    num_blocks = len(blocks)
    quants = _nibbles(blocks[:, :128].reshape(num_blocks, 2, 64)).reshape(num_blocks, 2, 4, 32)
    high = blocks[:, 128:192].reshape(num_blocks, 2, 32)
    for pair in range(4):
        quants[:, :, pair] |= ((high >> (2 * pair)) & 0x03) << 4
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scales *= _halves(blocks, 208)
    groups = out.reshape(num_blocks, 16, 16)
    np.copyto(groups, quants.reshape(groups.shape))
    groups -= np.float32(32)
    groups *= scales[:, :, None]


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    """x = d v_q;  d float16, 32 nibbles that are places in a table."""
    np.copyto(out, _IQ4_VALUES[_nibbles(blocks[:, None, 2:]).reshape(out.shape)])
    out *= _halves(blocks, 0)


def _iq4_xs(blocks: Bytes, out: Floats) -> None:
    """x = (d (s_j - 32)) v_q;  8 groups of 32, s in 4 low and 2 high bits."""
    num_blocks = len(blocks)
    low = (blocks[:, 4:8].reshape(num_blocks, 4, 1) >> np.array([0, 4], np.uint8)) & 0x0F
    high = (blocks[:, 2:4].reshape(num_blocks, 2, 1) >> np.array([0, 2, 4, 6], np.uint8)) & 0x03
    scales = (low.reshape(num_blocks, 8) | (high.reshape(num_blocks, 8) << 4)).astype(np.float32)
    scales -= np.float32(32)
    scales *= _halves(blocks, 0)
    groups = out.reshape(num_blocks, 8, 32)
    np.copyto(groups, _IQ4_VALUES[_nibbles(blocks[:, 8:].reshape(num_blocks, 8, 16)).reshape(groups.shape)])
    groups *= scales[:, :, None]


@dataclass(frozen=True, slots=True)
class TensorType:
    name: str
    block_size: int
    """Elements in a block."""
    block_bytes: int
    expand: Callable[[Bytes, Floats], None]
    """[n, block_bytes] uint8 -> [n, block_size] float32, in place."""


_BY_GGML_ID = {
    0: TensorType("F32", 1, 4, _f32),
    1: TensorType("F16", 1, 2, _f16),
    2: TensorType("Q4_0", 32, 18, _q4_0),
    3: TensorType("Q4_1", 32, 20, _q4_1),
    6: TensorType("Q5_0", 32, 22, _q5_0),
    7: TensorType("Q5_1", 32, 24, _q5_1),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    10: TensorType("Q2_K", 256, 84, _q2_k),
    11: TensorType("Q3_K", 256, 110, _q3_k),
    12: TensorType("Q4_K", 256, 144, _q4_k),
    13: TensorType("Q5_K", 256, 176, _q5_k),
    14: TensorType("Q6_K", 256, 210, _q6_k),
    20: TensorType("IQ4_NL", 32, 18, _iq4_nl),
    23: TensorType("IQ4_XS", 256, 136, _iq4_xs),
    30: TensorType("BF16", 1, 2, _bf16),
}
TENSOR_TYPES = {tensor_type.name: tensor_type for tensor_type in _BY_GGML_ID.values()}


def ggml_type_name(ggml_id: int) -> str:
    """The name of a GGML type number, whether we can read it or not."""
    known = _BY_GGML_ID.get(ggml_id)
    return known.name if known else _UNSUPPORTED_TYPES.get(ggml_id, f"type {ggml_id}")


def require_supported(tensor: StoredTensor) -> TensorType:
    """Raises ModelLoadError naming the tensor and its type when we cannot dequantise it."""
    tensor_type = TENSOR_TYPES.get(tensor.type_name)
    if tensor_type is None:
        readable = ", ".join(TENSOR_TYPES)
        raise ModelLoadError(
            f"tensor {tensor.name} is stored as {tensor.type_name}; readable types are {readable}: use another quantisation"
        )
    return tensor_type


def dequantize(tensor: StoredTensor, out: Floats | None = None, row_order: NDArray[np.intp] | None = None) -> Floats:
    """`tensor` as float32 of its own shape, written to `out` (C contiguous) when given.

    `row_order`: row i of the result is row `row_order[i]` of the tensor (rows are reordered while still packed, which is cheap).
    """
    tensor_type = require_supported(tensor)
    if out is None:
        out = np.empty(tensor.shape, dtype=np.float32)
    assert out.shape == tensor.shape and out.dtype == np.float32 and out.flags.c_contiguous
    data = tensor.data
    if row_order is not None:
        data = data.reshape(tensor.shape[0], -1)[row_order].reshape(-1)
    blocks = data.reshape(-1, tensor_type.block_bytes)
    values = out.reshape(-1, tensor_type.block_size)
    step = _TILE_ELEMENTS // tensor_type.block_size
    for start in range(0, len(blocks), step):
        tensor_type.expand(blocks[start : start + step], values[start : start + step])
    return out
