"""Where weights are read to: the matrices of a layer lie side by side, so that projections of one input are one matrix as they stand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shared.model_files.weight_names import ExpectedWeight

_ALIGNMENT_ITEMS = 32
"""64 bytes of a 16-bit type, 128 of fp32."""


@dataclass(frozen=True, slots=True)
class WeightBuffer:
    """One piece of memory, in items."""

    size: int
    starts: dict[str, int]
    """Name -> its first item."""


def weight_buffers(expected: Iterable[ExpectedWeight]) -> list[WeightBuffer]:
    """One buffer for the matrices of each layer, in their order; one for each other weight: a small one must keep no large one alive."""
    members: dict[str, list[ExpectedWeight]] = {}
    for weight in expected:
        is_of_layer = weight.name.startswith("model.layers.") and len(weight.shape) == 2
        members.setdefault(weight.name.split(".")[2] if is_of_layer else weight.name, []).append(weight)
    return [_buffer(weights) for weights in members.values()]


def _buffer(weights: list[ExpectedWeight]) -> WeightBuffer:
    starts: dict[str, int] = {}
    end = 0
    for weight in weights:
        starts[weight.name] = -(-end // _ALIGNMENT_ITEMS) * _ALIGNMENT_ITEMS
        end = starts[weight.name] + math.prod(weight.shape)
    return WeightBuffer(end, starts)
