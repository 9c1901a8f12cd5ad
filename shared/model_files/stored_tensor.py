"""A tensor as it lies in a weight file: a name, a logical shape, a storage type and a view of its bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    """Row-major, outermost first: a linear layer is (out, in)."""
    type_name: str
    """F32, F16, BF16, or a GGML quantisation such as Q4_1."""
    data: NDArray[np.uint8]
    """Flat bytes, read-only, mapped from the file: nothing is read before it is touched."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def row(self, index: int) -> StoredTensor:
        """One item of the outermost dimension, still in place."""
        size = len(self.data) // self.shape[0]
        return StoredTensor(self.name, self.shape[1:], self.type_name, self.data[index * size : (index + 1) * size])
