"""In which number format KV travels, and how it is turned from the sender's into the receiver's.

Two workers of one format exchange bytes. Where they differ, only what is exact happens by itself: the sender's format travels, and the
receiver widens it. Where it is asked for (kv_wire_dtype = "fp8" at both ends), fp32, bf16 and fp16 travel as E4M3 with one fp32 factor for
K and one for V of each layer of each unit: every value arrives within 1/16 of itself, or within 3e-6 of the largest one of its group (or of
2^-126). What is no finite number arrives as NaN and harms no other; what is too large for the receiver's format arrives as its largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from shared.transport.protocol.frames import KVDtype, ScaleCode

WireDtypeName = Literal["auto", "fp8"]
_NUMPY: dict[KVDtype, np.dtype[np.generic]] = {
    KVDtype.FLOAT32: np.dtype(np.float32),
    KVDtype.FLOAT16: np.dtype(np.float16),
    KVDtype.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    KVDtype.FLOAT8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    KVDtype.FLOAT8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
}
_WIDER = {
    KVDtype.FLOAT16: {KVDtype.FLOAT32},
    KVDtype.BFLOAT16: {KVDtype.FLOAT32},
    KVDtype.FLOAT8_E4M3: {KVDtype.FLOAT16, KVDtype.BFLOAT16, KVDtype.FLOAT32},
    KVDtype.FLOAT8_E5M2: {KVDtype.FLOAT16, KVDtype.BFLOAT16, KVDtype.FLOAT32},
}
"""Formats that hold every value of the key."""
_FP8_MAX = np.float32(448)
_FLOAT32_TINY = np.finfo(np.float32).tiny
_FLOAT16_MAX = np.float32(65504)


@dataclass(frozen=True, slots=True)
class WireCodec:
    """`source`, `wire`, `target`: the formats at the sender, on the way and at the receiver."""

    source: KVDtype
    wire: KVDtype
    target: KVDtype
    scale: ScaleCode = ScaleCode.NONE

    @classmethod
    def between(cls, source: KVDtype, target: KVDtype, asked: WireDtypeName) -> WireCodec | None:
        """None: there is no exact way, and no inexact one was asked for."""
        if asked == "fp8" and source.itemsize > 1 and target.itemsize > 1:
            return cls(source, KVDtype.FLOAT8_E4M3, target, ScaleCode.PER_UNIT_LAYER_KV)
        if source is target or target in _WIDER.get(source, ()):
            return cls(source, source, target)
        return None

    @property
    def is_plain(self) -> bool:
        """What travels is what stands in the sender's blocks."""
        return self.scale is ScaleCode.NONE

    @property
    def scale_nbytes(self) -> int:
        """Of one group: K or V of one layer of one unit."""
        return 4 if self.scale is ScaleCode.PER_UNIT_LAYER_KV else 0

    def encode(self, data: memoryview, num_groups: int) -> memoryview:
        """What travels for `data`, whose groups stand one after the other; `data` itself where nothing is to be done."""
        if self.is_plain:
            return data
        values = np.frombuffer(data, _NUMPY[self.source]).reshape(num_groups, -1).astype(np.float32)
        largest = np.abs(values).max(axis=1)
        if not np.isfinite(largest).all():
            values[~np.isfinite(values)] = np.nan
            largest = np.abs(values).max(axis=1, where=np.isfinite(values), initial=0)
        # A denormal factor would be too coarse, or zero.
        factors = np.maximum(largest / _FP8_MAX, _FLOAT32_TINY).astype(np.float32)
        coded = (values / factors[:, None]).astype(ml_dtypes.float8_e4m3fn)
        return np.concatenate([coded.view(np.uint8).reshape(-1), factors.view(np.uint8)]).data

    def decode(self, payload: memoryview, num_groups: int) -> memoryview:
        """The values in the receiver's format; `payload` itself where nothing is to be done."""
        if self.wire is self.target:
            return payload
        data_nbytes = payload.nbytes - num_groups * self.scale_nbytes
        coded = np.frombuffer(payload[:data_nbytes], _NUMPY[self.wire])
        if self.scale is ScaleCode.NONE:
            return coded.astype(_NUMPY[self.target]).view(np.uint8).data
        factors = np.frombuffer(payload[data_nbytes:], np.float32)
        values = coded.reshape(num_groups, -1).astype(np.float32) * factors[:, None]
        if self.target is KVDtype.FLOAT16:
            np.clip(values, -_FLOAT16_MAX, _FLOAT16_MAX, out=values)
        return values.astype(_NUMPY[self.target]).view(np.uint8).reshape(-1).data
